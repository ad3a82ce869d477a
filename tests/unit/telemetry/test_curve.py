"""The learning-curve picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiderl.errors import TideError
from tiderl.telemetry.curve import draw_curves


def run(folder: Path, seed: int) -> Path:
    folder.mkdir()
    rows = [{"update": i, "success": i / 10} for i in range(1, 6 + seed)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    summary = {"name": folder.name, "seed": seed, "success_before": 0.1, "success_before_ci95": [0.05, 0.2]}
    summary |= {"success_after": 0.9, "success_ci95": [0.8, 0.95]}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_draws_several_runs(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "curve.png"
    draw_curves([run(tmp_path / "a", 0), run(tmp_path / "b", 1)], out)
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_folder_without_metrics_is_named(tmp_path: Path) -> None:
    with pytest.raises(TideError, match="holds no metrics"):
        draw_curves([tmp_path], tmp_path / "x.png")
