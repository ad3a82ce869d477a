"""The list of episodes and the checks of an evaluation's settings."""

from __future__ import annotations

import pytest

from tiderl.errors import ConfigError, EnvironmentFault
from tiderl.evaluation.plan import EvaluationPlan, default_out, plan_episodes, task_set_digest


def test_same_tasks_split_and_seed_give_the_same_episodes() -> None:
    ids = [f"t{i}" for i in range(50)]
    one = plan_episodes(ids, split="test", seed=3, episodes=70)
    assert one == plan_episodes(ids, split="test", seed=3, episodes=70)
    assert one != plan_episodes(ids, split="test", seed=4, episodes=70)
    assert one != plan_episodes(ids, split="train", seed=3, episodes=70)


def test_order_of_the_task_list_does_not_matter() -> None:
    ids = list(range(20))
    forward = plan_episodes(ids, split="test", seed=0, episodes=20)
    assert forward == plan_episodes(ids[::-1], split="test", seed=0, episodes=20)


def test_t84_a_longer_plan_begins_with_the_shorter_one() -> None:
    ids = list(range(7))
    assert plan_episodes(ids, split="test", seed=1, episodes=30)[:5] == plan_episodes(
        ids, split="test", seed=1, episodes=5
    )


def test_every_task_comes_once_before_any_comes_twice_with_another_seed() -> None:
    planned = plan_episodes(list(range(10)), split="test", seed=0, episodes=25)
    assert sorted(p.task for p in planned[:10]) == list(range(10))
    assert sorted(p.task for p in planned[10:20]) == list(range(10))
    assert len({(p.task, p.seed) for p in planned}) == 25
    assert all(0 <= p.seed < 2**31 for p in planned)
    assert [p.index for p in planned] == list(range(25))


def test_no_task_list_means_a_new_seed_each_time() -> None:
    planned = plan_episodes([], split="test", seed=0, episodes=12)
    assert {p.task for p in planned} == {None}
    assert len({p.seed for p in planned}) == 12


def test_equal_task_ids_are_a_fault() -> None:
    with pytest.raises(EnvironmentFault, match="'a'"):
        plan_episodes(["a", "b", "a"], split="test", seed=0, episodes=1)
    assert len(plan_episodes([1, "1"], split="test", seed=0, episodes=2)) == 2


def test_c12_digest_follows_the_set_of_tasks() -> None:
    assert task_set_digest([1, 2, 3]) == task_set_digest([3, 1, 2])
    assert task_set_digest([1, 2, 3]) != task_set_digest([1, 2, 4])
    assert task_set_digest([1]) != task_set_digest(["1"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("episodes", 0),
        ("episodes", -3),
        ("seed", -1),
        ("workers", 0),
        ("concurrency", 0),
        ("max_tokens", -1),
        ("episode_timeout", 0.0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
    ],
)
def test_bad_numbers_are_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        EvaluationPlan(env_id="demo/X-v0", **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "folder"),
    [
        ("oracle", "evals/tide-Safe-v0-oracle"),
        ("run:runs/quickstart", "evals/tide-Safe-v0-run-quickstart"),
        ("run:runs/quickstart/", "evals/tide-Safe-v0-run-quickstart"),
        ("hf:HuggingFaceTB/SmolLM2", "evals/tide-Safe-v0-hf-HuggingFaceTB-SmolLM2"),
        ("openai:http://user:secret@host/v1#org/Model", "evals/tide-Safe-v0-openai-org-Model"),
        ("mine:../../etc", "evals/tide-Safe-v0-mine-etc"),
    ],
)
def test_default_folder(policy: str, folder: str) -> None:
    assert str(default_out("tide/Safe-v0", policy)) == folder
