"""`tiderl bench rollout` on a miniature workload: real engine, real conductor, sleeping environments.

Speed is not asserted: a tiny model's figures mean nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tiderl.bench.rollout.files import load_workload
from tiderl.bench.rollout.setup import plan_workload

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

MINI = """
name: mini
model: {hidden: 64, layers: 2, heads: 2, kv_heads: 1}
episodes:
  turns: [2, 4]
  system_words: 8
  prompt_words: [40, 60]
  observation_words: [6, 12]
  reply_tokens: [2, 6]
  latency: {kind: lognormal, median: 0.05, sigma: 0.5, longest: 0.5}
load: {group_size: 2, groups_per_update: 2, max_staleness: 2, concurrency: 8, oversubscription: 2}
trainer: {update_s: 0.1}
measure: {warmup_s: 1, seconds: 2, timeout_s: 200}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    (folder / "mini.yaml").write_text(MINI)
    return folder


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "tiderl.cli.main", "bench", "rollout", "mini.yaml", *options]


def environment(place: Path) -> dict[str, str]:
    return {**os.environ, "TIDERL_CACHE": str(place / "cache"), "COLUMNS": "200"}


def run(place: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*options), cwd=place, env=environment(place), capture_output=True, text=True, timeout=400
    )


def cells(place: Path) -> list[dict[str, Any]]:
    file = place / "bench.json"
    if not file.exists():
        return []
    return [cell for one in json.loads(file.read_text())["workloads"] for cell in one["cells"]]


OPTIONS = ("--policies", "ctb,sync", "--rounds", "2", "--json", "bench.json")
OPTIONS += ("measure.reference_tokens_per_s=1000",)


@pytest.fixture(scope="module")
def interrupted(place: Path) -> dict[str, Any]:
    """A benchmark stopped by Ctrl-C once its first cells were written."""
    with (place / "log.txt").open("w") as log:
        process = subprocess.Popen(
            command(*OPTIONS, "--record", "trace.jsonl"),
            cwd=place, env=environment(place), stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 300
        while len(cells(place)) < 2 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
    finally:
        if process.poll() is None:
            process.kill()
    _, alive = psutil.wait_procs(family, timeout=10)
    return {"code": code, "alive": alive, "log": (place / "log.txt").read_text(), "cells": cells(place)}


def test_ctrl_c_leaves_the_cells_and_no_process(interrupted: dict[str, Any]) -> None:
    assert interrupted["code"] == 130, interrupted["log"]
    assert interrupted["alive"] == []
    assert 2 <= len(interrupted["cells"]) < 4
    assert "--resume --json bench.json" in interrupted["log"]
    stretch = interrupted["cells"][0]["stretch"]
    assert stretch > 0
    assert f"its seconds are for 1000: all are multiplied by {stretch:.2f}" in interrupted["log"]


def test_a_resume_measures_what_is_missing(place: Path, interrupted: dict[str, Any]) -> None:
    done = run(place, *OPTIONS, "--resume", "--markdown", "table.md")
    assert done.returncode == 0, done.stderr
    found = cells(place)
    assert found[: len(interrupted["cells"])] == interrupted["cells"]
    assert {(cell["policy"], cell["round"]) for cell in found} == {
        (policy, number) for policy in ("ctb", "sync") for number in (1, 2)
    }
    assert [cell["policy"] for cell in found] == ["ctb", "sync", "sync", "ctb"], "who begins rotates"
    assert len({cell["stretch"] for cell in found}) == 1, "a resumed benchmark keeps its seconds"
    assert "sample" not in done.stderr, "nor does it measure them again"
    assert "ctb is" in done.stdout
    assert (place / "table.md").read_text().count("\n") == 4

    began = time.monotonic()
    again = run(place, *OPTIONS, "--resume")
    assert again.returncode == 0
    assert cells(place) == found, "there was nothing left to measure"
    assert time.monotonic() - began < 60


@pytest.mark.usefixtures("interrupted")
def test_the_figures_are_sound(place: Path) -> None:
    report = json.loads((place / "bench.json").read_text())
    (workload,) = report["workloads"]
    for cell in workload["cells"]:
        assert cell["loss_tokens"] > 0
        assert cell["invalid_episodes"] == cell["drifts"] == 0
        assert 0.0 <= cell["kv_hit_rate"] <= cell["kv_reuse"] <= 1.0
        assert 0.0 <= cell["waiting_share"] <= 1.0
        assert cell["seconds"] >= 2.0 * cell["stretch"]
        assert cell["updates"] >= 1
        assert 2 <= cell["loss_tokens"] / cell["turns"] <= 6
        if cell["policy"] == "sync":
            assert cell["staleness"]["max"] == 0, "strictly on-policy"
            assert cell["waiting_s"]["barrier"] > 0
    settings, sizes = workload["settings"], workload["cells"][0]["sizes"]
    assert settings["load"]["concurrency"] * sizes["middle"] / sizes["kv_tokens"] == pytest.approx(2, rel=0.1)


@pytest.mark.usefixtures("interrupted")
def test_what_was_recorded_can_be_played(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [json.loads(line) for line in (place / "trace.jsonl").read_text().splitlines()]
    assert len(rows) >= 4
    assert all(2 <= len(row["turns"]) <= 4 for row in rows)
    assert all(2 <= turn["reply"] <= 6 for row in rows for turn in row["turns"])
    assert all(0.0 < turn["seconds"] < 30 for row in rows for turn in row["turns"])
    monkeypatch.setenv("TIDERL_CACHE", str(place / "cache"))
    (place / "again.yaml").write_text(MINI.replace("name: mini", "name: again"))
    drawn = plan_workload(load_workload(place / "again.yaml"))
    played = plan_workload(load_workload(place / "again.yaml", ["episodes.trace=trace.jsonl"]))
    assert len(played.tasks) == len({row["task"] for row in rows})
    assert played.sizes.reply == pytest.approx(drawn.sizes.reply, rel=0.4)
    assert played.sizes.observation == pytest.approx(drawn.sizes.observation, rel=0.4)
    assert played.sizes.longest >= max(
        sum(turn["observation"] + turn["reply"] for turn in row["turns"]) for row in rows
    )


def test_pictures(place: Path) -> None:
    changes = [
        "model.image_size=56",
        "model.vision_hidden=64",
        "model.vision_layers=1",
        "measure.warmup_s=0.5",
    ]
    done = run(place, *changes, "--policies", "async", "--rounds", "1", "--json", "pictures.json")
    assert done.returncode == 0, done.stderr
    (cell,) = json.loads((place / "pictures.json").read_text())["workloads"][0]["cells"]
    assert cell["loss_tokens"] > 0
    assert cell["invalid_episodes"] == cell["drifts"] == 0
    assert cell["sizes"]["observation"] > 9 + 6 + 4 + 2, "a picture takes more than its placeholder"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--policies", "ctb,asink"), "did you mean async"),
        (("policies.ctb.no_such=1",), "no option 'no_such'"),
        (("--resume",), "add --json FILE"),
        (("--json", "none/bench.json"), "there is no folder"),
        (("load.oversubscription=99",), "raise load.concurrency"),
    ],
)
def test_mistakes_end_in_one_line(place: Path, options: tuple[str, ...], says: str) -> None:
    done = run(place, *options)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
