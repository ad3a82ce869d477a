"""gymnasium/<Name>: text renderings, words as actions, clipped rewards, oracles."""

from __future__ import annotations

import numpy as np
import pytest

import tiderl
from tiderl.env import messages as m
from tiderl.environments.gymnasium_text import plain_text
from tiderl.environments.planning import Planner, action_values
from tiderl.errors import EnvironmentFault, UnknownEnvironment


def act(action: object) -> dict:
    return m.assistant(None, [m.tool_call("act", action=action)])


def test_renderings_become_plain_text():
    assert plain_text("\n\x1b[41mS\x1b[0mFF\n\x1b[35mR\x1b[0m:\n") == "[S]FF\nR:"
    assert plain_text("|\x1b[43m \x1b[0m|\x1b[34;1mB\x1b[0m|\x1b[42m_\x1b[0m") == "|[ ]|B|[_]"


def test_frozen_lake_has_a_map_per_task():
    env = tiderl.make("gymnasium/FrozenLake-v1")
    maps = {}
    for split in ("train", "test"):
        maps[split] = {"/".join(env.task_lists.find(split, n)["map"]) for n in range(100)}
    assert not maps["train"] & maps["test"]
    assert len(maps["train"]) > 60
    observation, _ = env.reset(seed=1, options={"task": 4})
    assert observation[0]["role"] == "system"
    assert m.text_of(observation[1]).startswith("[S]")
    assert m.text_of(observation[1]).replace("[", "").replace("]", "").splitlines() == env.task["map"]


def test_frozen_lake_moves_by_words():
    env = tiderl.make("gymnasium/FrozenLake-v1", options={"desc": ["SFF", "FHF", "FFG"]})
    env.reset(seed=1)
    (answer,), reward, *_ = env.step(act("right"))
    assert m.text_of(answer).splitlines()[-3:] == ["S[F]F", "FHF", "FFG"]
    (answer,), *_, info = env.step(act("sideways"))
    assert "'left', 'down', 'right', 'up'" in m.text_of(answer)
    assert "invalid_action" in info
    _, reward, terminated, _, info = env.step(act("down"))
    assert (reward, terminated, info["end"]) == (0.0, True, "failure")


def test_slippery_ice_follows_the_seed():
    env = tiderl.make("gymnasium/FrozenLake-v1", options={"is_slippery": True})
    assert env.oracle_maximum is False

    def walk(seed: int) -> list[str]:
        env.reset(seed=seed, options={"task": 7})
        texts = []
        for _ in range(6):
            observation, _, terminated, *_ = env.step(act("right"))
            texts.append(m.text_of(observation[0]))
            if terminated:
                break
        return texts

    assert walk(1) == walk(1)
    assert len({tuple(walk(seed)) for seed in range(8)}) > 1


def test_larger_lakes_are_larger():
    env = tiderl.make("gymnasium/FrozenLake8x8-v1")
    env.reset(seed=1)
    assert len(env.task["map"]) == 8


def test_taxi_tells_the_passenger_and_splits_by_state():
    env = tiderl.make("gymnasium/Taxi-v4")
    states = {split: set(env.task_lists.ids(split)) for split in env.splits}
    assert not states["train"] & states["test"]
    assert len(states["train"] | states["test"]) == 300
    observation, _ = env.reset(options={"task": min(states["train"])})
    text = m.text_of(observation[1])
    assert "The passenger is at " in text
    assert text.count("[") == 1
    _, reward, terminated, *_ = env.step(act("dropoff"))
    assert (reward, terminated) == (0.0, False)


def test_cliff_walking_starts_anywhere_safe():
    env = tiderl.make("gymnasium/CliffWalking-v1")
    states = {split: set(env.task_lists.ids(split)) for split in env.splits}
    assert not states["train"] & states["test"]
    assert states["test"]
    assert max(states["train"] | states["test"]) == 36
    task = min(states["test"])
    observation, _ = env.reset(options={"task": task, "split": "test"})
    rows = m.text_of(observation[1]).splitlines()
    assert rows[task // 12].split()[task % 12] == "x"


def test_blackjack_is_described_and_ends_within_its_range():
    env = tiderl.make("gymnasium/Blackjack-v1")
    ends = set()
    for seed in range(60):
        observation, _ = env.reset(seed=seed)
        assert "The dealer shows" in m.text_of(observation[1])
        terminated, total = False, 0.0
        while not terminated:
            _, reward, terminated, _, info = env.step(env.oracle())
            total += reward
        ends.add(total)
        assert info["success"] is (total == 1.0)
    assert ends == {-1.0, 0.0, 1.0}


def test_any_other_discrete_environment_works_and_is_clipped():
    env = tiderl.make("gymnasium/CartPole-v1", reward_scale=0.02, reward_range=(0.0, 0.05))
    observation, _ = env.reset(seed=1)
    assert m.text_of(observation[1]).startswith("[")
    rewards, over = [], False
    while not over:
        _, reward, terminated, truncated, _ = env.step(act(0))
        rewards.append(reward)
        over = terminated or truncated
    assert rewards[:4] == pytest.approx([0.02, 0.02, 0.01, 0.0])
    assert sum(rewards) == pytest.approx(0.05)
    assert "action" in env.tools[0]["function"]["parameters"]["properties"]


def test_a_scale_that_is_not_given_is_gymnasiums_own_or_is_asked_for():
    """One step of CartPole is 1 of the 475 that solve it, so a short game is no success."""
    env = tiderl.make("gymnasium/CartPole-v1")
    env.reset(seed=0)
    total = 0.0
    for _ in range(40):
        *_, reward, terminated, truncated, info = env.step(env.call(0))
        total += reward
        if terminated or truncated:
            break
    assert 0 < total < 0.1
    assert not info["success"]
    with pytest.raises(EnvironmentFault, match="reward_range"):
        tiderl.make("gymnasium/MountainCar-v0")


def test_what_cannot_be_played_is_refused():
    with pytest.raises(EnvironmentFault, match="not discrete"):
        tiderl.make("gymnasium/Pendulum-v1")
    with pytest.raises(UnknownEnvironment, match="gymnasium/FrozenLake-v1"):
        tiderl.make("gymnasium/FrozenLak-v1")
    with pytest.raises(UnknownEnvironment, match="gymnasium/Taxi-v4"):
        tiderl.make("gymnasium/Taxi-v3")
    with pytest.raises(EnvironmentFault, match="nothing"):
        tiderl.make("gymnasium/FrozenLake-v1", options={"nothing": 1})


def test_plans_find_the_shortest_way():
    # A corridor 0-1-2 with the goal at 2; action 1 goes right, 0 stays.
    table = {
        0: {0: [(1.0, 0, 0.0, False)], 1: [(1.0, 1, 0.0, False)]},
        1: {0: [(1.0, 1, 0.0, False)], 1: [(1.0, 2, 1.0, True)]},
        2: {0: [(1.0, 2, 0.0, True)], 1: [(1.0, 2, 0.0, True)]},
    }
    values = action_values(table, lambda reward, ended: reward)
    assert values == pytest.approx(np.array([[0.9801, 0.99], [0.99, 1.0], [0.0, 0.0]]), abs=1e-6)
    planner = Planner(lambda reward, ended: reward)
    assert [planner.best(table, state) for state in (0, 1)] == [1, 1]
