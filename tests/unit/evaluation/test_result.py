"""The figures of an evaluation: what counts, what does not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tiderl.env.ends import EndReason
from tiderl.evaluation.result import EpisodeResult, EvaluationResult, summarize
from tiderl.evaluation.statistics import wilson


def episode(
    index: int, reward: float = 1.0, end: EndReason = EndReason.SUCCESS, **changes: Any
) -> EpisodeResult:
    values: dict[str, Any] = {
        "index": index,
        "task": index % 4,
        "seed": index,
        "end": end,
        "success": end is EndReason.SUCCESS,
        "reward": reward,
        "rewards": (reward,),
        "turns": 2,
        "model_calls": 2,
        "prompt_tokens": 100,
        "completion_tokens": 10,
        "seconds": 1.0 + index,
        "latencies": (0.1, 0.3),
        "at": 1.0 + index,
    }
    return EpisodeResult(**(values | changes))


def total(records: list[EpisodeResult], requested: int | None = None) -> EvaluationResult:
    return summarize(
        records,
        env_id="demo/X-v0",
        policy="oracle",
        split="test",
        seed=0,
        requested=requested or len(records),
    )


def test_figures() -> None:
    records = [episode(i) for i in range(3)] + [episode(3, 0.2, EndReason.MAX_TURNS)]
    found = total(records)
    assert (found.success, found.successes, found.valid, found.invalid) == (0.75, 3, 4, 0)
    assert found.ci95 == wilson(3, 4)
    assert found.reward_mean == pytest.approx(0.8)
    assert found.ends == {"max_turns": 1, "success": 3}
    assert (found.truncated, found.turns, found.model_calls) == (1, 2.0, 8)
    assert found.tokens == {"prompt": 400, "completion": 40}
    assert found.seconds["latency_p50"] == pytest.approx(0.2)
    assert found.complete
    assert found.line().startswith("success 0.750 [0.301, 0.954] (3/4) · reward 0.800 · 2.0 turns")


def test_c67_infrastructure_is_in_no_mean_and_said_so() -> None:
    bad = episode(2, 0.0, EndReason.INFRASTRUCTURE, error="worker died", seconds=999.0, latencies=(99.0,))
    found = total([episode(0), episode(1), bad])
    assert (found.success, found.reward_mean, found.valid, found.invalid) == (1.0, 1.0, 2, 1)
    assert found.ci95 == wilson(2, 2)
    assert found.tokens["completion"] == 20
    assert found.seconds["episode_p95"] < 10
    assert found.errors == {"worker died": 1}
    assert not found.complete
    assert "1 of 3" in found.to_json()["excluded"]
    assert "1 invalid, not counted" in found.line()


def test_c70_zero_model_calls_are_not_a_zero() -> None:
    found = total([episode(0), episode(1, 0.0, EndReason.FAILURE, model_calls=0)])
    assert (found.success, found.valid, found.invalid) == (1.0, 1, 1)


def test_nothing_valid() -> None:
    found = total([episode(0, 0.0, EndReason.INFRASTRUCTURE, error="x")], requested=4)
    assert (found.success, found.reward_mean, found.reward_ci95) == (None, None, None)
    assert "n/a" in found.line()
    json.dumps(found.to_json(), allow_nan=False)


def test_the_order_in_which_episodes_ended_does_not_matter() -> None:
    records = [episode(i, i / 10) for i in range(8)]
    assert total(records).to_json() == total(records[::-1]).to_json()


def test_wall_clock_adds_up_the_processes() -> None:
    records = [episode(0, at=5.0), episode(1, at=7.0), episode(2, at=2.5, process=2)]
    assert total(records).seconds["wall"] == pytest.approx(9.5)
    assert total(records).to_json()["wall_s"] == pytest.approx(9.5)


def test_tasks_are_counted_once() -> None:
    assert total([episode(i) for i in range(8)]).tasks == 4
    assert total([episode(i, task=None) for i in range(8)]).tasks == 8


@pytest.mark.parametrize("task", [0, None, "only"])
def test_the_interval_of_one_task_or_of_seeds_alone_is_over_episodes(task: Any) -> None:
    rewards = [1.0 if i % 4 == 0 else 0.0 for i in range(40)]
    ends = {1.0: EndReason.SUCCESS, 0.0: EndReason.FAILURE}
    found = total([episode(i, reward, ends[reward], task=task) for i, reward in enumerate(rewards)])
    assert found.reward_ci95 is not None
    low, high = found.reward_ci95
    assert 0.05 < low < 0.2 < 0.3 < high < 0.5


def test_the_interval_over_several_tasks_draws_whole_tasks() -> None:
    """Two tasks, each always won or always lost: the interval spans all that two tasks can give."""
    ends = {1.0: EndReason.SUCCESS, 0.0: EndReason.FAILURE}
    records = [episode(i, float(i % 2), ends[float(i % 2)], task=i % 2) for i in range(40)]
    assert total(records).reward_ci95 == (0.0, 1.0)
