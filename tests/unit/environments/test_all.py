"""What every built-in environment must keep."""

from __future__ import annotations

from typing import Any

import pytest
from gymnasium.utils.env_checker import check_env, data_equivalence

import tiderl

IDS = [spec.id for spec in tiderl.list_environments() if spec.package == "tiderl"]
RANDOM_BELOW = 0.35


def episode(env: Any, act: Any, **reset: Any) -> tuple[float, dict[str, Any]]:
    """The return and the final info."""
    env.reset(**reset)
    total, over = 0.0, False
    while not over:
        _, reward, terminated, truncated, info = env.step(act())
        total, over = total + reward, terminated or truncated
    low, high = env.reward_range
    assert low - 1e-9 <= total <= high + 1e-9
    return total, info


def test_all_of_them_are_there():
    assert {"tide/Calculator-v0", "tide/Pointer-v0", "tide/Safe-v0", "tide/Waiting-v0"} <= set(IDS)
    assert {"gymnasium/FrozenLake-v1", "gymnasium/Taxi-v4", "gymnasium/CliffWalking-v1"} <= set(IDS)


@pytest.mark.parametrize("env_id", IDS)
@pytest.mark.filterwarnings("error")
def test_gymnasiums_own_checker_passes(env_id):
    check_env(tiderl.make(env_id), skip_render_check=True)


@pytest.mark.parametrize("env_id", IDS)
def test_the_oracle_is_perfect_on_both_splits(env_id):
    env = tiderl.make(env_id)
    for split in env.splits:
        ids = env.task_lists.ids(split)
        for position in range(0, len(ids), max(1, len(ids) // 12)):
            total, info = episode(
                env, env.oracle, seed=position, options={"task": ids[position], "split": split}
            )
            if env.oracle_maximum:
                assert total == pytest.approx(env.reward_range[1])
                assert info["success"] is True


@pytest.mark.parametrize("env_id", IDS)
def test_random_play_is_well_below(env_id):
    env = tiderl.make(env_id)
    env.action_space.seed(0)
    total = sum(
        episode(env, env.action_space.sample, seed=seed, options={"split": "test"})[0] for seed in range(60)
    )
    assert total / 60 < RANDOM_BELOW


@pytest.mark.parametrize("env_id", IDS)
def test_two_instances_do_not_touch_each_other(env_id):
    def story(env: Any, other: Any | None) -> list[Any]:
        env.action_space.seed(3)
        out = [env.reset(seed=9)]
        for _ in range(env.max_turns):
            if other is not None:
                other.reset(seed=len(out))
                other.step(other.action_space.sample())
            out.append(env.step(env.action_space.sample()))
            if out[-1][2] or out[-1][3]:
                break
        return out

    alone = story(tiderl.make(env_id), None)
    assert data_equivalence(story(tiderl.make(env_id), tiderl.make(env_id)), alone, exact=True)


@pytest.mark.parametrize("env_id", IDS)
def test_splits_are_named_and_tasks_have_ids(env_id):
    env = tiderl.make(env_id)
    assert env.splits == ("train", "test")
    for split in env.splits:
        ids = env.task_lists.ids(split)
        assert len(ids) >= 4
        assert env.task_lists.find(split, ids[-1])["id"] == ids[-1]


@pytest.mark.parametrize("env_id", IDS)
def test_classes_and_tools_are_described(env_id):
    spec = tiderl.spec(env_id)
    assert len(spec.description) > 30
    assert all(one["function"]["description"] for one in spec.tools)
    assert spec.has_oracle
