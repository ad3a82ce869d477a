"""Policy losses, token by token.

Invariant: a token's loss depends on its own log-prob and advantage (GSPO: on its sequence's too) and on
nothing in the batch, so any split into micro-batches that keeps sequences whole gives the same sum.
Formulas: PPO (arXiv 1707.06347), clip-higher (DAPO, arXiv 2503.14476), dual clip (arXiv 1912.09729),
GSPO (arXiv 2507.18071), CISPO (arXiv 2506.13585).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tiderl.training.correction import sequence_sum
from tiderl.training.settings import LossSettings

LOG_RATIO_CLAMP = 20.0
GSPO_CLAMP = 10.0


@dataclass
class TokenLosses:
    """Result of `policy_loss`; tensors of shape (tokens,)."""

    loss: torch.Tensor
    ratio: torch.Tensor
    """pi / pi_old, detached."""
    clipped: torch.Tensor
    """True where the clip removed the gradient."""


def _clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, settings: LossSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """max(-A rho, -A clip(rho)), with dual clip min(., -A c) for A < 0; and where a clip is active."""
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if settings.dual_clip is not None:
        ceiling = -advantages * settings.dual_clip
        over = (advantages < 0) & (loss > ceiling)
        loss = torch.where(over, ceiling, loss)
        clipped = clipped | over
    return loss, clipped.detach()


def policy_loss(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    sequence: torch.Tensor,
    sequences: int,
    settings: LossSettings,
) -> TokenLosses:
    """Loss of each token (to be minimised), before correction, KL and aggregation.

    Args:
        logprobs: log pi of the sampled tokens, with gradient; shape (tokens,).
        old: log pi_old of the same tokens, no gradient.
        advantages: advantage of each token.
        sequence: index of each token's sequence, < `sequences`; every sequence must be whole.
    """
    difference = logprobs - old
    if settings.policy == "gspo":
        one = torch.ones_like(difference)
        length = sequence_sum(one, sequence, sequences).clamp(min=1.0)
        mean = (sequence_sum(difference.detach(), sequence, sequences) / length)[sequence]
        # value s_i, gradient s_i x grad log pi_t: stop-gradient(s_i) x pi / stop-gradient(pi)
        log_ratio = mean + (logprobs - logprobs.detach())
        ratio = log_ratio.clamp(max=GSPO_CLAMP).exp()
        loss, clipped = _clipped_surrogate(ratio, advantages, settings)
    elif settings.policy == "cispo":
        ratio = difference.detach().clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
        weight = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
        loss, clipped = -weight * advantages * logprobs, weight != ratio
    else:
        ratio = difference.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
        loss, clipped = _clipped_surrogate(ratio, advantages, settings)
    return TokenLosses(loss=loss, ratio=ratio.detach(), clipped=clipped)
