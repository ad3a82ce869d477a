"""The meter of a rollout: each second of a task and of an engine is counted once, under the right cause."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.rollout.table import WAYS, TaskTable
from tiderl.scheduling.views import KV, EngineView, State, Task
from tiderl.telemetry.rollout_meter import RolloutMeter, main_wait

ONE = EngineView("e0", capacity=100, slots=4, promised=25)
TWO = EngineView("e1", capacity=100, slots=4)


def task(key: str = "a", ordinal: int = 0, at: float = 0.0) -> Task:
    return Task(key, (ordinal, 0), "env", State.QUEUED, since=at, queued=at)


def rollout(*views: EngineView) -> tuple[RolloutMeter, TaskTable]:
    """A meter that listens to a real task table."""
    meter = RolloutMeter()
    meter.engines(views or (ONE,), 0.0)
    return meter, TaskTable(meter.moved)


def to_paused(table: TaskTable, key: str, at: float, context: int = 10) -> None:
    """Queued to paused within no time."""
    table.move(key, State.ADMITTED, at)
    table.move(key, State.READY, at)
    table.move(key, State.RUNNING, at, kv=KV.HELD, engine="e0")
    table.move(key, State.PAUSED, at, kv=KV.HELD, context=context, turn=1)


def test_seconds_of_a_task_go_to_its_states() -> None:
    meter, table = rollout()
    table.add(task())
    table.move("a", State.ADMITTED, 2.0)
    table.move("a", State.READY, 3.0)
    table.move("a", State.RUNNING, 3.5, kv=KV.HELD, engine="e0")
    table.move("a", State.PAUSED, 7.5, kv=KV.HELD, context=10, turn=1)
    table.change("a", 9.5, "released", kv=KV.CACHED)
    meter.engines([ONE], 15.5)
    seen = meter.snapshot()
    assert seen["task_s"] == {"queued": 2.0, "reset": 1.0, "ready": 0.5, "running": 4.0, "environment": 8.0}
    assert seen["held_idle_token_s"] == 20.0  # 10 tokens from 7.5 to 9.5
    assert seen["tasks"]["paused"] == 1
    assert seen["kv_fill"] == {"e0": 0.25}


def test_kv_hit_rate_is_over_later_turns_only() -> None:
    meter = RolloutMeter()
    first = task()
    meter.turn(first, prompt_tokens=100, cached_tokens=0, new_tokens=100, reprefilled=0, sampled=5)
    second = replace(first, turn=1, context=105)
    meter.turn(
        second,
        prompt_tokens=120,
        cached_tokens=90,
        new_tokens=15,
        reprefilled=15,
        cause="mispredicted",
        sampled=5,
    )
    forked = replace(first, turn=2, context=0)
    meter.turn(forked, prompt_tokens=130, cached_tokens=0, new_tokens=130, reprefilled=0, sampled=5)
    seen = meter.snapshot()
    assert seen["kv_hit_rate"] == 90 / 120
    assert seen["reprefilled_by_cause"]["mispredicted"] == seen["reprefilled_tokens"] == 15
    assert (seen["turns"], seen["prompt_tokens"], seen["sampled_tokens"]) == (3, 350, 15)


def test_without_later_turns_there_is_no_hit_rate() -> None:
    assert RolloutMeter().snapshot()["kv_hit_rate"] is None


def waits(meter: RolloutMeter) -> dict[str, float]:
    return {k: v for k, v in meter.snapshot()["waiting_s"].items() if v}


def test_an_engine_waits_for_the_environment_when_all_in_flight_are_paused() -> None:
    meter, table = rollout()
    table.add(task())
    to_paused(table, "a", 0.0)
    meter.engines([ONE], 3.0)
    assert waits(meter) == {"environment": 3.0}


def test_an_engine_waits_for_admission_when_there_is_work_for_it() -> None:
    meter, table = rollout()
    table.add(task())
    to_paused(table, "a", 0.0)
    table.add(task("b", 1))
    meter.engines([ONE], 3.0)
    assert waits(meter) == {"admission": 3.0}


def test_an_engine_waits_at_the_barrier_when_nothing_may_be_admitted() -> None:
    meter, table = rollout()
    meter.engines([ONE], 0.0, allowed=1)
    table.add(task())
    to_paused(table, "a", 0.0)
    table.add(task("b", 1))
    meter.engines([ONE], 3.0, allowed=1)
    assert waits(meter) == {"barrier": 3.0}
    table.move("a", State.DONE, 3.0)
    table.move("b", State.CANCELLED, 3.0)
    meter.engines([ONE], 5.0)
    assert waits(meter) == {"barrier": 5.0}, "with nothing in flight it waits for the next step"


def test_an_engine_waits_for_weights_and_serves_an_evaluation() -> None:
    meter, table = rollout()
    table.add(task())
    meter.occupied("weights", 0.0)
    meter.occupied("", 2.0)
    meter.occupied("evaluation", 3.0)
    meter.engines([ONE], 9.0)
    assert waits(meter) == {"weights": 2.0, "admission": 1.0}
    assert meter.snapshot()["engine_s"] == 3.0, "an evaluation is no rollout"


def test_idle_engines_are_told_apart() -> None:
    leaving = replace(TWO, name="e2", accepting=False)
    meter, table = rollout(ONE, TWO, leaving)
    table.add(task())
    table.move("a", State.ADMITTED, 0.0)
    table.move("a", State.READY, 0.0)
    table.move("a", State.RUNNING, 0.0, kv=KV.HELD, engine="e0")
    meter.engines([ONE, TWO, leaving], 4.0)
    seen = meter.snapshot()
    assert seen["engine_idle_s"] == {"e1": 4.0}
    assert seen["engine_s"] == 8.0
    assert main_wait(seen) == ("barrier", 0.5)


def test_a_turn_that_an_engines_death_cut_short_runs_nowhere() -> None:
    meter, table = rollout(ONE, TWO)
    table.add(task())
    table.move("a", State.ADMITTED, 0.0)
    table.move("a", State.READY, 0.0)
    table.move("a", State.RUNNING, 0.0, kv=KV.HELD, engine="e0")
    table.move("a", State.READY, 1.0, "engine_died", kv=KV.NONE, engine="")
    meter.engines([TWO], 1.0)
    meter.engines([TWO], 3.0)
    assert meter.snapshot()["engine_idle_s"] == {"e1": 3.0}
    assert waits(meter) == {"barrier": 1.0, "admission": 2.0}


def test_ends_are_counted_by_kind() -> None:
    meter = RolloutMeter()
    table = TaskTable(lambda b, a, at, cause: meter.moved(b, a, at, cause))
    for key, end, cause in (
        ("a", State.DONE, "success"),
        ("b", State.FAILED, "infrastructure"),
        ("c", State.CANCELLED, ""),
    ):
        table.add(task(key))
        to_paused(table, key, 1.0)
        meter.turn(
            replace(task(key), turn=1, context=10),
            prompt_tokens=1,
            cached_tokens=0,
            new_tokens=1,
            reprefilled=0,
            sampled=7,
        )
        table.move(key, end, 2.0, cause)
    seen = meter.snapshot()
    assert (seen["episodes_finished"], seen["episodes_cancelled"], seen["episodes_failed"]) == (1, 1, 1)
    assert seen["failed_by_reason"] == {"infrastructure": 1}
    assert seen["tokens_finished"] == 7


def test_a_meter_that_comes_later_than_its_tasks() -> None:
    meter = RolloutMeter()
    queued = task(at=1.0)
    meter.moved(queued, replace(queued, state=State.ADMITTED, since=4.0), 4.0)
    seen = meter.snapshot()
    assert seen["task_s"]["queued"] == 3.0
    assert seen["tasks"] == {"queued": 0, "admitted": 1, "ready": 0, "running": 0, "paused": 0}


def test_figures_of_an_interval() -> None:
    meter, table = rollout()
    table.add(task())
    to_paused(table, "a", 0.0)
    meter.engines([ONE], 3.0)
    later = replace(task(), turn=1, context=10)
    meter.turn(later, prompt_tokens=10, cached_tokens=10, new_tokens=0, reprefilled=0, sampled=1)
    before = meter.snapshot()
    meter.turn(later, prompt_tokens=10, cached_tokens=5, new_tokens=0, reprefilled=5, cause="new", sampled=1)
    table.move("a", State.READY, 4.0)
    meter.engines([ONE], 5.0)
    lately = meter.since(before)
    assert lately["kv_hit_rate"] == 0.5
    assert lately["reprefilled_by_cause"]["new"] == 5
    assert lately["waiting_s"] == {"environment": 1.0, "admission": 1.0, "barrier": 0.0, "weights": 0.0}
    assert lately["waiting_share"]["admission"] == 0.5
    assert lately["tasks"]["ready"] == 1
    assert meter.since({}) == meter.snapshot()


@given(st.data())
def test_no_second_is_lost_or_counted_twice(data: st.DataObject) -> None:
    meter, table = rollout(ONE, TWO)
    at, lived = 0.0, 0.0
    alive: dict[str, float] = {}
    for number in range(data.draw(st.integers(1, 60))):
        at += data.draw(st.sampled_from([0.0, 0.25, 1.0]))
        keys = sorted(alive)
        key = data.draw(st.sampled_from([*keys, "new"]))
        if key == "new":
            key = f"t{number}"
            table.add(task(key, number, at))
            alive[key] = at
            continue
        now = table[key]
        to = data.draw(st.sampled_from(sorted(WAYS[now.state])))
        changes = {}
        if to is State.RUNNING:
            changes = {"kv": KV.HELD, "engine": data.draw(st.sampled_from(["e0", "e1"]))}
        elif to is State.PAUSED:
            kv = data.draw(st.sampled_from([KV.HELD, KV.CACHED, KV.COLD]))
            changes = {"kv": kv, "context": now.context + 8, "turn": now.turn + 1}
        elif now.state is State.RUNNING and not to.final:
            changes = {"kv": KV.COLD, "engine": ""}
        table.move(key, to, at, **changes)
        if to.final:
            lived += at - alive.pop(key)
    meter.engines([ONE, TWO], at + 1.0)
    at += 1.0
    lived += sum(at - began for began in alive.values())
    seen = meter.snapshot()
    assert sum(seen["task_s"].values()) == pytest.approx(lived)
    assert sum(seen["tasks"].values()) == len(alive) == len(table)
    assert seen["engine_s"] == pytest.approx(2 * seen["seconds"])
    assert seen["waiting_total_s"] <= seen["engine_s"] + 1e-9
    assert sum(seen["engine_idle_s"].values()) <= seen["waiting_total_s"] + 1e-9
    for state in State:
        if not state.final:
            assert seen["tasks"][str(state)] == table.count(state)
    assert json.loads(json.dumps(seen)) == seen


def test_an_event_costs_microseconds() -> None:
    meter, _ = rollout(ONE, TWO)
    ready = replace(task(), state=State.READY)
    running = replace(ready, state=State.RUNNING, engine="e0", kv=KV.HELD)
    meter.moved(None, ready, 0.0)
    began = time.process_time()
    for i in range(5_000):
        meter.moved(ready, running, i / 100)
        meter.moved(running, ready, i / 100 + 0.005)
    assert time.process_time() - began < 1.0
