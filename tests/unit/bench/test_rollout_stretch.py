"""All seconds of a workload are stretched alike, and nothing else is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tiderl.bench.rollout.files import load_workload
from tiderl.bench.rollout.setup import Plan
from tiderl.bench.rollout.stretch import BESIDE, probe, stretched
from tiderl.bench.rollout.workload import Workload

WORKLOAD = load_workload("heavy_tail")


def _bench(workload: Workload = WORKLOAD) -> Any:
    none: Any = None
    plan = Plan(workload, none, none, none, none, workload.environment(), none, {}, [])
    return SimpleNamespace(plan=plan, engines=["engine"])


def test_waits_trainer_and_window_are_stretched() -> None:
    bench = _bench()
    longer = stretched(bench, 2.5)
    before, after = bench.plan.workload, longer.plan.workload
    assert longer.plan.arguments["pace"] == 2.5
    assert after.trainer.update_s == 2.5 * before.trainer.update_s
    assert after.measure.warmup_s == 2.5 * before.measure.warmup_s
    assert after.measure.seconds == 2.5 * before.measure.seconds
    assert after.measure.timeout_s == 2.5 * before.measure.timeout_s
    assert (after.load, after.episodes, after.model) == (before.load, before.episodes, before.model)
    assert longer.engines is bench.engines
    assert "pace" not in bench.plan.arguments


def test_a_faster_machine_has_no_shorter_deadline() -> None:
    shorter = stretched(_bench(), 0.5).plan.workload
    assert shorter.measure.seconds == WORKLOAD.measure.seconds / 2
    assert shorter.measure.timeout_s == WORKLOAD.measure.timeout_s


def test_the_probe_has_few_episodes_whole_groups_and_no_trainer_in_the_way() -> None:
    found = probe(WORKLOAD)
    assert found.load.concurrency == BESIDE
    assert found.trainer.update_s == 0
    assert found.episodes == WORKLOAD.episodes
    large = WORKLOAD.model_copy(update={"load": WORKLOAD.load.model_copy(update={"group_size": 12})})
    assert probe(large).load.concurrency == 12
