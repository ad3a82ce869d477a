"""Matrix products outside autograd, by the faster of the CPU's libraries.

Invariant: plain products in the precision of their arguments. On a CPU, float32 goes to oneDNN, whose kernels
follow the processor's instructions; torch's own choice, MKL, runs at half that speed on processors that are
not Intel's. Where oneDNN is missing the product is torch's.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F


@lru_cache(maxsize=1)
def _has_onednn() -> bool:
    """True when this torch build has oneDNN's linear layer for dense tensors and it computes right."""
    if not torch.backends.mkldnn.is_available():
        return False
    x, w = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
    try:
        got = torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return bool(torch.equal(got, F.linear(x, w)))


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x weight^T + bias: (..., k), (n, k), (n,) -> (..., n). Carries no gradient."""
    with torch.no_grad():
        if x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32 and _has_onednn():
            return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return F.linear(x, weight, bias)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b: (m, k), (k, n) -> (m, n). Carries no gradient."""
    return linear(a, b.t())


def batched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b for each entry of a short batch: (h, m, k), (h, k, n) -> (h, m, n). Carries no gradient."""
    if a.device.type == "cpu" and a.dtype == torch.float32 and _has_onednn():
        return torch.stack([product(x, y) for x, y in zip(a, b, strict=True)])
    with torch.no_grad():
        return torch.bmm(a, b)
