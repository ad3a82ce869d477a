"""`tiderl rollout`: tables, stories and JSON from a decision log; mistakes are one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tiderl.cli import main as frame
from tiderl.telemetry.decisions import DecisionLog


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`runs/small` with one finished and one paused task."""
    folder = tmp_path / "runs" / "small"
    folder.mkdir(parents=True)
    steps = [("", "queued"), ("queued", "admitted"), ("admitted", "ready"), ("ready", "running")]
    steps += [("running", "paused"), ("paused", "done")]
    with DecisionLog(folder / "decisions.jsonl") as log:
        for task, last in (("g000000m00", 6), ("g000000m01", 5)):
            for at, (before, after) in enumerate(steps[:last]):
                cause = "success" if after == "done" else ""
                log.transition(
                    float(at), task, before, after, kv="held", engine="engine-0", context=9, cause=cause
                )
    monkeypatch.chdir(tmp_path)
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str, str]:
    with pytest.raises(SystemExit) as ended:
        frame.main(["rollout", *arguments])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_tasks_are_listed(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "tasks", "runs/small")
    assert (code, err) == (0, "")
    head, first, second = (line.split() for line in out.splitlines())
    assert head[:2] == ["task", "state"]
    assert first == ["g000000m00", "done", "(success)", "1", "9", "5.00", *["20%"] * 5, "0", "0"]
    assert second[:3] == ["g000000m01", "paused", "1"]


def test_tasks_as_json_and_by_state(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "tasks", "small", "--state", "done", "--json")
    (found,) = json.loads(out)
    assert code == 0
    assert (found["task"], found["turns"], found["waits"]["environment"]) == ("g000000m00", 1, 1.0)


def test_a_task_is_explained(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "explain", str(run_folder), "m00")
    assert code == 0
    assert out.splitlines()[0] == "task g000000m00, queued 0.00 s after the rollout began"
    assert "     +4.00 s  turn 1 ended after 1.00 s; context 9" in out.splitlines()
    code, out, _ = run(capsys, "explain", "small", "g000000m00", "--json")
    (attempt,) = json.loads(out)["attempts"]
    assert code == 0
    assert attempt["lines"][-1]["after_s"] == attempt["summary"]["seconds"] == 5.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tasks", "smal"), "error: there is no run 'smal': did you mean runs/small?"),
        (
            ("explain", "small", "g000000m02"),
            "error: no task 'g000000m02' in this run: did you mean g000000m01 or g000000m00?",
        ),
        (("explain", "small", "m0"), "error: 2 tasks match 'm0': choose one of g000000m00, g000000m01."),
    ],
)
def test_mistakes_are_one_sentence(
    words: tuple[str, ...], message: str, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, *words) == (2, "", message + "\n")


@pytest.mark.parametrize("words", [("--help",), ("tasks", "--help"), ("explain", "--help")])
def test_help_has_examples(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *words)
    assert code == 0
    assert "Examples:" in out
    assert "--json" in out
