"""Estimators of KL(pi || pi_ref) from sampled tokens (http://joschu.net/blog/kl-approx.html).

Invariant: each is 0 where the policies agree; k2 and k3 are never negative.
"""

from __future__ import annotations

import torch

from tiderl.training.settings import KlKind

LOG_CLAMP = 20.0
VALUE_CLAMP = 10.0


def kl_penalty(logprobs: torch.Tensor, reference: torch.Tensor, kind: KlKind) -> torch.Tensor:
    """Per-token KL estimate in nats, same shape as `logprobs`, differentiable in it.

    With q = log pi - log pi_ref: k1 = q; k2 = q^2 / 2; k3 = exp(-q) + q - 1, where -q is clamped to
    +-20 and the result to +-10.
    """
    q = logprobs - reference
    if kind == "k1":
        return q
    if kind == "k2":
        return 0.5 * q * q
    negative = (-q).clamp(-LOG_CLAMP, LOG_CLAMP)
    return (negative.exp() - negative - 1.0).clamp(-VALUE_CLAMP, VALUE_CLAMP)


def mismatch_kl(log_kappa: torch.Tensor) -> torch.Tensor:
    """kappa - log kappa - 1 per token: how far trainer and sampler disagree, >= 0, in nats."""
    clamped = log_kappa.clamp(-LOG_CLAMP, LOG_CLAMP)
    return torch.expm1(clamped) - clamped
