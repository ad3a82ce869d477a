"""The task stream is a pure function of its inputs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.errors import ConfigError
from tiderl.rollout.tasks import TaskStream, derive_seed


@given(st.integers(1, 20), st.integers(0, 1000), st.integers(1, 4))
def test_c6_every_epoch_holds_each_task_once(count: int, seed: int, epochs: int) -> None:
    stream = TaskStream(range(count), seed)
    for epoch in range(epochs):
        tasks = [stream.item(epoch * count + i).task for i in range(count)]
        assert sorted(tasks) == list(range(count))  # type: ignore[type-var]


@given(st.lists(st.integers(0, 200), min_size=1, max_size=20))
def test_c1_an_item_does_not_depend_on_what_was_asked_before(ordinals: list[int]) -> None:
    asked = TaskStream(range(13), 5)
    assert [asked.item(o) for o in ordinals] == [TaskStream(range(13), 5).item(o) for o in ordinals]


def test_c12_the_fingerprint_follows_the_task_set() -> None:
    assert TaskStream([1, 2], 0).fingerprint == TaskStream([1, 2], 0).fingerprint
    assert len({TaskStream(ids, s).fingerprint for ids, s in [([1, 2], 0), ([1, 3], 0), ([1, 2], 1)]}) == 3


def test_an_empty_split_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no tasks"):
        TaskStream([], 0)


def test_seeds_differ_and_are_stable() -> None:
    assert len({derive_seed(0, "sampling", g, m) for g in range(50) for m in range(8)}) == 400
