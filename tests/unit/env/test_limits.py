"""Cut observations: text with a marker, text and image together, every call still answered."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiderl.env import messages as m
from tiderl.env.base import AgentEnv
from tiderl.env.limits import Limits, cut_observation, cut_text, limits_of
from tiderl.errors import EnvironmentFault

PICTURE = np.zeros((2, 2, 3), np.uint8)


def test_text_is_cut_with_a_marker():
    assert cut_text("abcdef", 6) == "abcdef"
    assert cut_text("abcdef", 2) == "ab\n[4 characters cut]"
    assert cut_text("abc", -5) == "\n[3 characters cut]"


def test_t60_text_and_image_go_together():
    message = m.tool("c1", "look", "a long description", PICTURE)
    (cut,), left = cut_observation([message], max_chars=10, images_left=5)
    assert m.images_of(cut) == []
    assert left == 5
    assert m.text_of(cut) == "a long des\n[8 characters cut]\n[1 images left out]"
    assert cut["tool_call_id"] == "c1"
    (whole,), left = cut_observation([message], max_chars=18, images_left=5)
    assert len(m.images_of(whole)) == 1
    assert left == 4


def test_images_beyond_the_limit_become_markers():
    observation, left = cut_observation([m.user("a", PICTURE, "b", PICTURE, "c")], 100, 1)
    assert left == 0
    assert [part["type"] for part in observation[0]["content"]] == ["text", "image", "text", "text", "text"]
    assert "left out" in m.text_of(observation[0])


def test_every_call_stays_answered_when_there_is_no_room():
    messages = [m.tool(f"c{n}", "f", "x" * 30) for n in range(4)]
    observation, _ = cut_observation(messages, 40, 1)
    assert [one["tool_call_id"] for one in observation] == ["c0", "c1", "c2", "c3"]
    assert m.text_of(observation[0]) == "x" * 30
    assert m.text_of(observation[3]) == "\n[30 characters cut]"


def test_messages_without_content_pass():
    message = m.assistant(None, [m.tool_call("f")])
    assert cut_observation([message], 0, 0)[0] == (message,)


part = st.one_of(st.text(max_size=30), st.just(PICTURE))


@given(st.lists(st.lists(part, max_size=4), max_size=4), st.integers(0, 60), st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_cutting_keeps_within_the_limits(contents, room, images):
    messages = [m.user(*parts) for parts in contents]
    observation, left = cut_observation(messages, room, images)
    assert len(observation) == len(messages)
    shown = sum(len(m.images_of(one)) for one in observation)
    assert shown + left == images
    for before, after in zip(messages, observation, strict=True):
        assert m.message_problem(after) is None
        assert after is not before
    whole = sum(len(p["text"]) for one in messages for p in _parts(one) if p["type"] == "text")
    if whole <= room:
        assert sum(len(m.images_of(one)) for one in messages) >= shown
        assert all("cut]" not in m.text_of(one) or "cut]" in m.text_of(b)
                   for one, b in zip(observation, messages, strict=True))  # fmt: skip


def _parts(message):
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def test_limits_of_reads_an_environment():
    from tiderl.env.base import AgentEnv

    assert limits_of(AgentEnv) == Limits()
    assert AgentEnv(max_turns=3).limits.max_turns == 3


@pytest.mark.parametrize(("name", "value"), [("max_turns", "abc"), ("max_turns", 0), ("step_timeout", -1.0)])
def test_a_limit_that_is_no_such_number_is_named(name: str, value: object) -> None:
    with pytest.raises(EnvironmentFault, match=f"{name} of AgentEnv is {value!r}"):
        AgentEnv(**{name: value})
