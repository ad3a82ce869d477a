"""Evaluations through real worker processes."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tiderl.agents.oracle import OraclePolicy
from tiderl.agents.random import RandomPolicy
from tiderl.env.ends import EndReason
from tiderl.errors import ConfigError, EnvironmentFault, InfrastructureError, RunExists, UnknownEnvironment
from tiderl.evaluation.journal import JOURNAL, read_journal
from tiderl.evaluation.plan import EvaluationPlan
from tiderl.evaluation.result import EvaluationResult
from tiderl.evaluation.runner import evaluate
from tiderl.hub.local import LocalHub

pytestmark = pytest.mark.usefixtures("installed")


def plan(**changes: Any) -> EvaluationPlan:
    values: dict[str, Any] = {"env_id": "evalrun/Word-v0", "policy": "oracle", "episodes": 12, "workers": 1}
    return EvaluationPlan(**(values | changes))


async def run(**changes: Any) -> EvaluationResult:
    async with asyncio.timeout(90):
        return await evaluate(plan(**changes))


def tasks_started(log: Path) -> Counter[str]:
    return Counter(log.read_text().split()) if log.exists() else Counter()


async def test_figures_of_a_run_without_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = await run(episodes=40)
    assert (result.valid, result.invalid, result.successes) == (40, 0, 30)
    assert result.success == 0.75
    assert result.ci95[0] < 0.75 < result.ci95[1]
    assert result.ends == {"failure": 10, "success": 30}
    assert result.turns == 1.0
    assert [e.index for e in result.episodes] == list(range(40))
    assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240


async def test_random_is_the_same_twice_whatever_the_concurrency() -> None:
    one = await run(policy="random", concurrency=1, seed=5)
    many = await run(policy="random", concurrency=12, seed=5)
    assert [(e.task, e.seed, e.reward, e.turns) for e in one.episodes] == [
        (e.task, e.seed, e.reward, e.turns) for e in many.episodes
    ]


async def test_the_training_loop_brings_its_own_hub_and_policy() -> None:
    async with LocalHub(workers=1) as hub:
        before = await evaluate(plan(), hub=hub, policy=OraclePolicy())
        after = await evaluate(plan(), hub=hub, policy=RandomPolicy())
    assert [(e.task, e.seed) for e in before.episodes] == [(e.task, e.seed) for e in after.episodes]
    assert before.success is not None
    assert after.success is not None
    assert after.success < before.success


async def test_t84_more_episodes_run_only_the_new_ones(tmp_path: Path) -> None:
    log = tmp_path / "log"
    options: dict[str, Any] = {"out": tmp_path / "e", "env_kwargs": {"log": str(log)}}
    await run(episodes=5, **options)
    assert sum(tasks_started(log).values()) == 5
    result = await run(episodes=10, **options)
    assert sum(tasks_started(log).values()) == 10
    assert max(tasks_started(log).values()) == 1
    assert result.valid == 10
    assert len((tmp_path / "e" / JOURNAL).read_text().splitlines()) == 10
    again = await run(episodes=10, **options)
    assert sum(tasks_started(log).values()) == 10
    assert again.to_json() == result.to_json()
    fewer = await run(episodes=5, **options)
    assert (fewer.valid, fewer.requested) == (5, 5)


async def test_t84_interrupted_at_some_episode_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    options: dict[str, Any] = {
        "out": tmp_path / "e",
        "env_kwargs": {"log": str(log), "pause": 0.1},
        "concurrency": 1,
    }
    task = asyncio.create_task(run(episodes=10, **options))
    while not (tmp_path / "e" / JOURNAL).exists() or len(read_journal(tmp_path / "e")) < 3:
        await asyncio.sleep(0.02)
        assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    kept = read_journal(tmp_path / "e")
    assert 3 <= len(kept) < 10
    assert json.loads((tmp_path / "e" / "summary.json").read_text())["complete"] is False
    result = await run(episodes=10, **options)
    assert result.valid == 10
    assert {i: r for i, r in read_journal(tmp_path / "e").items() if i in kept} == kept
    # Only what was in flight at the interrupt was started twice.
    assert sum(tasks_started(log).values()) <= 11


async def test_t85_infrastructure_is_run_again_and_real_failures_are_kept(tmp_path: Path) -> None:
    log, crash = tmp_path / "log", tmp_path / "crashed"
    options: dict[str, Any] = {
        "out": tmp_path / "e",
        "episodes": 40,
        "env_kwargs": {"log": str(log), "crash": str(crash)},
        "concurrency": 2,
    }
    first = await run(**options)
    assert crash.exists()
    assert 1 <= first.invalid <= 2
    assert first.valid + first.invalid == 40
    assert first.successes < first.valid
    assert sum(first.errors.values()) == first.invalid
    before = tasks_started(log)
    second = await run(**options)
    assert (second.valid, second.invalid, second.successes) == (40, 0, 30)
    assert sum(tasks_started(log).values()) - sum(before.values()) == first.invalid
    assert len((tmp_path / "e" / JOURNAL).read_text().splitlines()) == 40 + first.invalid


async def test_t08_one_of_twenty_never_answers(tmp_path: Path) -> None:
    result = await run(episodes=20, env_kwargs={"slow_task": 3}, episode_timeout=1.5, concurrency=8)
    late = [e for e in result.episodes if e.task == 3]
    assert result.valid + result.invalid == 20
    # It never came to a reply, so it is no zero (C-70).
    assert [e.end for e in late] == [EndReason.INFRASTRUCTURE] * len(late)
    assert result.invalid == len(late)


async def test_c12_another_configuration_in_the_same_folder(tmp_path: Path) -> None:
    out = tmp_path / "e"
    await run(out=out, episodes=3)
    for changes, named in [
        ({"policy": "random"}, "policy.name"),
        ({"seed": 1}, "seed: 0 there, 1 now"),
        ({"split": "train"}, "split"),
        ({"env_kwargs": {"pause": 0.0}}, "env_kwargs.pause"),
        ({"episode_timeout": 9.0}, "episode_timeout"),
    ]:
        with pytest.raises(RunExists, match=named):
            await run(out=out, episodes=3, **changes)
    fresh = await run(out=out, episodes=2, seed=1, resume=False)
    assert fresh.valid == 2
    assert len(read_journal(out)) == 2


async def test_bad_input_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "e"
    with pytest.raises(UnknownEnvironment, match="evalrun/Word-v0"):
        await run(env_id="evalrun/Wrod-v0", out=out)
    with pytest.raises(ConfigError, match="train, test"):
        await run(split="validation", out=out)
    with pytest.raises(ConfigError, match="did you mean oracle"):
        await run(policy="orakle", out=out)
    with pytest.raises(EnvironmentFault, match="colour"):
        await run(env_kwargs={"colour": 1}, out=out)
    assert not out.exists()


async def test_c66_failure_after_failure_stops(tmp_path: Path) -> None:
    class Down(OraclePolicy):
        async def act(self, messages: Any, spec: Any, state: Any) -> str:
            raise ConnectionError("the model is down")

    async with LocalHub(workers=1) as hub:
        with pytest.raises(InfrastructureError, match="the model is down"):
            await evaluate(plan(episodes=40, concurrency=2, out=tmp_path / "e"), hub=hub, policy=Down())
    assert 8 <= len(read_journal(tmp_path / "e")) < 20


async def test_t87_an_environment_that_cannot_close_costs_no_result() -> None:
    result = await run(episodes=8, env_kwargs={"broken_close": True})
    assert (result.valid, result.invalid) == (8, 0)


async def test_a_users_policy_by_its_entry_point() -> None:
    result = await run(policy="says:other", episodes=40)
    assert result.successes == 10


async def test_pictures_are_kept_with_the_episode(tmp_path: Path) -> None:
    result = await run(env_id="evalrun/Picture-v0", episodes=3, out=tmp_path / "e")
    assert result.successes == 3
    assert len(list((tmp_path / "e" / "episodes" / "images").glob("*.png"))) == 3
