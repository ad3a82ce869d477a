"""What one update is measured by. Pure functions of its groups and clocks.

Invariant: goodput is loss-carrying tokens trained on within the staleness bound, per second of wall
clock since training began; nothing else is ever called goodput.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from tiderl.trajectory.group import Group


def rollout_metrics(groups: Sequence[Group], version: int) -> dict[str, Any]:
    """Success, reward, lengths, ends and staleness of the episodes of one update.

    Means are over valid episodes; lengths are in tokens; staleness is in versions.
    """
    members = [m for g in groups for m in g.members]
    valid = [m for m in members if m.valid]
    rewards = np.array([m.reward for m in valid] or [np.nan])
    stale = np.array([m.staleness(version) for m in valid] or [0])
    trained = [m for g in groups if not g.zero_variance for m in g.valid_members]
    return {
        "episodes": len(members),
        "episodes_masked": len(members) - len(valid),
        "success": float(np.mean([m.success for m in valid])) if valid else None,
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "turns": _mean(m.turns for m in valid),
        "generated_tokens": sum(m.loss_tokens for m in members),
        "length_generated": _mean(m.loss_tokens for m in valid),
        "length_trained": _mean(m.loss_tokens for m in trained),
        "staleness": float(stale.mean()),
        "staleness_max": int(stale.max()),
        "invalid_actions": sum(m.invalid_actions for m in members),
        "forks": sum(m.forks for m in members),
        "ends": dict(sorted(Counter(m.end.value for m in members).items())),
        "zero_variance_groups": sum(g.zero_variance for g in groups),
        "waiting_environment_s": sum(m.seconds.get("environment", 0.0) for m in members),
        "waiting_gate_s": sum(m.seconds.get("gate", 0.0) for m in members),
    }


def _mean(values: Any) -> float | None:
    found = list(values)
    return float(np.mean(found)) if found else None
