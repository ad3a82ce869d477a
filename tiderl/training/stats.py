"""What one update reports, gathered over micro-batches.

Invariant: every figure is over loss tokens of the whole step, whatever the micro-batches.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch


@dataclass
class UpdateStats:
    """One update. Log-probs and KL are in nats, times in seconds."""

    loss: float = 0.0
    policy_loss: float = 0.0
    grad_norm: float = 0.0
    """L2 norm before clipping."""
    tokens: int = 0
    """Loss tokens in the denominator."""
    episodes: int = 0
    max_logprob_gap: float = 0.0
    """Largest |trainer - sampler| over records sampled wholly at the trainer's version; 0 without any."""
    mean_logprob_gap: float = 0.0
    gap_tokens: int = 0
    """How many tokens the gap is over."""
    max_mixed_gap: float = 0.0
    """The same over tokens of the trainer's version in records that also hold older ones: their KV mixes
    versions (weights are updated in flight with KV kept), so this gap is expected to be larger."""
    mixed_tokens: int = 0
    gap_by_turn: list[dict[str, float]] = field(default_factory=list)
    """Per turn index: {"turn", "max", "mean", "tokens"}."""
    mismatch_kl: float = 0.0
    """Mean of kappa - log kappa - 1, kappa = trainer / sampler, over all loss tokens."""
    clip_fraction: float = 0.0
    ratio_mean: float = 1.0
    correction_mean: float = 1.0
    kl: float = 0.0
    """Mean KL estimate against the reference; 0 when its coefficient is 0 (it is not computed)."""
    entropy: float = 0.0
    """Mean entropy of the policy where a loss token was drawn."""
    dropped_groups: int = 0
    skipped_groups: int = 0
    zero_variance_groups: int = 0
    masked_episodes: int = 0
    learning_rate: float = 0.0
    skipped: bool = False
    """No optimizer step was made: the batch held nothing to learn from."""
    skipped_in_a_row: int = 0
    update: int = 0
    """Optimizer steps made so far, this one included."""
    microbatches: int = 0
    computed_tokens: int = 0
    """Tokens run through the model, after sharing prefixes."""
    plain_tokens: int = 0
    """Tokens that would take without sharing."""
    seconds: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A plain dict of JSON types."""
        return asdict(self)


class StatSums:
    """Sums over the loss tokens of a step; float64 on the CPU."""

    def __init__(self) -> None:
        self.tokens = 0
        self.sums: dict[str, float] = {}
        self.turns: dict[int, list[float]] = {}

    def add(self, values: dict[str, torch.Tensor]) -> None:
        """Add per-token tensors, all of one shape (tokens,)."""
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value.detach().double().sum())
        self.tokens += len(next(iter(values.values())))

    def add_gap(self, gap: torch.Tensor, turns: torch.Tensor) -> None:
        """Add |trainer - sampler| of tokens of the current version, with their turn indices."""
        gap = gap.detach().double()
        for turn in torch.unique(turns).tolist():
            here = gap[turns == turn]
            entry = self.turns.setdefault(int(turn), [0.0, 0.0, 0.0])
            entry[0] = max(entry[0], float(here.max()))
            entry[1] += float(here.sum())
            entry[2] += len(here)

    def mean(self, name: str, default: float = 0.0) -> float:
        """Mean over all loss tokens seen."""
        return self.sums[name] / self.tokens if self.tokens and name in self.sums else default

    def fill(self, stats: UpdateStats) -> None:
        """Write the means into `stats`."""
        stats.mismatch_kl = self.mean("mismatch")
        stats.clip_fraction = self.mean("clipped")
        stats.ratio_mean = self.mean("ratio", 1.0)
        stats.correction_mean = self.mean("correction", 1.0)
        stats.kl = self.mean("kl")
        stats.entropy = self.mean("entropy")
        stats.gap_tokens = int(sum(e[2] for e in self.turns.values()))
        if stats.gap_tokens:
            stats.max_logprob_gap = max(e[0] for e in self.turns.values())
            stats.mean_logprob_gap = sum(e[1] for e in self.turns.values()) / stats.gap_tokens
        stats.gap_by_turn = [
            {"turn": float(t), "max": e[0], "mean": e[1] / e[2], "tokens": e[2]}
            for t, e in sorted(self.turns.items())
        ]
