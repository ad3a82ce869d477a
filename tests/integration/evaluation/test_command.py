"""`tiderl eval` as a person calls it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tiderl.cli.main import main
from tiderl.evaluation.journal import JOURNAL, read_journal

pytestmark = pytest.mark.usefixtures("installed")

COMMAND = [sys.executable, "-m", "tiderl.cli.main", "eval"]
WORD = ["--env", "evalrun/Word-v0", "--workers", "1"]


def call(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Run the command in this process: (exit code, standard output, standard error)."""
    with pytest.raises(SystemExit) as stop:
        main(["eval", *args])
    told = capsys.readouterr()
    code = stop.value.code
    assert isinstance(code, int)
    return code, told.out, told.err


def test_one_line_and_a_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, *WORD, "--policy", "oracle", "-n", "8")
    assert code == 0
    assert out.startswith("success 0.")
    assert len(out.splitlines()) == 1
    folder = tmp_path / "evals" / "evalrun-Word-v0-oracle"
    assert sorted(p.name for p in folder.iterdir()) == [
        "episodes",
        "evaluation.json",
        "journal.jsonl",
        "summary.json",
    ]
    assert "summary.json" in err
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["complete"] is True
    assert summary["requested"] == summary["valid"] == 8
    assert {
        "success",
        "ci95",
        "reward_mean",
        "ends",
        "turns",
        "tokens",
        "seconds",
        "wall_s",
        "versions",
    } <= set(summary)


def test_json_is_all_there_is_on_standard_output(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = call(
        capsys, *WORD, "--policy", "random", "-n", "4", "--out", str(tmp_path / "e"), "--json"
    )
    assert code == 0
    assert json.loads(out)["valid"] == 4
    assert err == ""


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--help")
    assert code == 0
    assert "tiderl eval --env tide/Calculator-v0 --policy run:runs/quickstart --episodes 200" in " ".join(
        out.split()
    )


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--env", "evalrun/Wrod-v0", "--policy", "oracle"], "evalrun/Word-v0"),
        ([*WORD, "--policy", "orcale"], "did you mean oracle"),
        ([*WORD, "--policy", "oracle", "--episodes", "0"], "episodes is 0"),
        ([*WORD, "--policy", "oracle", "--split", "tets"], "use one of train, test"),
        ([*WORD, "--policy", "openai:http://127.0.0.1:9/v1#m"], "cannot be reached"),
        ([*WORD, "--policy", "openai:nowhere"], "openai:BASE_URL#MODEL"),
        ([*WORD, "--policy", "hf:/no/such/folder"], "/no/such/folder"),
        ([*WORD, "--policy", "run:/no/such/run"], "/no/such/run"),
        ([*WORD, "--policy", "oracle", "--env-arg", "pause"], "KEY=VALUE"),
        ([*WORD, "--policy", "oracle", "--env-arg", "colour=1"], "colour"),
        ([*WORD, "--policy", "oracle", "--temperature", "-1"], "temperature"),
        ([*WORD, "--policy", "oracle", "--concurrency", "many"], "concurrency"),
        (["--policy", "oracle"], "--env"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, *args)
    assert code == 2
    assert told in err
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("error: ")
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_folder_of_something_else_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: a run")
    code, _, err = call(capsys, *WORD, "--policy", "oracle", "--out", str(tmp_path))
    assert code == 2
    assert "config.yaml" in err
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


def test_folder_of_another_evaluation_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = str(tmp_path / "e")
    assert call(capsys, *WORD, "--policy", "oracle", "-n", "2", "--out", out)[0] == 0
    code, _, err = call(capsys, *WORD, "--policy", "oracle", "-n", "2", "--out", out, "--seed", "3")
    assert code == 2
    assert "seed: 0 there, 3 now" in err
    assert (
        call(capsys, *WORD, "--policy", "oracle", "-n", "2", "--out", out, "--seed", "3", "--fresh")[0] == 0
    )


def test_t85_endpoint_that_fails_and_recovers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, parrot: Any
) -> None:
    args = (*WORD, "--policy", f"openai:{parrot.url}#parrot", "-n", "12", "--out", str(tmp_path / "e"))
    args += ("--policy-arg", "deadline=0.3", "--temperature", "0.5", "--max-tokens", "9")
    parrot.failing = True
    code, out, err = call(capsys, *args)
    assert code == 0
    assert "invalid, not counted" in out
    assert "out of memory" in err
    first = json.loads((tmp_path / "e" / "summary.json").read_text())
    assert first["success"] == 1.0
    assert 0 < first["invalid"] < 12
    parrot.failing, parrot.asked = False, 0
    code, out, _ = call(capsys, *args)
    assert code == 0
    assert parrot.asked == first["invalid"]
    summary = json.loads((tmp_path / "e" / "summary.json").read_text())
    assert (summary["valid"], summary["invalid"], summary["success"]) == (12, 0, 1.0)
    assert summary["tokens"] == {"prompt": 84, "completion": 36}
    assert summary["policy"] == f"openai:{parrot.url}#parrot"


def start(out: Path, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *WORD, "--policy", "oracle", "--out", str(out), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(records: int, out: Path, process: subprocess.Popen[Any], limit: float = 60.0) -> None:
    end = time.monotonic() + limit
    while not (out / JOURNAL).exists() or len(read_journal(out)) < records:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


SLOW = ["--env-arg", "pause=0.05", "--concurrency", "2"]


def test_control_c_keeps_the_journal_and_says_how_to_go_on(tmp_path: Path) -> None:
    out = tmp_path / "e"
    process = start(out, "-n", "400", *SLOW)
    wait_for(3, out, process)
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "run the same command again" in stderr
    assert "Traceback" not in stderr
    assert stdout == ""
    assert len(read_journal(out)) >= 3
    assert json.loads((out / "summary.json").read_text())["complete"] is False


def test_t82_kill_at_random_moments_then_resume(tmp_path: Path) -> None:
    """Killed five times at some moment, the union is complete and no episode counts twice."""
    import random

    out = tmp_path / "e"
    total = 60
    rng = random.Random(0)
    for kill in range(5):
        process = start(out, "-n", str(total), *SLOW)
        before = len(read_journal(out)) if (out / JOURNAL).exists() else 0
        wait_for(before + 1, out, process)
        time.sleep(rng.uniform(0.0, 0.3))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)
        assert len(read_journal(out)) > before, kill
    done = subprocess.run(
        [*COMMAND, *WORD, "--policy", "oracle", "--out", str(out), "-n", str(total), *SLOW, "--json"],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["valid"], summary["invalid"]) == (total, 0)
    lines = [json.loads(line) for line in (out / JOURNAL).read_text().splitlines()]
    assert sorted(line["index"] for line in lines) == list(range(total))
    assert len({line["process"] for line in lines}) == 6
