"""The spaces hold what Gymnasium asks of a space."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

from tiderl.env import messages as m
from tiderl.env.spaces import MessageSpace, ReplySpace

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "go",
            "description": "",
            "parameters": {
                "type": "object",
                "properties": {"n": {"type": "integer"}, "s": {"type": "string"}},
                "required": ["n"],
            },
        },
    }
]


@pytest.mark.parametrize("space", [MessageSpace(), ReplySpace(), ReplySpace(TOOLS)], ids=repr)
def test_samples_are_contained_seeded_and_survive_json(space):
    space.seed(7)
    first = [space.sample() for _ in range(50)]
    assert all(one in space for one in first)
    wire = json.loads(json.dumps(space.to_jsonable(first)))
    back = space.from_jsonable(wire)
    assert all(one in space for one in back)
    assert space.to_jsonable(back) == wire
    space.seed(7)
    again = [space.sample() for _ in range(50)]
    assert space.to_jsonable(again) == wire
    space.seed(8)
    assert space.to_jsonable([space.sample() for _ in range(50)]) != wire
    copied = pickle.loads(pickle.dumps(space))
    assert copied == space
    assert not space.is_np_flattenable


def test_equality_and_hash():
    assert MessageSpace() == MessageSpace()
    assert MessageSpace() != ReplySpace()
    assert ReplySpace(TOOLS) == ReplySpace(TOOLS)
    assert hash(ReplySpace(TOOLS)) == hash(ReplySpace(TOOLS))
    assert ReplySpace(TOOLS) != ReplySpace()


def test_what_is_not_contained():
    assert [m.user("a")] not in MessageSpace()
    assert (m.user("a"), "b") not in MessageSpace()
    assert () in MessageSpace()
    assert "text" in ReplySpace()
    assert m.assistant("text") in ReplySpace()
    assert m.user("text") not in ReplySpace()
    assert 3 not in ReplySpace()
    with pytest.raises(ValueError, match="mask"):
        ReplySpace().sample(mask=np.ones(1))
