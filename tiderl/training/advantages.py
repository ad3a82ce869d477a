"""Advantages of a group of trajectories that share a task, in plain numpy.

Invariant: invalid members enter neither mean, standard deviation nor count, and get advantage 0.
Formulas: GRPO (arXiv 2402.03300), Dr. GRPO (arXiv 2503.20783), RLOO (arXiv 2402.14740).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tiderl.errors import ConfigError
from tiderl.training.settings import AdvantageKind

EPSILON = 1e-6
"""Added to the standard deviation, as in the reference implementations."""


def zero_variance(rewards: Sequence[float], valid: Sequence[bool] | np.ndarray) -> bool:
    """True when the valid members' rewards are all equal, so no member is better than another."""
    r = np.asarray(rewards, dtype=np.float64)[np.asarray(valid, dtype=bool)]
    return r.size == 0 or float(np.ptp(r)) <= 1e-12


def group_advantages(
    rewards: Sequence[float],
    valid: Sequence[bool] | None = None,
    *,
    kind: AdvantageKind = "grpo",
    std: bool = True,
) -> np.ndarray:
    """Advantage of each member, float64 of shape (members,), 0 for invalid members.

    With mean m, deviation s (n - 1 in the denominator) and count n over valid members:
    grpo: (r - m) / (s + 1e-6), or r - m with `std=False`; dr_grpo: r - m; rloo: n / (n - 1) (r - m).

    Raises:
        ConfigError: the group has one member, so it has no sibling to be compared with.
        ValueError: fewer than two members are valid, lengths differ, or a valid reward is not finite.
    """
    r = np.asarray(rewards, dtype=np.float64)
    ok = np.ones(len(r), dtype=bool) if valid is None else np.asarray(valid, dtype=bool)
    if r.shape != ok.shape:
        raise ValueError(f"{len(r)} rewards but {len(ok)} validity flags")
    if len(r) < 2:
        raise ConfigError(
            f"a group has {len(r)} member and the advantage {kind!r} compares siblings",
            fix="set the group size to 2 or more",
        )
    n = int(ok.sum())
    if n < 2:
        raise ValueError(f"{n} valid members; at least 2 are needed")
    chosen = r[ok]
    if not np.isfinite(chosen).all():
        raise ValueError("a valid member's reward is not finite")
    out = np.zeros_like(r)
    if zero_variance(rewards, ok):  # exact zeros, not rounding noise divided by a tiny deviation
        return out
    centred = chosen - chosen.mean()
    if kind == "rloo":
        centred *= n / (n - 1)
    elif kind == "grpo" and std:
        centred /= chosen.std(ddof=1) + EPSILON
    out[ok] = centred
    return out
