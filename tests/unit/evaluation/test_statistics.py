"""Intervals against published values and against brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.evaluation.statistics import bootstrap_mean, mean, percentile, wilson


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 0.8830, 1.0),
    ],
)
def test_wilson_published_values(successes: int, trials: int, low: float, high: float) -> None:
    found = wilson(successes, trials)
    assert found[0] == pytest.approx(low, abs=1e-4)
    assert found[1] == pytest.approx(high, abs=1e-4)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_the_proportion_and_mirrors(pair: tuple[int, int]) -> None:
    k, n = pair
    low, high = wilson(k, n)
    assert 0.0 <= low <= k / n <= high <= 1.0
    mirrored = wilson(n - k, n)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high), abs=1e-12)


def test_wilson_without_trials_and_with_nonsense() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError):
        wilson(3, 2)


def test_bootstrap_is_seeded_and_near_the_normal_interval() -> None:
    rng = np.random.default_rng(0)
    values = [(i, float(x)) for i, x in enumerate(rng.normal(2.0, 1.0, 400))]
    low, high = bootstrap_mean(values, seed=3)
    assert (low, high) == bootstrap_mean(values, seed=3)
    assert (low, high) != bootstrap_mean(values, seed=4)
    centre = mean([x for _, x in values])
    half = 1.96 * np.std([x for _, x in values], ddof=1) / math.sqrt(400)
    assert low == pytest.approx(centre - half, abs=0.02)
    assert high == pytest.approx(centre + half, abs=0.02)


def test_bootstrap_draws_tasks_not_episodes() -> None:
    """Ten copies of each task carry no more information than one."""
    once = [(i, float(i % 2)) for i in range(40)]
    tenfold = [pair for pair in once for _ in range(10)]
    assert bootstrap_mean(once, seed=0) == pytest.approx(bootstrap_mean(tenfold, seed=0), abs=1e-12)


def test_bootstrap_edges() -> None:
    assert all(math.isnan(x) for x in bootstrap_mean([]))
    assert bootstrap_mean([("a", 0.5)]) == (0.5, 0.5)


def test_percentile_and_mean() -> None:
    assert percentile([], 50) is None
    assert mean([]) is None
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0
    assert mean([0.1] * 10) == 0.1
