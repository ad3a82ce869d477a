"""The metrics file survives a crash and never goes backwards."""

from __future__ import annotations

import json
from pathlib import Path

from tiderl.telemetry.metrics import MetricsLog, read_lines, write_json
from tiderl.telemetry.progress import describe


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
