"""From counters to figures, from cells to ratios and tables; recording."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tiderl.bench.rollout import report as rep
from tiderl.bench.rollout.figures import Count, Edge, figures
from tiderl.bench.rollout.tables import cause_table, grid_table, markdown, ranged, workload_table
from tiderl.bench.rollout.trace import Recorder
from tiderl.engine.base import EngineStats
from tiderl.env.ends import EndReason
from tiderl.env.messages import assistant, user
from tiderl.errors import ConfigError
from tiderl.scheduling.views import KV, State, Task
from tiderl.telemetry.rollout_meter import RolloutMeter
from tiderl.trajectory.record import TokenRecord
from tiderl.trajectory.trajectory import Trajectory


def stats(**counters: int) -> EngineStats:
    zero = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
    return EngineStats(**{**zero, **counters})


def edges(seconds: float = 10.0, **more: Any) -> tuple[Edge, Edge]:
    meter = RolloutMeter().snapshot()
    before = Count(groups=3, episodes=12, generated=1000, trained=800, trained_episodes=8, staleness={0: 8})
    after = Count(
        groups=5, episodes=20, generated=3000, trained=2400, trained_fresh=1200, trained_episodes=24,
        updates=4, staleness={0: 10, 2: 6}, trainer_s={"waiting": 6.0, "training": 3.0, "publishing": 1.0},
    )  # fmt: skip
    later = {**meter, "waiting_s": {"environment": 1.0, "admission": 0.5, "barrier": 5.0, "weights": 0.0}}
    later["sampled_tokens"] = 2500
    first = Edge.of(
        100.0, before, meter, [stats(later_prompt_tokens=50, later_cached_tokens=50)], {"engines": 3.0}
    )
    counters = {"later_prompt_tokens": 1050, "later_cached_tokens": 850, "reprefilled_tokens": 200}
    return first, Edge.of(
        100.0 + seconds, after, later | more, [stats(**counters, prefill_tokens=400)], {"engines": 9.0}
    )


def test_figures_are_differences_over_the_window() -> None:
    found = figures(*edges(), engines=1, colocated=False)
    assert found["loss_tokens_per_s"] == pytest.approx(200)
    assert found["sampled_tokens_per_s"] == pytest.approx(250)
    assert found["goodput_tokens_per_s"] == pytest.approx(120)
    assert found["kv_hit_rate"] == pytest.approx(0.8)
    assert found["cpu_s"] == {"engines": 6.0}
    assert found["kv_reuse"] == pytest.approx(0.8)
    assert found["length"] == {"generated": 250, "trained": 100}
    assert found["staleness"] == {"mean": pytest.approx(1.5), "max": 2, "episodes": {"0": 2, "2": 6}}
    assert found["waiting_share"] == pytest.approx(0.65)
    assert found["waiting_s_per_1000_tokens"] == pytest.approx(3.25)
    assert found["trainer_waiting_share"] == pytest.approx(0.6)


def test_a_colocated_trainer_works_where_the_engines_are() -> None:
    found = figures(*edges(), engines=1, colocated=True)
    assert found["waiting_s"]["barrier"] == pytest.approx(1.0), "5 s, of which 3 s were training, 1 s weights"
    assert found["waiting_s"]["weights"] == pytest.approx(1.0)
    assert found["trainer_waiting_share"] == 0.0


def test_edges_are_copies() -> None:
    count = Count(staleness={0: 1})
    edge = Edge.of(0.0, count, {}, [], {})
    count.staleness[0] = 7
    count.generated = 5
    assert (edge.count.staleness, edge.count.generated) == ({0: 1}, 0)


def cell(policy: str, number: int, rate: float, hit: float = 0.9, wait: float = 0.2) -> dict[str, Any]:
    found = figures(*edges(), engines=1, colocated=False)
    return found | {
        "policy": policy, "round": number, "options": {}, "loss_tokens_per_s": rate, "kv_hit_rate": hit,
        "waiting_share": wait, "waiting_s_per_1000_tokens": 1000 * wait / rate,
    }  # fmt: skip


CELLS = [
    cell("ctb", 1, 300), cell("sync", 1, 50, wait=0.8), cell("async", 1, 200, hit=0.5),
    cell("sync", 2, 40, wait=0.8), cell("async", 2, 250, hit=0.5), cell("ctb", 2, 200),
    cell("async", 3, 100, hit=0.5), cell("ctb", 3, 300), cell("sync", 3, 100, wait=0.8),
]  # fmt: skip


def test_ratios_are_taken_within_a_round() -> None:
    found = rep.summary(CELLS)
    assert found["against"]["sync"]["loss_tokens_per_s"] == {"median": 5.0, "min": 3.0, "max": 6.0}
    assert found["against"]["async"]["loss_tokens_per_s"] == {"median": 1.5, "min": 0.8, "max": 3.0}
    assert found["against"]["async"]["kv_hit_rate"]["median"] == pytest.approx(1.8)
    assert found["against"]["sync"]["waiting_share"]["median"] == pytest.approx(0.25)
    assert found["against"]["sync"]["waiting_s_per_1000_tokens"]["median"] == pytest.approx(0.05)
    assert found["best_baseline"] == "async"
    assert found["of_best"]["ctb"] == found["against"]["async"]["loss_tokens_per_s"]
    assert found["of_best"]["async"]["median"] == 1.0


def test_a_round_that_one_side_lacks_does_not_count() -> None:
    found = rep.summary([c for c in CELLS if (c["policy"], c["round"]) != ("sync", 3)])
    assert found["against"]["sync"]["loss_tokens_per_s"] == {"median": 5.5, "min": 5.0, "max": 6.0}
    alone = rep.summary([CELLS[0], CELLS[3]])
    assert alone["against"]["sync"]["loss_tokens_per_s"] is None
    assert "against" not in rep.summary([CELLS[1]])


def test_a_cell_without_tokens_is_no_ratio_to_divide_by() -> None:
    empty = cell("sync", 1, 0.0001) | {"loss_tokens_per_s": 0.0, "waiting_s_per_1000_tokens": None}
    found = rep.summary([CELLS[0], empty])
    assert found["against"]["sync"]["loss_tokens_per_s"] is None
    assert workload_table(found)[1][1][0] == "sync"


def test_tables_show_losses_like_wins() -> None:
    found = rep.summary(CELLS)
    headings, rows = workload_table(found)
    assert [len(row) for row in rows] == [len(headings)] * 3
    by_name = {row[0]: dict(zip(headings, row, strict=True)) for row in rows}
    assert by_name["sync"]["ctb is"] == "5.00x (3.00x to 6.00x)"
    assert by_name["async"]["ctb is"] == "1.50x (0.80x to 3.00x)"
    assert by_name["ctb"]["ctb is"] == ""
    headings, rows = cause_table(found)
    assert [len(row) for row in rows] == [len(headings)] * 3
    headings, rows = grid_table([{"name": "a", "summary": found}])
    assert rows == [["a", "async, 200/s", "1.50 (0.80 to 3.00)", "0.25", "1.00"]]
    text = markdown(headings, rows)
    assert text.splitlines()[1].count("---") == len(headings)
    assert ranged({"median": 2.0, "min": 2.0, "max": 2.0}, "{:.1f}") == "2.0"


def test_every_policy_begins_once_in_as_many_rounds() -> None:
    names = ["a", "b", "c"]
    orders = [rep.rotated(names, number) for number in (1, 2, 3, 4)]
    assert [order[0] for order in orders] == ["a", "b", "c", "a"]
    assert all(sorted(order) == names for order in orders)


def test_a_resume_keeps_what_still_holds() -> None:
    cells = [CELLS[0], CELLS[1] | {"options": {"x": 1}}, CELLS[2]]
    earlier = {"workloads": [{"name": "w", "fingerprint": "f", "cells": cells}]}
    options: dict[str, Any] = {"ctb": {}, "sync": {}}
    assert rep.kept(earlier, {"w": "f"}, options) == {"w": [CELLS[0]]}
    assert rep.kept(earlier, {"w": "g"}, options) == {}
    assert rep.kept([], {"w": "f"}, options) == {}


def trajectory() -> Trajectory:
    record = TokenRecord()
    for observation, reply in ((40, 5), (12, 3)):
        record.append_context([1] * observation)
        record.append_sampled([2] * reply, [-1.0] * reply, [0] * reply)
    found = Trajectory("g000004m01", 7, "x:4", 4, 1, 0, "x", "train", records=[record], turns=2)
    found.end = EndReason.SUCCESS
    found.messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    return found


def test_an_episode_is_recorded_with_its_waits(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    recorder = Recorder(file)
    meter = recorder.over(RolloutMeter())
    running = Task("g000004m01", (4, 1), "x", State.RUNNING, KV.HELD, "e", since=1.0)
    for start, end, after in ((2.0, 2.5, State.READY), (4.0, 7.0, State.DONE)):
        paused = replace(running, state=State.PAUSED, since=start)
        meter.moved(running, paused, start)
        meter.moved(paused, replace(paused, state=after, since=end), end)
    assert meter.snapshot()["episodes_finished"] == 1, "the meter was told, too"
    recorder.finished(trajectory())
    recorder.finished(trajectory())  # its waits are not known: left out
    recorder.close()
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {
            "task": 4,
            "turns": [
                {"observation": 40, "reply": 5, "seconds": 0.5},
                {"observation": 12, "reply": 3, "seconds": 3.0},
            ],
        }
    ]


def test_a_trace_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        Recorder(tmp_path / "none" / "trace.jsonl")
