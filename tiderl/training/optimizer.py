"""AdamW over float32 master weights, with clipping and linear warm-up.

Invariant: gradients are summed in float32 over any number of micro-batches and divided once, at the step,
by the global denominator; with learning rate 0 a step leaves every parameter bit-equal.
"""

from __future__ import annotations

from typing import Any

import torch

from tiderl.errors import ModelError
from tiderl.training.settings import OptimSettings


class Optimizer:
    """Steps `parameters`; those below float32 get a float32 master copy."""

    def __init__(self, parameters: list[torch.nn.Parameter], settings: OptimSettings) -> None:
        self.settings = settings
        self.parameters = parameters
        self.masters = [
            p if p.dtype == torch.float32 else torch.nn.Parameter(p.detach().float()) for p in parameters
        ]
        self.adamw = torch.optim.AdamW(
            self.masters,
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        self.updates = 0

    @property
    def next_learning_rate(self) -> float:
        """The rate the next step will use."""
        warm = min(1.0, (self.updates + 1) / self.settings.warmup) if self.settings.warmup else 1.0
        return self.settings.learning_rate * warm

    def collect(self) -> None:
        """Move gradients of low-precision parameters into their masters; after every backward pass."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter is master or parameter.grad is None:
                continue
            grad = parameter.grad.float()
            master.grad = grad if master.grad is None else master.grad.add_(grad)
            parameter.grad = None

    def clear(self) -> None:
        """Forget all gradients."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.grad = master.grad = None

    def step(self, denominator: float) -> tuple[float, float]:
        """Divide, clip, step; returns (gradient norm before clipping, learning rate used).

        Raises:
            ModelError: the gradient is not finite; nothing was changed.
        """
        grads = [m.grad for m in self.masters if m.grad is not None]
        for grad in grads:
            grad.div_(denominator)
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.double()) for g in grads]))
        if not torch.isfinite(norm):
            self.clear()
            raise ModelError(
                f"the gradient's norm is {norm.item()} at update {self.updates + 1}",
                fix="lower optim.learning_rate, or use dtype float32",
            )
        limit = self.settings.max_grad_norm
        if limit and norm > limit:
            for grad in grads:
                grad.mul_(float(limit / norm))
        rate = self.next_learning_rate
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        self.updates += 1
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if parameter is not master:
                    parameter.copy_(master)
        self.clear()
        return float(norm), rate

    def state_dict(self) -> dict[str, Any]:
        """Moments, masters and counters."""
        masters = [m.detach() for p, m in zip(self.parameters, self.masters, strict=True) if p is not m]
        return {"adamw": self.adamw.state_dict(), "masters": masters, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore exactly what `state_dict` gave."""
        self.adamw.load_state_dict(state["adamw"])
        own = [m for p, m in zip(self.parameters, self.masters, strict=True) if p is not m]
        with torch.no_grad():
            for master, saved in zip(own, state["masters"], strict=True):
                master.copy_(saved)
        self.updates = int(state["updates"])
