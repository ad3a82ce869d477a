"""Figures, spread and table of a benchmark."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from tiderl.bench.result import figures, notes, spread, summary, tables
from tiderl.errors import TideError


def row(update: int, wall: float, rollout: float, training: float, **more: Any) -> dict[str, Any]:
    shares = {"rollout": rollout, "training": training, "publishing": 0.0, "waiting": 1.0}
    base = {"update": update, "wall_s": wall, "shares_s": shares, "generated_tokens": 100}
    return base | {"reward": 0.5, "success": 0.25, **more}


def test_window_is_from_the_end_of_the_warm_up_to_the_end_of_the_last_update() -> None:
    found = figures([row(1, 30.0, 10.0, 5.0), row(2, 35.0, 13.0, 6.0), row(3, 40.0, 15.0, 8.0)], 48)
    assert found["samples"] == 96
    assert found["samples_per_s"] == pytest.approx(9.6)
    assert found["seconds"] == pytest.approx(
        {"rollout": 5.0, "training": 3.0, "publishing": 0.0, "waiting": 2.0}
    )
    assert sum(found["share_of_time"].values()) == pytest.approx(1.0)
    assert found["generated_tokens"] == 200


def test_cpu_seconds_are_those_of_the_window() -> None:
    rows = [row(1, 1.0, 0.5, 0.5, cpu_s=10.0), row(2, 2.0, 1.0, 1.0, cpu_s=16.0)]
    assert figures(rows, 4)["cpu_s_per_sample"] == pytest.approx(1.5)
    assert figures([rows[0], row(2, 2.0, 1.0, 1.0, cpu_s=None)], 4)["cpu_s_per_sample"] is None


def test_an_update_without_a_step_is_counted_and_told() -> None:
    rows = [row(1, 1.0, 0.5, 0.5), row(2, 2.0, 1.0, 1.0, skipped=True, success=None)]
    found = figures(rows, 4)
    assert (found["updates_without_step"], found["success"]) == (1, 0.0)
    assert "flatters TideRL" in notes({"rounds": [{"tiderl": found}]})[0]


def test_one_update_is_no_measurement() -> None:
    with pytest.raises(TideError, match="after 1 updates"):
        figures([row(1, 1.0, 0.5, 0.5)], 4)


def test_ratio_is_the_median_of_the_rounds_ratios() -> None:
    ours = figures([row(1, 0.0, 0.0, 0.0), row(2, 1.0, 0.5, 0.5)], 48)
    rounds = []
    for number, slow in enumerate((4.0, 3.0, 8.0), 1):
        other = figures([row(1, 0.0, 0.0, 0.0), row(2, slow, 0.5, 0.5)], 48)
        ratio = ours["samples_per_s"] / other["samples_per_s"]
        order = ["tiderl", "trl"] if number % 2 else ["trl", "tiderl"]
        rounds.append({"round": number, "order": order, "tiderl": ours, "trl": other, "ratio": ratio})
    found = summary(rounds)
    assert found["ratio"] == pytest.approx({"median": 4.0, "min": 3.0, "max": 8.0})
    console = Console(width=120, record=True)
    for table in tables({"rounds": rounds, **found}):
        console.print(table)
    text = console.export_text()
    assert "4.00 (3.00 to 8.00)" in text
    assert "TRL GRPOTrainer" in text


def test_spread_of_one_round() -> None:
    assert spread([2.0]) == {"median": 2.0, "min": 2.0, "max": 2.0}
