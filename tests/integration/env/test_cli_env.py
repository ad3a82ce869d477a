"""`tiderl env` as a user runs it: what is printed, which exit code, what is written."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tiderl.cli.main import main
from tiderl.env.images import decode_image

COMMAND = [sys.executable, "-m", "tiderl.cli.main", "env"]
BROKEN = """
import random
import tiderl

@tiderl.register("wrong/Dice-v0")
class Dice(tiderl.AgentEnv):
    \"\"\"Guess what the die shows.\"\"\"
    def tasks(self, split):
        return [{"id": f"{split}-{n}"} for n in range(3)]
    def start(self, task):
        self.die = random.randint(1, 6)
        return f"Guess: {self.die}"
    def score(self, text):
        return 1.0 if text == str(self.die) else 0.0
    def oracle(self):
        return str(self.die)
"""


def run(
    *words: str, folder: Path | None = None, stdin: str = "", code: int = 0
) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "COLUMNS": "100"}
    if folder is not None:
        environ["PYTHONPATH"] = str(folder)
    done = subprocess.run(
        [*COMMAND, *words], input=stdin, capture_output=True, text=True, cwd=folder, env=environ, timeout=100
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def inside(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Run a command in this process, for what needs no process: (exit code, output, errors)."""
    with pytest.raises(SystemExit) as left:
        main(["env", *words])
    said = capsys.readouterr()
    assert isinstance(left.value.code, int)
    return left.value.code, said.out, said.err


def plugin(folder: Path, name: str, text: str) -> None:
    """An installed package with one entry point, as far as Python can tell."""
    (folder / f"{name}.py").write_text(text)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tiderl.environments]\n{name} = {name}\n")


def test_list_shows_the_built_ins_in_plain_lines() -> None:
    lines = run("list").stdout.splitlines()
    assert lines[0].split() == ["id", "modality", "splits", "turns", "package"]
    rows = {line.split()[0]: line.split() for line in lines[1:]}
    assert rows["tide/Safe-v0"] == ["tide/Safe-v0", "image", "train", "test", "8", "tiderl"]
    assert {"tide/Calculator-v0", "tide/Pointer-v0", "gymnasium/FrozenLake-v1"} <= rows.keys()


def test_list_shows_foreign_packages_and_broken_ones(tmp_path: Path) -> None:
    plugin(tmp_path, "wrongdice", BROKEN)
    plugin(tmp_path, "ruined", "raise RuntimeError('no licence')")
    lines = run("list", folder=tmp_path).stdout.splitlines()
    assert any(re.match(r"wrong/Dice-v0 .* wrongdice$", line) for line in lines)
    assert lines[-1] == "broken: ruined of ruined (ruined): RuntimeError: no licence"
    data = json.loads(run("list", "--json", folder=tmp_path).stdout)
    assert [one["name"] for one in data["broken"]] == ["ruined"]
    assert any(one["id"] == "wrong/Dice-v0" for one in data["environments"])


def test_show_prints_spec_tools_and_first_observation(tmp_path: Path) -> None:
    file = tmp_path / "screen.png"
    text = run("show", "tide/Pointer-v0", "--seed", "3", "--image", str(file)).stdout
    assert "tide/Pointer-v0 (package tiderl)" in text
    assert '"name": "move"' in text
    assert "first observation (task " in text
    assert decode_image(file.read_bytes()).shape[2] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["screen.png"]


def test_show_names_the_task_that_was_asked_for() -> None:
    data = json.loads(run("show", "tide/Safe-v0", "--split", "test", "--task", "2", "--json").stdout)
    assert (data["id"], data["task"]) == ("tide/Safe-v0", 2)
    assert data["messages"][0]["content"][1]["shape"] == [28, 28, 3]


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        (("show", "tide/Saef-v0"), "tide/Safe-v0"),
        (("check", "tide/Saef-v0"), "tide/Safe-v0"),
        (("play", "tide/Saef-v0"), "tide/Safe-v0"),
        (("show", "tide/Safe-v0", "--task", "99"), "no task '99'"),
        (("show", "tide/Safe-v0", "--split", "dev"), "no split 'dev'"),
        (("show", "tide/Calculator-v0", "--image", "x.png"), "no picture"),
        (("check", "tide/Safe-v0", "--json", "missing/report.json"), "is not a folder"),
        (("check", "tide/Safe-v0", "--tasks", "0"), "--tasks"),
        (("new", "My Env"), "is not a package name"),
        (("new", "my-env", "--into", "missing"), "is not a folder"),
        (("show", "safe.py:demo/Safe-v0"), "write safe:demo/Safe-v0 for a file safe.py in this folder"),
        (("show", "../envs/safe:demo/Safe-v0"), "in '../envs', and go there"),
        (("play", "tide/Safe-v0", "--images", "/dev/null"), "--images"),
        (("frobnicate",), "frobnicate"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(
    words: tuple[str, ...],
    seen: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, errors = inside(words, capsys)
    assert code == 2
    assert errors.startswith("error: ")
    assert len(errors.strip().splitlines()) == 1
    assert seen in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise SystemExit(3)", "SystemExit: 3 ({file}:1 in <module>)"),
        ("raise ValueError('x')", "ValueError: x ({file}:1 in <module>)"),
        (
            "import json\njson.loads('')",
            "JSONDecodeError: Expecting value: line 1 column 1 (char 0) ({file}:2",
        ),
        ("def f(:", "({file}:1)"),
        ("import no_such_module_here", "No module named 'no_such_module_here'"),
    ],
)
@pytest.mark.parametrize("command", ["show", "check", "play"])
def test_a_file_that_cannot_be_imported_is_one_line_with_its_place(
    command: str, source: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "broken_file.py").write_text(source)
    done = run(command, "broken_file:a/B-v0", folder=tmp_path, code=2)
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
    assert said.format(file=tmp_path / "broken_file.py") in done.stderr


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, errors = inside((), capsys)
    assert (code, errors) == (2, "")
    assert "Commands:" in text


@pytest.mark.parametrize("command", ["list", "show", "new", "check", "play"])
def test_every_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = inside((command, "--help"), capsys)
    assert code == 0
    assert "Examples:" in text
    assert f"tiderl env {command}" in text


def test_check_of_a_broken_environment_fails_with_the_fault_and_a_report(tmp_path: Path) -> None:
    plugin(tmp_path, "wrongdice", BROKEN)
    done = run("check", "wrong/Dice-v0", "--json", "report.json", "--tasks", "2", folder=tmp_path, code=1)
    assert "fail  global_rng: reset(seed=11" in done.stdout
    assert "fix: draw from self.np_random" in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ok"] is False
    failed = [item for item in report["items"] if not item["ok"]]
    assert "global_rng" in {item["name"] for item in failed}
    assert all(item["detail"] and item["fix"] for item in failed)


UNTYPED = """
import tiderl

@tiderl.register("wrong/Tool-v0")
class Tool(tiderl.AgentEnv):
    @tiderl.tool
    def press(self, key):
        \"\"\"Press a key.\"\"\"
"""


def test_check_of_a_package_that_cannot_be_loaded_names_its_fault(tmp_path: Path) -> None:
    plugin(tmp_path, "wrong_tool", UNTYPED)
    done = run("check", "wrong/Tool-v0", folder=tmp_path, code=1)
    assert "fail  tools: package wrong_tool cannot be loaded" in done.stdout
    assert "parameter 'key' of tool 'press' has no type hint" in done.stdout


def test_check_can_report_on_standard_output() -> None:
    done = run("check", "tide/Safe-v0", "--json", "-", "--tasks", "1")
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert report["environment"] == "tide/Safe-v0"


def test_play_works_line_by_line_from_a_pipe(tmp_path: Path) -> None:
    words = ("play", "tide/Safe-v0", "--seed", "1", "--images", str(tmp_path / "shots"))
    text = run(*words, stdin="try_code n=10\nhello\n" + ":oracle\n" * 6).stdout
    assert "[tool try_code]" in text
    assert "the end: " in text
    assert len(list((tmp_path / "shots").glob("*.png"))) == 1
    assert run("play", "tide/Safe-v0", stdin="try_code 10\n").stdout.endswith("left before the end\n")


def test_play_in_a_terminal_draws_prompts_and_leaves_on_an_interrupt(tmp_path: Path) -> None:
    parent, child = pty.openpty()
    environ = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": "80"}
    words = [*COMMAND, "play", "tide/Safe-v0", "--images", str(tmp_path)]
    process = subprocess.Popen(
        words, stdin=child, stdout=child, stderr=child, env=environ, start_new_session=True
    )
    os.close(child)
    try:
        seen = _read_until(parent, b"> ")
        assert "▀".encode() in seen
        os.write(parent, b"try_code 12\n")
        assert b"turn 1, reward 0" in _read_until(parent, b"reward 0")
        process.send_signal(signal.SIGINT)
        rest = _read_until(parent, b"left before the end")
        assert b"Traceback" not in rest
        assert process.wait(20) == 130
    finally:
        process.kill()
        os.close(parent)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_play_that_is_ended_from_outside_leaves_no_pictures(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [*COMMAND, "play", "tide/Safe-v0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        seen = _read_until(process.stdout.fileno(), b".png)")
        assert str(tmp_path).encode() in seen
        assert list(tmp_path.glob("tiderl-play-*/*.png"))
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == code
    assert errors == b""
    assert list(tmp_path.iterdir()) == []


def test_play_from_a_pipe_skips_empty_lines_and_takes_json(tmp_path: Path) -> None:
    text = run("play", "tide/Safe-v0", stdin='\n\ntry_code {"n": 12}\n\ntry_code n="13"\n').stdout
    assert "turn 2, reward" in text
    assert "turn 3" not in text
    assert "Error" not in text


def _read_until(descriptor: int, end: bytes) -> bytes:
    seen, deadline = b"", time.monotonic() + 60.0
    while end not in seen and time.monotonic() < deadline:
        try:
            seen += os.read(descriptor, 65_536)
        except OSError:  # the other side is closed
            break
    assert end in seen, seen
    return seen


def test_an_interrupted_check_leaves_nothing(tmp_path: Path) -> None:
    environ = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    words = [*COMMAND, "check", "tide/Safe-v0"]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("pass  start")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors == ""
    assert list(tmp_path.iterdir()) == []
