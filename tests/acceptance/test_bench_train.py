"""`tiderl bench train` on a tiny model: both sides run, and the report has what the documentation says.

Speed is not asserted: a tiny model's figures mean nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tiderl.engine.tiny import make_tiny_model

pytestmark = pytest.mark.timeout(900)

CONFIG = """
name: tiny
model: {{path: {model}, dtype: float32, max_length: 2048, lora: {{rank: 4, alpha: 8}}}}
environment: {{id: tide/Calculator-v0}}
agent: {{format: lines, instructions: false}}
rollout:
  {{groups_per_update: 2, group_size: 2, max_turn_tokens: 8, max_episode_tokens: 1800, max_staleness: 0}}
engine: {{kv_tokens: 24576, threads: 1}}
training: {{updates: 5, learning_rate: 1.0e-4, threads: 1}}
"""
SHARES = {"rollout", "training", "publishing", "waiting"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a tiny model, its configuration, and the cache that TRL's environment is made in."""
    folder = tmp_path_factory.mktemp("bench")
    model = make_tiny_model(folder / "model")
    (folder / "tiny.yaml").write_text(CONFIG.format(model=model))
    yield folder
    shutil.rmtree(folder / "cache", ignore_errors=True)  # more than a gigabyte


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "tiderl.cli.main", "bench", "train", "--config", "tiny.yaml", *options]


def environment(place: Path) -> dict[str, str]:
    return {**os.environ, "TIDERL_CACHE": str(place / "cache")}


@pytest.fixture(scope="module")
def report(place: Path) -> dict[str, Any]:
    """Two rounds of one update each."""
    done = subprocess.run(
        command("--rounds", "2", "--updates", "1", "--json", "out.json"),
        cwd=place,
        env=environment(place),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert done.returncode == 0, done.stderr
    assert "trained samples per second" in done.stdout
    assert "round 2/2" in done.stderr
    found: dict[str, Any] = json.loads((place / "out.json").read_text())
    return found


def test_each_round_has_both_sides_in_rotated_order(report: dict[str, Any]) -> None:
    assert [one["order"] for one in report["rounds"]] == [["tiderl", "trl"], ["trl", "tiderl"]]
    for one in report["rounds"]:
        for side in ("tiderl", "trl"):
            figures = one[side]
            assert (figures["updates"], figures["samples"]) == (1, 4)
            assert figures["samples_per_s"] == pytest.approx(4 / figures["wall_s"])
            assert set(figures["share_of_time"]) == SHARES
            assert sum(figures["share_of_time"].values()) == pytest.approx(1.0, abs=0.02)
            assert figures["generated_tokens"] > 0
            assert figures["cpu_s_per_sample"] is None or figures["cpu_s_per_sample"] > 0
        assert one["ratio"] == pytest.approx(one["tiderl"]["samples_per_s"] / one["trl"]["samples_per_s"])
    assert report["rounds"][0]["trl"]["share_of_time"]["publishing"] == 0.0


def test_report_says_how_it_was_measured(report: dict[str, Any]) -> None:
    ratios = [one["ratio"] for one in report["rounds"]]
    assert (report["ratio"]["min"], report["ratio"]["max"]) == (min(ratios), max(ratios))
    assert report["versions"]["trl"]["trl"] == "1.16.0"
    assert report["versions"]["trl"]["torch"] == report["versions"]["tiderl"]["torch"]
    assert report["machine"]["cores"] >= 1
    assert report["settings"]["samples_per_update"] == 4
    assert report["settings"]["dtype"] == "float32"


def test_no_temporary_folder_is_left(report: dict[str, Any], place: Path) -> None:
    assert sorted(path.name for path in place.iterdir()) == ["cache", "model", "out.json", "tiny.yaml"]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t-") as folder:
        yield Path(folder)


def test_ctrl_c_ends_it_cleanly(report: dict[str, Any], place: Path, temporary: Path) -> None:
    settings = {**environment(place), "TMPDIR": str(temporary)}
    process = subprocess.Popen(command("--rounds", "1"), cwd=place, env=settings, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        mine: list[psutil.Process] = []
        while len(mine) < 2 and time.monotonic() < deadline:  # the side, and what it started itself
            time.sleep(0.2)
            mine = psutil.Process(process.pid).children(recursive=True)
        assert len(mine) >= 2
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1].decode()
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert psutil.wait_procs(mine, timeout=10)[1] == []
    assert list(temporary.iterdir()) == []
