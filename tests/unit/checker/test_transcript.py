"""Two canonical forms are equal exactly where two runs said the same, bit by bit."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.env.checker.policies import malformed_actions, random_action
from tiderl.env.checker.sharing import shared
from tiderl.env.checker.transcript import Transcript, Turn, canonical, first_difference
from tiderl.env.ends import EndReason

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@given(PLAIN)
def test_a_copy_is_the_same(value: Any) -> None:
    assert first_difference(canonical(value), canonical(copy.deepcopy(value))) is None


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        (0.1 + 0.2, 0.3),
        (1.0, np.float64(1.0)),
        ("a", b"a"),
        (None, "None"),
        ([1], [1, 2]),
        ({"a": 1}, {"a": 1, "b": 2}),
        (np.zeros((2, 2, 3), np.uint8), np.zeros((2, 2, 3), np.int8)),
        (np.zeros((2, 3, 3), np.uint8), np.zeros((3, 2, 3), np.uint8)),
        ({"m": [{"x": np.zeros(3)}]}, {"m": [{"x": np.array([0, 0, 1e-300])}]}),
    ],
)
def test_what_differs_in_type_or_bit_differs(a: Any, b: Any) -> None:
    assert first_difference(canonical(a), canonical(b)) is not None


@pytest.mark.parametrize(
    ("a", "b"),
    [((1, 2), [1, 2]), (math.nan, math.nan), (EndReason.SUCCESS, "success"), (np.eye(3).T, np.eye(3))],
)
def test_what_a_wire_may_change_is_the_same(a: Any, b: Any) -> None:
    assert first_difference(canonical(a), canonical(b)) is None


def test_a_difference_names_its_place() -> None:
    found = first_difference(canonical({"a": [1, {"b": 2.5}]}), canonical({"a": [1, {"b": 2.0}]}), "info")
    assert found == "info['a'][1]['b'] is float 2.5 against float 2.0"


def test_a_canonical_form_shares_nothing() -> None:
    value = [{"type": "image", "image": np.ones((2, 2, 3), np.uint8)}]
    before = canonical(value)
    value[0]["image"][:] = 0
    value[0]["type"] = "changed"
    assert before == canonical([{"type": "image", "image": np.ones((2, 2, 3), np.uint8)}])


def test_shared_objects_are_found_at_any_depth() -> None:
    part = {"type": "text", "text": "x"}
    array = np.zeros((4, 4, 3), np.uint8)
    assert shared(({"content": [part]},), ({"content": [part]},))
    assert shared(({"content": [{"image": array}]},), ({"content": [{"image": array[1:]}]},))
    assert shared(({"content": [dict(part)]},), ({"content": [dict(part)]},)) is None
    assert shared((array,), (array.copy(),)) is None


def test_a_transcript_adds_up_and_knows_its_end() -> None:
    record = Transcript("t", "train", 1, "oracle")
    record.turns.append(Turn([], 0.0, False, False, {}))
    assert not record.ended
    record.turns += [Turn([], 0.25, False, False, {}), Turn([], np.float32(0.5), True, False, {})]
    assert record.ended
    assert record.total == 0.75
    record.turns[1].reward = None
    assert math.isnan(record.total)
    other = copy.deepcopy(record)
    other.turns.pop()
    assert record.difference(other, info=False) == "2 turns against 1, in task 't' of split 'train', seed 1"


def test_players_depend_on_nothing_but_their_generator() -> None:
    function = {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}, "required": ["n"]}}
    tools = [{"type": "function", "function": function}, {"type": "function", "function": {"name": "g"}}]
    for given_tools in ([], tools):
        first, second = (random_action(np.random.default_rng(3), given_tools) for _ in range(2))
        assert first == second
    assert len(random_action(np.random.default_rng(3), tools, calls=3)["tool_calls"]) == 3
    labels = [case.label for case in malformed_actions(tools)]
    assert len(labels) == len(set(labels))
    assert "f without 'n'" in labels
