"""Truncated importance weights for a sampler that is not the trainer (TIS, arXiv 2505.24034).

Invariant: weights are detached and positive; they never change a denominator.
"""

from __future__ import annotations

import torch

from tiderl.training.settings import Correction

LOG_CLAMP = 20.0


def sequence_sum(values: torch.Tensor, sequence: torch.Tensor, sequences: int) -> torch.Tensor:
    """Sum of `values` (tokens,) over each sequence; `sequence` (tokens,) holds indices < `sequences`."""
    return torch.zeros(sequences, dtype=values.dtype, device=values.device).index_add(0, sequence, values)


def correction_weights(
    kind: Correction | None,
    old: torch.Tensor,
    rollout: torch.Tensor,
    sequence: torch.Tensor,
    sequences: int,
    cap: float,
) -> torch.Tensor | None:
    """Weight of each token, shape (tokens,), from kappa = exp(old - rollout); None for no correction.

    tis_token: min(kappa_t, cap). tis_sequence: min(product of kappa over the sequence, cap), on all its
    tokens.
    """
    if kind is None:
        return None
    log_kappa = (old - rollout).detach()
    if kind == "tis_sequence":
        log_kappa = sequence_sum(log_kappa, sequence, sequences)[sequence]
    return log_kappa.clamp(-LOG_CLAMP, LOG_CLAMP).exp().clamp(max=cap)
