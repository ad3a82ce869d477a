"""Environments with `reset` and `step` of their own are held to the same contract."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tiderl.env import messages as m
from tiderl.env.base import AgentEnv
from tiderl.env.ends import EndReason
from tiderl.errors import EnvironmentFault, InfrastructureError


def stepping(result: Any) -> Any:
    """A running environment whose step returns `result`, or raises it."""

    class Fixed(AgentEnv):
        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed, options=options)
            return (m.user("go"),), {}

        def step(self, action):
            if isinstance(result, BaseException):
                raise result
            return result

    env = Fixed()
    env.reset(seed=0)
    return env


def test_turns_are_counted_and_limited(samples):
    env = samples.Walk()
    _, info = env.reset(seed=1)
    assert info == {"task": 0, "turn": 0}
    infos = [env.step("stay") for _ in range(4)]
    assert [one[4]["turn"] for one in infos] == [1, 2, 3, 4]
    assert [one[3] for one in infos] == [False, False, False, True]
    assert infos[-1][4]["end"] == "max_turns"
    with pytest.raises(EnvironmentFault, match="ended"):
        env.step("stay")


def test_the_end_is_named_from_the_reward(samples):
    env = samples.Walk()
    env.reset(seed=1)
    while True:
        _, reward, terminated, _, info = env.step("right")
        if terminated:
            break
    assert reward == 1.0
    assert info["end"] == "success"
    done = stepping(((), 0.5, True, False, {}))
    assert done.step("x")[4]["end"] == "failure"


def test_t72_a_plain_environment_is_told_of_the_turn_limit(samples):
    class Credit(samples.Walk):
        max_turns = 2

        def on_truncate(self, reason):
            assert reason is EndReason.MAX_TURNS
            return 0.25

    env = Credit()
    env.reset(seed=1)
    assert env.step("stay")[1] == 0.0
    assert env.step("stay")[1] == 0.25


def test_an_authors_truncation_keeps_its_reason():
    assert stepping(((), 0.0, False, True, {})).step("x")[4]["end"] == "max_turns"
    assert stepping(((), 0.0, False, True, {"end": "time"})).step("x")[4]["end"] == "time"


@pytest.mark.parametrize(
    ("result", "word"),
    [
        (((), None, True, False, {}), "reward is None"),
        (((), float("nan"), True, False, {}), "reward is nan"),
        (([m.user("a")], 0.0, False, False, {}), "list, not a tuple"),
        (("text", 0.0, False, False, {}), "str, not a tuple"),
        (((m.user("a"), {"role": "user"}), 0.0, False, False, {}), "no content"),
        (({"role": "user", "content": "a"}, 0.0, False, False, {}), "dict, not a tuple"),
        (((), 0.0, False, {}), "did not return"),
        (((), 0.0, False, False, None), "did not return"),
        (None, "did not return"),
        (ValueError("oops"), "step of Fixed raised ValueError: oops"),
    ],
)
def test_faults_are_named(result, word):
    with pytest.raises(EnvironmentFault, match=word):
        stepping(result).step("x")


def test_a_float_image_is_named():
    bad = {"role": "user", "content": [{"type": "image", "image": np.zeros((2, 2, 3))}]}
    with pytest.raises(EnvironmentFault, match="float64"):
        stepping(((bad,), 0.0, False, False, {})).step("x")


def test_t58_a_lost_connection_is_infrastructure():
    env = stepping(ConnectionError("gone"))
    with pytest.raises(InfrastructureError, match="gone"):
        env.step("x")
    assert env.end is EndReason.INFRASTRUCTURE


def test_a_step_that_extends_ours_is_counted_once(samples):
    class Louder(samples.Counter):
        def step(self, action):
            observation, reward, terminated, truncated, info = super().step(action)
            return observation, reward, terminated, truncated, {**info, "loud": True}

    class Loudest(Louder):
        def step(self, action):
            return super().step(action)

    env = Loudest(max_turns=2)
    env.reset(seed=1, options={"task": "train-8"})
    assert env.step(samples.call("add", n=1))[4] == {"task": "train-8", "turn": 1, "loud": True}
    _, reward, _, truncated, info = env.step(samples.call("add", n=1))
    assert (truncated, info["turn"], info["end"]) == (True, 2, "max_turns")
    assert reward == 0.5


def test_our_reset_can_be_left_out():
    class Own(AgentEnv):
        def reset(self, *, seed=None, options=None):
            return (m.user("a"),), {"task": 7}

        def step(self, action):
            return (), 1.0, True, False, {}

    env = Own()
    assert env.reset()[1] == {"task": 7, "turn": 0}
    assert env.step("x")[4] == {"task": None, "turn": 1, "end": "success", "success": True}
