"""Intervals and percentiles of an evaluation.

Invariant: pure functions; the same values and seed give the same numbers to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

Z95 = 1.959963984540054


def wilson(successes: int, trials: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a proportion; (0, 1) when there were no trials.

    Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference,
    JASA 22 (1927).
    """
    if trials <= 0:
        return 0.0, 1.0
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes=} is not within 0..{trials=}")
    p, z2 = successes / trials, z * z
    centre = (p + z2 / (2 * trials)) / (1 + z2 / trials)
    half = z / (1 + z2 / trials) * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials * trials))
    # At 0 and at 1 the bound is exact; rounding would leave it a hair off.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == trials else min(1.0, centre + half)
    return low, high


def bootstrap_mean(
    values: Iterable[tuple[Hashable, float]], *, seed: int = 0, resamples: int = 2000
) -> tuple[float, float]:
    """Percentile bootstrap interval (95 %) of the mean, drawing whole tasks.

    Args:
        values: (task, value) pairs. Episodes of one task are not independent, so a task is drawn with
            all its values.
        seed: of the draws.

    Returns:
        (low, high); (nan, nan) when there are no values.
    """
    sums: dict[Hashable, float] = {}
    counts: dict[Hashable, int] = {}
    for task, value in values:
        sums[task] = sums.get(task, 0.0) + float(value)
        counts[task] = counts.get(task, 0) + 1
    if not sums:
        return math.nan, math.nan
    total = np.array([sums[t] for t in sums], dtype=np.float64)
    count = np.array([counts[t] for t in sums], dtype=np.float64)
    rng = np.random.Generator(np.random.PCG64(seed))
    n = len(total)
    means = np.empty(resamples, dtype=np.float64)
    rows = max(1, 1_000_000 // n)  # bounds memory to about 8 MB, whatever the number of tasks
    for start in range(0, resamples, rows):
        draw = rng.integers(0, n, size=(min(rows, resamples - start), n))
        means[start : start + len(draw)] = total[draw].sum(axis=1) / count[draw].sum(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def percentile(values: Sequence[float], q: float) -> float | None:
    """The q-th percentile (0..100, linear interpolation); None when there are no values."""
    if not values:
        return None
    return float(np.percentile(np.asarray(values, dtype=np.float64), q))


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean, exactly rounded (`math.fsum`); None when there are no values."""
    return math.fsum(values) / len(values) if values else None
