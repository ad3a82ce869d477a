"""Draws from hashes: the same everywhere, even, and split by content."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tiderl.environments.draws import Draws, draw_in_split, split_of


def test_the_numbers_are_fixed_for_ever():
    draws = Draws("key")
    assert [draws.below(100) for _ in range(5)] == [37, 48, 59, 11, 63]


@given(st.text(), st.integers(1, 50))
@settings(max_examples=60, deadline=None)
def test_draws_are_in_range_and_repeatable(key: str, n: int):
    assert all(0 <= value < n for value in map(Draws(key).below, [n] * 10))
    assert Draws(key).between(-n, n) == Draws(key).between(-n, n)
    items = list(range(n))
    assert sorted(Draws(key).sample(items, n)) == items


def test_draws_are_even():
    draws = Draws("even")
    counts = Counter(draws.below(8) for _ in range(8000))
    assert min(counts.values()) > 850
    assert max(counts.values()) < 1150


def test_one_in_eight_is_held_out():
    share = sum(split_of(str(n)) == "test" for n in range(8000)) / 8000
    assert 0.11 < share < 0.14


@given(st.text(max_size=8), st.sampled_from(["train", "test"]))
@settings(max_examples=40, deadline=None)
def test_a_drawn_task_belongs_to_its_split(key: str, split: str):
    content = draw_in_split(key, split, lambda draws: ((text := str(draws.below(1000))), text))
    assert split_of(content) == split
