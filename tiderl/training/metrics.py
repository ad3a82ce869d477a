"""What one update is measured by: functions of its groups, and the length bias of the run so far.

Invariants: goodput is loss-carrying tokens trained on within the staleness bound, per second of wall
clock since training began; nothing else is ever called goodput. Lengths are sampled tokens of valid episodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tiderl.trajectory.group import Group
from tiderl.trajectory.staleness import Shipment

LENGTH_BIAS_LIMIT = 0.05
"""How far the mean trained length may be from the mean generated one before the alarm."""

LENGTH_BIAS_EPISODES = 200
"""Trained episodes before which a difference may be chance."""


class LengthBias:
    """Is the trainer given shorter (or longer) episodes than the policy generates? Over the whole run.

    Whatever prefers work that is ready, or drops what grew old, trains on short episodes. So this
    compares what carries loss with everything that was generated, whatever became of it.

    Args:
        limit: the alarm goes off beyond this share, in either direction.
        episodes: and only once so many episodes have carried loss.
    """

    def __init__(self, *, limit: float = LENGTH_BIAS_LIMIT, episodes: int = LENGTH_BIAS_EPISODES) -> None:
        self.limit, self.episodes = limit, episodes
        self._sums = {"generated": 0, "trained": 0}
        self._counts = {"generated": 0, "trained": 0}

    def add(self, generated: Iterable[int], trained: Iterable[int]) -> None:
        """Lengths of episodes that were generated, and of those that carry loss, since the last call."""
        for name, lengths in (("generated", generated), ("trained", trained)):
            found = list(lengths)
            self._sums[name] += sum(found)
            self._counts[name] += len(found)

    @property
    def value(self) -> float | None:
        """Mean trained / mean generated - 1; negative: the long ones are missing. None before any."""
        counts, sums = self._counts, self._sums
        if not counts["trained"] or not sums["generated"]:
            return None
        return sums["trained"] / counts["trained"] * counts["generated"] / sums["generated"] - 1.0

    @property
    def alarm(self) -> bool:
        """Enough episodes were trained on, and their length differs by more than the limit."""
        value = self.value
        return value is not None and self._counts["trained"] >= self.episodes and abs(value) > self.limit

    def to_json(self) -> dict[str, dict[str, int]]:
        """For a checkpoint."""
        return {"sums": dict(self._sums), "counts": dict(self._counts)}

    def restore(self, data: Mapping[str, Mapping[str, int]]) -> None:
        """Go on from a checkpoint."""
        self._sums |= data["sums"]
        self._counts |= data["counts"]


def rollout_metrics(
    groups: Sequence[Group],
    version: int,
    *,
    shipments: Sequence[Shipment] | None = None,
    bias: LengthBias | None = None,
    generated: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Success, reward, lengths, ends and staleness of the episodes of one update.

    Means are over valid episodes; lengths are in tokens; staleness, in versions, is of what carries loss.

    Args:
        groups: as they were sampled.
        shipments: what the staleness bound made of them; None: all of them are trained on.
        bias: the run's length bias; this update is added to it.
        generated: lengths of all valid episodes that ended since the last update, for `bias`; None: those of
            `groups`.
    """
    members = [m for g in groups for m in g.members]
    valid = [m for m in members if m.valid]
    rewards = np.array([m.reward for m in valid] or [np.nan])
    if shipments is None:
        shipped = list(groups)
    else:
        shipped = [s.group for s in shipments if s.group is not None]
    kept = [m for g in shipped for m in g.valid_members if m.loss_tokens]
    signal = [m for g in shipped if not g.zero_variance for m in g.valid_members if m.loss_tokens]
    lost = [length for s in shipments or () for length in s.lost]
    stale = [m.staleness(version) for m in kept]
    lengths = [m.sampled_tokens for m in valid]
    if bias is not None:
        bias.add(lengths if generated is None else generated, [m.sampled_tokens for m in kept])
    return {
        "episodes": len(members),
        "episodes_masked": len(members) - len(valid),
        "episodes_stale": len(lost),
        "success": float(np.mean([m.success for m in valid])) if valid else None,
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "turns": _mean(m.turns for m in valid),
        "generated_tokens": sum(m.loss_tokens for m in members),
        "length_generated": _mean(lengths),
        "length_kept": _mean(m.sampled_tokens for m in kept),
        "length_lost": _mean(lost),
        "length_trained": _mean(m.loss_tokens for m in signal),
        "length_bias": None if bias is None else bias.value,
        "length_alarm": bias is not None and bias.alarm,
        "staleness": float(np.mean(stale)) if stale else 0.0,
        "staleness_max": max(stale, default=0),
        "staleness_histogram": dict(sorted(Counter(stale).items())),
        "invalid_actions": sum(m.invalid_actions for m in members),
        "forks": sum(m.forks for m in members),
        "ends": dict(sorted(Counter(m.end.value for m in members).items())),
        "zero_variance_groups": sum(g.zero_variance for g in groups),
        "waiting_environment_s": sum(m.seconds.get("environment", 0.0) for m in members),
        "waiting_gate_s": sum(m.seconds.get("gate", 0.0) for m in members),
    }


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return float(np.mean(found)) if found else None
