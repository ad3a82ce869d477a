"""`tiderl train` as a user runs it, on a tiny checkpoint in the real engine: the promises in numbers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Train = Callable[..., Path]

OVERRIDES = (
    "training.updates=6",
    "checkpoint.every=1",
    "environment.kwargs.pause=0.1",
    "evaluation.episodes=8",
    "evaluation.split=train",
)

pytestmark = [pytest.mark.timeout(400)]


def _train(config: Path, environ: dict[str, str], folder: Path, name: str, *overrides: str) -> Path:
    """Run `tiderl train` to its end in `folder`; returns the run's folder."""
    process = _start(config, environ, folder, f"name={name}", *overrides)
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    return folder / "runs" / name


@pytest.fixture
def train(config: Path, environ: dict[str, str], tmp_path: Path) -> Train:
    """Run `tiderl train` with overrides in the test's folder; returns the run's folder."""

    def run(*overrides: str, name: str = "tiny") -> Path:
        return _train(config, environ, tmp_path, name, *overrides)

    return run


@pytest.fixture(scope="module")
def whole(config: Path, environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of six updates."""
    return _train(config, environ, tmp_path_factory.mktemp("whole"), "whole", *OVERRIDES)


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())  # type: ignore[no-any-return]


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_sampler_and_trainer_agree_and_nothing_is_prefilled_twice(whole: Path) -> None:
    """Three turns, 16 episodes in flight, before and after weight updates: gap <= 1e-4, 0 tokens again."""
    found, rows = summary(whole), metrics(whole)
    assert found["versions_published"] == 6
    assert [r["version"] for r in rows] == [1, 2, 3, 4, 5, 6]
    assert 0 < found["max_logprob_gap"] <= 1e-4
    assert found["reprefilled_tokens"] == 0
    assert found["kv_hit_rate"] > 0.5
    for row in rows:
        assert row["episodes"] == 16
        assert row["turns"] == 3
        assert row["grad_norm"] > 0
        assert row["max_logprob_gap"] <= 1e-4
        assert [t["turn"] for t in row["gap_by_turn"]] == [0, 1, 2]
    assert {p.name for p in whole.iterdir()} >= {
        "config.yaml",
        "metrics.jsonl",
        "episodes",
        "tensorboard",
        "checkpoints",
        "summary.json",
        "engine.log",
        "curve.png",
    }


def test_the_same_seed_gives_the_same_first_update(train: Train, whole: Path) -> None:
    """Also with other pauses of the environment."""
    again = summary(train("training.updates=1"))["first_update_loss"]
    assert abs(again - summary(whole)["first_update_loss"]) <= 1e-6


def test_c54_learning_rate_zero_leaves_the_gap_flat(train: Train) -> None:
    run = train("training.learning_rate=0", "training.updates=20")
    gaps = [r["mean_logprob_gap"] for r in metrics(run)]
    assert len(gaps) == 20
    assert summary(run)["max_logprob_gap"] <= 1e-4
    early, late = sum(gaps[:5]) / 5, sum(gaps[-5:]) / 5
    assert late <= 1.5 * early + 1e-7


def test_c30_t57_updates_and_a_dying_worker_cost_no_episode_in_flight(train: Train, tmp_path: Path) -> None:
    """Groups overlap with updates: later tokens carry later versions, staleness stays within its bound."""
    mark = tmp_path / "crashed"
    run = train(
        "rollout.max_staleness=1",
        "rollout.deterministic=false",
        "training.updates=4",
        "environment.kwargs.pause=0.5",  # longer than an update, so that the next groups are still in flight
        f"environment.kwargs.crash_once={mark}",
    )
    rows, episodes = metrics(run), _episodes(run)
    assert mark.exists()
    assert max(r["staleness_max"] for r in rows) == 1
    assert all(r["episodes_masked"] == 0 for r in rows)
    spans = {
        tuple(sorted({v for v in record["versions"] if v >= 0})) for e in episodes for record in e["records"]
    }
    assert any(len(versions) > 1 for versions in spans), "no episode was in flight during an update"
    assert summary(run)["max_logprob_gap"] <= 1e-4
    assert any(r["mixed_tokens"] for r in rows)


def test_right_answers_that_take_long_are_trained_on_as_often_as_they_are_generated(train: Train) -> None:
    """Groups are taken as they end, and long episodes wait longest: their share must not shrink."""
    run = train(
        "environment.id=accept/Patience-v0",
        "rollout.policy=ctb",
        "rollout.max_staleness=1",
        "rollout.deterministic=false",
        "training.updates=16",
        "training.learning_rate=3e-3",
    )
    rows, episodes = metrics(run), [e for e in _episodes(run) if e["valid"]]
    right, wrong = ([e["turns"] for e in episodes if e["success"] == s] for s in (True, False))
    assert min(right) >= 4 > max(wrong)
    assert len(episodes) >= 256
    assert abs(rows[-1]["length_bias"]) <= 0.05
    assert not rows[-1]["length_alarm"]
    assert max(r["staleness_max"] for r in rows) == 1


def _episodes(run: Path) -> list[dict[str, Any]]:
    files = sorted((run / "episodes").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def _start(config: Path, environ: dict[str, str], folder: Path, *overrides: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tiderl.cli.main", "train", str(config), *overrides],
        cwd=folder,
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _wait_for_update(process: subprocess.Popen[str], run: Path, update: int) -> None:
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        path = run / "metrics.jsonl"
        if path.exists() and path.read_text().count("\n") >= update:
            return
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        time.sleep(0.1)
    raise AssertionError(f"no update {update} within 200 s")


def test_c1_a_run_killed_and_then_interrupted_goes_on_where_it_was(
    train: Train, config: Path, environ: dict[str, str], whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "tiny"
    for how, update in ((signal.SIGKILL, 1), (signal.SIGINT, 3)):
        process = _start(config, environ, tmp_path, *OVERRIDES)
        try:
            _wait_for_update(process, run, update)
            process.send_signal(how)
            output, _ = process.communicate(timeout=60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == (130 if how is signal.SIGINT else -signal.SIGKILL), output
        if how is signal.SIGINT:
            assert "saved" in output
            assert "Traceback" not in output
        _nothing_left_of(process.pid)
    train(*OVERRIDES)
    rows = metrics(run)
    assert [r["update"] for r in rows] == [1, 2, 3, 4, 5, 6]
    assert [r["version"] for r in rows] == [1, 2, 3, 4, 5, 6]
    trained = Counter(e["ordinal"] for e in _episodes(whole))
    assert set(trained) == set(range(24))
    assert {e["ordinal"] for e in _episodes(run)} == set(range(24))
    # Lockstep and exact state: a run that was stopped ends in the very numbers of one that was not.
    assert [r["loss"] for r in rows] == pytest.approx([r["loss"] for r in metrics(whole)], abs=1e-6)


def _nothing_left_of(session: int) -> None:
    """Engine and workers die with the run, also after kill -9."""
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        left = subprocess.run(
            ["ps", "-eo", "pid,args"], capture_output=True, text=True, timeout=10, check=True
        )
        alive = [line for line in left.stdout.splitlines() if f"--parent {session}" in line]
        if not alive:
            return
        time.sleep(0.3)
    raise AssertionError(f"left behind: {alive}")
