"""LoRA adapters made by peft, computed through merged weights.

Invariant: between two optimizer steps the effective weight W + (alpha / rank) B A is a constant, made once
by `refresh`; the forward pass uses it as one plain product, the backward pass gives A and B the gradient
they have in the two-branch form. The base weight W itself is never written.

The effective weight is rounded to the model's dtype, as it is when it is published: trainer and sampler
evaluate the same numbers, and steps below that rounding still accumulate in the float32 adapters.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tiderl.errors import ConfigError
from tiderl.training.products import linear, product
from tiderl.training.settings import LoraSettings

ADAPTER = "default"


class _MergedLinear(torch.autograd.Function):
    """y = x (W + s B A)^T + b; gradients for x, A and B."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        merged: torch.Tensor,
        backward_merged: torch.Tensor,
        bias: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, a, b, backward_merged)
        ctx.scale = scale
        return linear(x, merged, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, a, b, merged = ctx.saved_tensors
        flat, g = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        low = product(g, (b * ctx.scale).to(g.dtype))
        grad_a = product(low.t(), flat).to(a.dtype)
        grad_b = product(linear(flat, a.to(flat.dtype)).t(), g).t().to(b.dtype) * ctx.scale
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = product(g.to(merged.dtype), merged).to(x.dtype).view(x.shape)
        return grad_x, grad_a, grad_b, None, None, None, None


class LoraSite:
    """One adapted linear layer: its peft module, its name in the base model and its effective weight."""

    def __init__(self, name: str, module: Any, backward_dtype: torch.dtype) -> None:
        self.name = name
        self.base: torch.nn.Linear = module.base_layer
        self.a: torch.nn.Parameter = module.lora_A[ADAPTER].weight
        self.b: torch.nn.Parameter = module.lora_B[ADAPTER].weight
        self.scale = float(module.scaling[ADAPTER])
        self.merged = self.base.weight.detach().clone()
        # what the backward pass multiplies by: the same tensor, or a copy in lower precision
        self.backward_merged = self.merged.to(backward_dtype)
        self.enabled = True

    @torch.no_grad()
    def refresh(self) -> None:
        """Recompute the effective weight from base and adapter (in float32, then rounded)."""
        delta = torch.addmm(self.base.weight.float(), self.b, self.a, alpha=self.scale)
        self.merged.copy_(delta)
        if self.backward_merged is not self.merged:
            self.backward_merged.copy_(self.merged)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.enabled:
            return linear(x, self.base.weight, self.base.bias)
        if not torch.is_grad_enabled():
            return linear(x, self.merged, self.base.bias)
        return _MergedLinear.apply(
            x, self.a, self.b, self.merged, self.backward_merged, self.base.bias, self.scale
        )


class LoraSites:
    """All adapted layers of a model."""

    def __init__(self, sites: list[LoraSite]) -> None:
        self.sites = sites

    def __iter__(self) -> Iterator[LoraSite]:
        return iter(self.sites)

    def refresh(self) -> None:
        """Must follow every change of the adapter's parameters."""
        for site in self.sites:
            site.refresh()

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside, the model computes with its base weights."""
        for site in self.sites:
            site.enabled = False
        try:
            yield
        finally:
            for site in self.sites:
                site.enabled = True


def attach(model: Any, settings: LoraSettings, backward_dtype: torch.dtype) -> tuple[Any, LoraSites]:
    """Wrap `model` with fresh fp32 adapters (B = 0, so nothing changes yet); returns (PeftModel, sites).

    Raises:
        ConfigError: no linear layer has one of the target names.
    """
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import Linear as PeftLinear

    targets = settings.targets if isinstance(settings.targets, str) else list(settings.targets)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    try:
        wrapped = get_peft_model(model, config, adapter_name=ADAPTER, autocast_adapter_dtype=True)
    except ValueError as error:
        linear = sorted(
            {n.rsplit(".", 1)[-1] for n, m in model.named_modules() if type(m) is torch.nn.Linear}
        )
        raise ConfigError(
            f"targets is {settings.targets!r}, which the model does not have",
            where="lora",
            fix=f"use 'all-linear' or names among {', '.join(linear)}",
        ) from error
    sites = []
    for name, module in wrapped.get_base_model().named_modules():
        if not isinstance(module, PeftLinear):
            continue
        site = LoraSite(name, module, backward_dtype)
        module.forward = types.MethodType(lambda _self, x, *, _site=site: _site.forward(x), module)
        sites.append(site)
    return wrapped, LoraSites(sites)
