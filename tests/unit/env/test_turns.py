"""Replies of models, good and bad, and failures of authors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiderl.env import messages as m
from tiderl.env.base import AgentEnv
from tiderl.env.ends import EndReason
from tiderl.env.tools import tool
from tiderl.errors import EnvironmentFault, InfrastructureError, TideError

GOAL = {"options": {"task": "train-5"}}


def started(samples: Any, **limits: Any) -> Any:
    env = samples.Counter(**limits)
    env.reset(seed=1, options={"task": "train-5"})
    return env


def test_t54_invalid_json_is_an_observation(samples):
    env = started(samples)
    (answer,), reward, terminated, truncated, info = env.step(samples.raw_call('{"n": 5', call_id="abc"))
    assert answer["role"] == "tool"
    assert answer["tool_call_id"] == "abc"
    assert answer["name"] == "add"
    assert "not valid JSON" in m.text_of(answer)
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert "not valid JSON" in info["invalid_action"]
    assert env.added == []


@pytest.mark.parametrize(
    ("action", "word"),
    [
        (
            {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": {}}]},
            "no function name",
        ),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "c1"}]}, "no function name"),
        ({"role": "assistant", "content": None, "tool_calls": ["add"]}, "object"),
        ({"role": "assistant", "content": None, "tool_calls": {"id": "c1"}}, "no function name"),
        ({"role": "assistant", "content": None, "tool_calls": [None]}, "object"),
    ],
)
def test_t56_calls_without_a_name_are_observations(samples, action, word):
    env = started(samples)
    observation, *_, info = env.step(action)
    assert len(observation) == 1
    assert observation[0]["role"] == "tool"
    assert word in m.text_of(observation[0])
    assert word in info["invalid_action"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ("[5]", "object"),
        ('{"n": 5} {"n": 5}', "Extra data"),
        ('{"n": "five"}', "integer"),
        ('{"n": 1, "n": 2}', "twice"),
        ('{"m": 5}', "no argument 'm'"),
        ("", "needs the argument 'n'"),
        ("{}", "needs the argument 'n'"),
    ],
)
def test_t56_wrong_arguments_are_observations(samples, arguments, word):
    env = started(samples)
    (answer,), *_, info = env.step(samples.raw_call(arguments))
    assert word in m.text_of(answer)
    assert word in info["invalid_action"]
    assert env.added == []


def test_an_empty_string_is_no_arguments(samples):
    class Ring(AgentEnv):
        @tool
        def ring(self) -> str:
            """Ring."""
            return "rang"

    env = Ring()
    env.reset()
    (answer,), *_, info = env.step(samples.raw_call("", name="ring"))
    assert m.text_of(answer) == "rang"
    assert "invalid_action" not in info


def test_unknown_tools_and_refusals_of_the_author_are_observations(samples):
    env = started(samples)
    (answer,), *_, info = env.step(samples.raw_call("{}", name="ad"))
    assert "did you mean 'add'" in m.text_of(answer)
    (answer,), *_, info = env.step(samples.call("refuse"))
    assert m.text_of(answer) == "Error: not now."
    assert info["invalid_action"] == "not now"


def test_parallel_calls_are_each_answered_once_in_order(samples):
    env = started(samples)
    calls = [
        m.tool_call("add", "a", n=1),
        {"id": "b", "type": "function", "function": {"name": "add", "arguments": "{"}},
        m.tool_call("add", "a", n=2),
        {"type": "function", "function": {"name": "add", "arguments": '{"n": 1}'}},
    ]
    observation, *_, info = env.step(m.assistant(None, calls))
    assert [one["tool_call_id"] for one in observation] == ["a", "b", "a", "call_1_3"]
    assert [m.text_of(one) for one in observation][::2] == ["now 1", "now 3"]
    assert env.added == [1, 2, 1]
    assert "JSON" in info["invalid_action"]


def test_calls_after_the_end_are_answered_and_not_executed(samples):
    env = started(samples)
    calls = [m.tool_call("add", f"c{n}", n=5) for n in range(3)]
    observation, reward, terminated, _, info = env.step(m.assistant(None, calls))
    assert [one["tool_call_id"] for one in observation] == ["c0", "c1", "c2"]
    assert "not executed" in m.text_of(observation[1])
    assert env.added == [5]
    assert (reward, terminated, info["end"]) == (1.0, True, "success")
    assert "invalid_action" not in info


def test_invalid_actions_in_a_row_end_the_episode(samples):
    env = started(samples, max_invalid_actions=2)
    bad, good = samples.raw_call("{"), samples.call("add", n=1)
    assert env.step(bad)[3] is False
    assert env.step(good)[3] is False
    assert env.step(bad)[3] is False
    _, reward, terminated, truncated, info = env.step(bad)
    assert (terminated, truncated) == (False, True)
    assert info["end"] == "invalid_actions"
    assert info["success"] is False
    assert reward == 0.5  # partial credit


def test_many_malformed_calls_in_one_reply_are_one_invalid_action(samples):
    env = started(samples)
    _, _, _, truncated, info = env.step(m.assistant(None, [m.tool_call("nope", f"c{n}") for n in range(9)]))
    assert truncated is False
    assert "end" not in info


@pytest.mark.parametrize("action", [None, 3, b"x", ["a"], {"role": "assistant", "content": 3}])
def test_replies_of_another_type_are_observations(samples, action):
    (answer,), *_, info = started(samples).step(action)
    assert answer["role"] == "user"
    assert "invalid_action" in info


def test_replies_without_a_call(samples):
    env = started(samples, on_no_tool="nudge")
    (answer,), _, terminated, _, info = env.step("hello")
    assert m.text_of(answer) == "Call one of the tools: add, refuse, fail."
    assert not terminated
    assert "invalid_action" not in info
    env = started(samples, on_no_tool="finish")
    observation, reward, terminated, _, info = env.step(m.assistant("hello"))
    assert (observation, reward, terminated, info["end"]) == ((), 0.0, True, "failure")
    env = started(samples, on_no_tool="error")
    (answer,), *_, info = env.step({"role": "assistant", "content": [{"type": "odd"}]})
    assert "calls no tool" in m.text_of(answer)
    assert "calls no tool" in info["invalid_action"]


def test_calls_where_there_are_no_tools(samples):
    env = samples.Talk()
    env.reset()
    (answer,), *_, info = env.step(samples.raw_call("{}"))
    assert "no tools" in m.text_of(answer)
    assert "no tools" in info["invalid_action"]


def test_text_goes_to_reply_where_tools_are_there_too(samples):
    class Both(samples.Counter):
        def reply(self, text):
            self.finish(0.25)
            return "bye"

    env = Both()
    env.reset(options={"task": "train-5"})
    assert env.step(samples.call("add", n=1))[2] is False
    observation, reward, terminated, *_ = env.step("done")
    assert (m.text_of(observation[0]), reward, terminated) == ("bye", 0.25, True)


@pytest.mark.parametrize(
    ("kind", "error", "word"),
    [
        ("value", EnvironmentFault, "tool 'fail' of Counter raised ValueError: broken"),
        ("net", InfrastructureError, "ConnectionError"),
        ("exit", EnvironmentFault, "SystemExit"),
    ],
)
def test_t58_an_exception_in_a_tool_is_raised_and_never_a_reward(samples, kind, error, word):
    env = started(samples)
    with pytest.raises(error, match=word) as caught:
        env.step(samples.call("fail", kind=kind))
    assert "samples.py:" in str(caught.value)
    assert env.end is EndReason.INFRASTRUCTURE
    with pytest.raises(EnvironmentFault, match="infrastructure"):
        env.step(samples.call("add", n=1))
    env.reset(seed=2)
    assert env.step(samples.call("add", n=1))[1] == 0.0


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf"), "high", [1.0]])
@pytest.mark.parametrize("way", ["finish", "give", "score"])
def test_rewards_that_are_no_finite_numbers_are_faults(reward, way):
    class Bad(AgentEnv):
        def score(self, text):
            if way == "score":
                return reward
            getattr(self, way)(reward)

    env = Bad()
    env.reset()
    with pytest.raises(EnvironmentFault, match="reward"):
        env.step("x")


def test_faults_of_the_author_in_every_method(samples):
    class Twice(AgentEnv):
        def reply(self, text):
            self.finish(0.5)
            self.finish(0.5)

    class Late(samples.Echo):
        def start(self, task):
            raise KeyError("nothing")

    class Picture(AgentEnv):
        def reply(self, text):
            return np.zeros((2, 2, 3), np.float32)

    class Cut(samples.Counter):
        def on_truncate(self, reason):
            raise RuntimeError("cannot say")

    class Early(AgentEnv):
        def start(self, task):
            self.finish(1.0)

    env = Twice()
    env.reset()
    with pytest.raises(EnvironmentFault, match="twice"):
        env.step("x")
    with pytest.raises(EnvironmentFault, match="start of Late raised KeyError"):
        Late().reset()
    env = Picture()
    env.reset()
    with pytest.raises(EnvironmentFault, match="float32"):
        env.step("x")
    env = Cut(max_turns=1)
    env.reset()
    with pytest.raises(EnvironmentFault, match="on_truncate of Cut raised RuntimeError"):
        env.step("x")
    with pytest.raises(EnvironmentFault, match="outside of a turn"):
        Early().reset()


def test_t72_the_turn_limit_asks_for_partial_credit(samples):
    env = started(samples, max_turns=2)
    assert env.step(samples.call("add", n=1))[3] is False
    _, reward, terminated, truncated, info = env.step(samples.call("add", n=1))
    assert (reward, terminated, truncated) == (0.5, False, True)
    assert info == {"task": "train-5", "turn": 2, "end": "max_turns", "success": False}


def test_t72_limits_of_the_driver_ask_for_partial_credit_too(samples):
    env = started(samples)
    env.step(samples.call("add", n=1))
    reward, info = env.truncate(EndReason.CONTEXT_LENGTH)
    assert reward == 0.5
    assert info == {"task": "train-5", "turn": 1, "end": "context_length", "success": False}
    with pytest.raises(EnvironmentFault, match="ended"):
        env.truncate(EndReason.TIME)


def test_finishing_in_the_last_turn_is_no_truncation(samples):
    env = started(samples, max_turns=1)
    _, reward, terminated, truncated, info = env.step(samples.call("add", n=5))
    assert (reward, terminated, truncated, info["end"]) == (1.0, True, False, "success")


def test_t75_a_reply_that_was_cut_does_not_truncate_the_episode(samples):
    env = started(samples, max_turns=3)
    flags = [
        env.step(samples.call("add", n=1))[3],
        env.step(samples.raw_call('{"n": 1'))[3],
        env.step(samples.call("add", n=1))[3],
    ]
    assert flags == [False, False, True]


def test_a_reason_can_be_given():
    class Stops(AgentEnv):
        def reply(self, text):
            self.finish(0.5, EndReason(text))

    env = Stops()
    env.reset()
    assert env.step("success")[4]["success"] is True
    env.reset()
    _, _, terminated, truncated, info = env.step("cancelled")
    assert (terminated, truncated, info["end"]) == (False, True, "cancelled")


def test_t60_observations_are_cut_text_and_image_together():
    class Talks(AgentEnv):
        def reply(self, text):
            return ["x" * 50, np.zeros((2, 2, 3), np.uint8)]

    env = Talks(max_observation_chars=20)
    env.reset()
    (answer,), *_ = env.step("x")
    assert m.images_of(answer) == []
    assert "30 characters cut" in m.text_of(answer)
    env = Talks(max_images=2)
    env.reset()
    shown = [len(m.images_of(env.step("x")[0][0])) for _ in range(4)]
    assert shown == [1, 1, 0, 0]


function = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["add", "refuse", "nope", "", None, 3]),
        "arguments": st.one_of(st.none(), st.text(), st.sampled_from(['{"n": 1}', '{"n": "x"}', "[]"])),
    },
)
tool_call = st.fixed_dictionaries(
    {},
    optional={"id": st.one_of(st.none(), st.text()), "function": st.one_of(st.none(), function)},
)
content = st.one_of(st.none(), st.text(), st.lists(st.dictionaries(st.text(), st.text())))
message = st.fixed_dictionaries(
    {},
    optional={
        "role": st.text(),
        "content": content,
        "tool_calls": st.lists(st.one_of(st.none(), st.text(), tool_call), max_size=3),
    },
)
reply = st.one_of(st.none(), st.text(), st.integers(), st.lists(st.text(), max_size=2), message)


@given(st.lists(reply, min_size=1, max_size=8))
@settings(max_examples=150, deadline=None)
def test_no_reply_makes_step_raise(samples, replies):
    env = samples.Counter()
    env.reset(seed=1, options={"task": "train-5"})
    for number, action in enumerate(replies, 1):
        observation, reward, terminated, truncated, info = env.step(action)
        assert observation in env.observation_space
        assert isinstance(reward, float)
        assert info["turn"] == number
        calls = action.get("tool_calls") if isinstance(action, dict) else None
        if calls and not isinstance(action.get("content"), (int, float)):
            assert [one["role"] for one in observation] == ["tool"] * len(calls)
        assert terminated + truncated == ("end" in info)
        if terminated or truncated:
            break


def test_errors_are_ours(samples):
    with pytest.raises(TideError):
        started(samples).step(samples.call("fail"))


@pytest.mark.parametrize("way", ["start", "reply", "a tool", "step"])
def test_a_counter_of_the_authors_own_may_not_be_called_turn(way):
    class Counts(AgentEnv):
        def tasks(self, split):
            return [{"id": 1}]

        def start(self, task):
            self.turn = int(way == "start")
            return "Go on."

        def reply(self, text):
            self.turn += way == "reply"
            return "Go on."

        @tool
        def go(self):
            """Go on."""
            self.turn += way == "a tool"
            return "Go on."

    class Steps(Counts):
        def step(self, action):
            self.turn += 1
            return [m.user("Go on.")], 0.0, False, False, {}

    env = Steps() if way == "step" else Counts()
    with pytest.raises(EnvironmentFault, match=r"changed self\.turn from \d to \d.*another name"):
        env.reset(seed=0)
        if way == "a tool":
            env.step({"role": "assistant", "content": "", "tool_calls": [m.tool_call("go", "c1")]})
        else:
            env.step("on")
    assert env._end is EndReason.INFRASTRUCTURE
