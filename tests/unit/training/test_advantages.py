"""Advantages against their formulas, and what invalid members and odd groups do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.errors import ConfigError
from tiderl.training.advantages import group_advantages, zero_variance

REWARDS = st.lists(st.floats(-10, 10, allow_nan=False), min_size=2, max_size=12)


def test_formulas() -> None:
    r = [1.0, 0.0, 0.0, 3.0]
    centred = np.array(r) - 1.0
    np.testing.assert_allclose(group_advantages(r), centred / (np.std(r, ddof=1) + 1e-6))
    np.testing.assert_allclose(group_advantages(r, std=False), centred)
    np.testing.assert_allclose(group_advantages(r, kind="dr_grpo"), centred)
    others = [np.mean(np.delete(r, i)) for i in range(4)]
    np.testing.assert_allclose(group_advantages(r, kind="rloo"), np.array(r) - others)


@given(REWARDS)
def test_they_sum_to_zero_and_keep_the_order_of_rewards(rewards: list[float]) -> None:
    for kind in ("grpo", "dr_grpo", "rloo"):
        a = group_advantages(rewards, kind=kind)  # type: ignore[arg-type]
        assert abs(a.sum()) <= 1e-6 * max(1.0, np.abs(a).max()) * len(a)
        order = np.argsort(rewards, kind="stable")
        assert (np.diff(a[order]) >= -1e-9).all()


@given(REWARDS, st.data())
def test_c67_an_invalid_member_changes_nothing_for_the_others(
    rewards: list[float], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(rewards)))
    failed = data.draw(st.sampled_from([0.0, -1e6, float("nan")]))
    longer = [*rewards[:at], failed, *rewards[at:]]
    valid = [i != at for i in range(len(longer))]
    got = group_advantages(longer, valid)
    assert got[at] == 0.0
    np.testing.assert_array_equal(np.delete(got, at), group_advantages(rewards))


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_c76_a_group_of_one_is_an_error(kind: str) -> None:
    with pytest.raises(ConfigError, match="group size"):
        group_advantages([1.0], kind=kind)  # type: ignore[arg-type]


def test_equal_rewards_give_exact_zeros() -> None:
    r = [0.1 + 0.2] * 3  # 0.3000...04: the mean does not round back to it
    assert zero_variance(r, [True] * 3)
    assert not group_advantages(r).any()
    assert zero_variance([1.0, 5.0], [True, False])
    assert not zero_variance([1.0, 5.0], [True, True])


@pytest.mark.parametrize(
    ("rewards", "valid"),
    [([1.0, 2.0], [True, False]), ([1.0, 2.0], [True]), ([1.0, float("inf")], [True, True])],
)
def test_what_has_no_advantage_is_refused(rewards: list[float], valid: list[bool]) -> None:
    with pytest.raises(ValueError):
        group_advantages(rewards, valid)
