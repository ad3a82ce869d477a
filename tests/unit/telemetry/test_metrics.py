"""The metrics file survives a crash and never goes backwards; what people see of it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tiderl.scheduling.views import EngineView, State, Task
from tiderl.telemetry.metrics import MetricsLog, read_lines, write_json
from tiderl.telemetry.progress import RunProgress, describe
from tiderl.telemetry.rollout_meter import RolloutMeter


def test_lines_are_whole_and_a_torn_one_is_dropped(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.write(1, {"loss": 0.5, "gap": float("nan"), "ends": {"success": 1}})
    log.write(2, {"loss": 0.25})
    log.close()
    with log.path.open("a") as file:
        file.write('{"update": 3, "lo')
    assert [r["update"] for r in read_lines(log.path)] == [1, 2]
    assert read_lines(log.path)[0]["gap"] is None


def test_a_resumed_run_keeps_what_its_checkpoint_covers(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for update in range(1, 6):
        log.write(update, {"loss": update})
    log.close()
    log = MetricsLog(tmp_path, keep=3)
    log.write(4, {"loss": -4})
    log.close()
    assert [(r["update"], r["loss"]) for r in read_lines(log.path)] == [(1, 1), (2, 2), (3, 3), (4, -4)]


def test_json_is_written_whole(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": float("inf"), "y": [1]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": None, "y": [1]}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_missing_values_are_left_out_of_the_line() -> None:
    assert describe({"success": 0.5, "reward": None}) == "success 0.50"


def test_tensorboard_has_nested_numbers_and_histograms(tmp_path: Path) -> None:
    pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(tmp_path)
    log.write(1, {"loss": 0.5, "waiting_s": {"environment": 1.5, "barrier": None}, "length_alarm": True})
    log.write(2, {"staleness_histogram": {0: 5, 2: 3}, "engine": {"kv": {"e0": 0.25}}, "name": "x"})
    log.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"histograms": 0})
    board.Reload()
    assert set(board.Tags()["scalars"]) == {"loss", "waiting_s/environment", "length_alarm", "engine/kv/e0"}
    assert [(e.step, e.value) for e in board.Scalars("engine/kv/e0")] == [(2, 0.25)]
    (event,) = board.Histograms("staleness/histogram")
    found = event.histogram_value
    assert (event.step, found.num, found.min, found.max, found.sum) == (2, 8, 0, 2, 6)
    assert [r["update"] for r in log.rows] == [1, 2]


def test_the_line_names_the_main_wait_and_the_length_alarm() -> None:
    values = {
        "kv_hit_rate": 0.9871,
        "reprefilled_tokens": 12345,
        "staleness": 1.25,
        "rollouts": {
            "waiting_share": {"environment": 0.05, "admission": 0.01, "barrier": 0.25, "weights": 0.03}
        },
        "length_bias": -0.072,
        "length_alarm": True,
    }
    assert describe(values) == (
        "KV hit 0.987 · re-prefilled 12,345 · staleness 1.2 · engines wait 34%, mostly barrier · "
        "WARNING: trained episodes are 7.2% shorter than generated ones"
    )
    assert describe({"length_bias": -0.5, "length_alarm": False, "waiting_share": {}}) == ""
    assert describe({"waiting_share": {"environment": 0.2}}) == "engines wait 20%, mostly environment"


def test_the_length_alarm_is_said_once_for_each_time_it_goes_off(capsys: pytest.CaptureFixture[str]) -> None:
    with RunProgress(9) as progress:
        for update, alarm in enumerate([False, True, True, False, True], 1):
            progress.update(update, {"length_bias": 0.06, "length_alarm": alarm})
            progress.rollout({"tasks": {"queued": 1}})  # nothing outside a terminal
    err = capsys.readouterr().err
    assert err.count("WARNING: trained episodes are 6.0% longer than generated ones, over the run") == 2
    assert err.count("update ") == 5
    assert "queued" not in err


def test_a_terminal_shows_the_rollout_below_the_bar() -> None:
    meter = RolloutMeter()
    meter.engines([EngineView("engine-0", capacity=1000, slots=4, promised=840)], 0.0)
    meter.moved(None, Task("a", (0, 0), "env", State.QUEUED), 1.0)
    progress = RunProgress(4)
    out = io.StringIO()
    progress.console = Console(file=out, force_terminal=True, width=150, color_system=None)
    progress.live = True
    with progress:
        progress.rollout(meter.snapshot())
        progress.update(1, {"success": 0.5})
    shown = out.getvalue()
    assert "1 queued · 0 admitted · 0 ready · 0 running · 0 paused | engine-0 KV 84%" in shown
    assert "success 0.50" in shown
