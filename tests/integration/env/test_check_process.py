"""Faults that need processes to show: hangs that hold the interpreter, exits, children left behind.

The environments lie in modules that are written for the test and registered as a user's would be.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiderl.env.checker import CheckReport, check_environment
from tiderl.env.checker.hub import MARK, marked_processes

HEAD = """
import os, re, subprocess, sys, tempfile, time
import tiderl

@tiderl.register("{env_id}")
class Words(tiderl.AgentEnv):
    \"\"\"Say the word of the task.\"\"\"
    max_turns = 3
    step_timeout = 5.0
    splits = ("train",)
    def tasks(self, split):
        return [{{"id": n, "word": word}} for n, word in enumerate(("yes", "no", "left", "right"))]
    def start(self, task):
        return "Say " + task["word"]
    def reply(self, text):
        if text == self.task["word"]:
            self.finish(1.0)
        return "noted"
    def oracle(self):
        return self.task["word"]
"""

Module = Callable[[str], str]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Module:
    """Writes and imports a module with the good environment and the given methods; returns its id."""

    def write(methods: str) -> str:
        number = f"{os.getpid()}_{abs(hash(request.node.name)) % 10**8}"
        env_id, name = f"check/Words{number}-v0", f"check_words_{number}"
        body = "".join(f"    {line}\n" if line.strip() else "\n" for line in methods.splitlines())
        (tmp_path / f"{name}.py").write_text(HEAD.format(env_id=env_id) + body)
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.import_module(name)
        return env_id

    return write


def checked(env_id: str, **options: Any) -> CheckReport:
    return check_environment(env_id, tasks=2, pause=0.0, isolate=True, **options)


def test_the_good_environment_passes(module: Module) -> None:
    report = checked(module(""))
    assert report.ok, str(report)
    assert report.names("skip") == ["answers"]  # it has no tools


def test_arguments_that_no_other_process_understands_are_checked_here(module: Module) -> None:
    env_id = module("def __init__(self, hook=None):\n    super().__init__()\n")
    report = check_environment(env_id, tasks=1, pause=0.0, kwargs={"hook": print})
    assert report.ok, str(report)
    assert "remote" in report.names("skip")
    assert check_environment(env_id, tasks=1, pause=0.0, kwargs={"hook": "plain"})["remote"].state == "pass"


def test_t05_a_hang_that_holds_the_interpreter_is_killed_and_named(module: Module) -> None:
    env_id = module(
        "def reply(self, text):\n"
        "    if self.turn == 2:\n"
        "        re.match(r'(a+)+$', 'a' * 60 + 'b')  # never ends, and never lets go of the lock\n"
        "    return 'noted'\n"
    )
    began = time.monotonic()
    report = checked(env_id, timeout=1.0)
    assert report.names("fail") == ["deadlines"], str(report)
    assert "at turn 2" in report["deadlines"].detail
    assert time.monotonic() - began < 20.0


def test_t02_an_exit_in_the_middle_is_reported_with_the_log(module: Module) -> None:
    env_id = module(
        "def reply(self, text):\n    print('the licence server is missing', flush=True)\n    os._exit(7)\n"
    )
    report = checked(env_id)
    assert report.names("fail") == ["exceptions"], str(report)
    assert "exit code 7" in report["exceptions"].detail
    assert "the licence server is missing" in report["exceptions"].detail


def test_t48_hash_order_shows_in_another_process(module: Module) -> None:
    env_id = module("def start(self, task):\n    return ' '.join({f'word{n}' for n in range(40)})\n")
    report = checked(env_id)
    assert report.names("fail") == ["remote"], str(report)
    assert "hash order" in report["remote"].fix
    assert "messages" in report["remote"].detail


def test_t25_what_is_left_after_close_is_named(module: Module) -> None:
    env_id = module(
        "def start(self, task):\n"
        "    self.child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(30)'])\n"
        "    return super().start(task) or 'Say ' + task['word']\n"
    )
    report = checked(env_id)
    assert report.names("fail") == ["close"], str(report)
    assert "processes left after close" in report["close"].detail
    assert "time.sleep(30)" in report["close"].detail


@pytest.mark.parametrize(
    ("body", "seen"),
    [
        ("tempfile.NamedTemporaryFile(prefix='notes-', delete=False).close()", "notes-"),
        (
            "self.log = open(os.devnull); type(self).kept = getattr(self, 'kept', []) + [self.log]",
            "open files",
        ),
    ],
)
def test_files_left_after_close_are_named(body: str, seen: str, module: Module) -> None:
    report = checked(module(f"def start(self, task):\n    {body}\n    return 'Say ' + task['word']\n"))
    assert report.names("fail") == ["close"], str(report)
    assert seen in report["close"].detail


DAEMON = "import os, time; os.fork() and os._exit(0); os.setsid(); time.sleep(60)"


def test_t14_a_time_out_kills_daemons_too(module: Module) -> None:
    env_id = module(
        "def start(self, task):\n"
        "    if os.environ.get('TIDERL_CHECK_MARK'):\n"
        f"        subprocess.run([sys.executable, '-c', {DAEMON!r}, str({os.getpid()})])\n"
        "    return 'Say ' + task['word']\n"
    )
    report = checked(env_id)
    assert report.ok, str(report)
    assert _commands(f"{DAEMON} {os.getpid()}") == []


def test_t29_a_daemon_left_after_close_is_named_and_killed(module: Module) -> None:
    env_id = module(
        "def start(self, task):\n"
        f"    subprocess.run([sys.executable, '-c', {DAEMON!r}, str({os.getpid()})])\n"
        "    return 'Say ' + task['word']\n"
    )
    report = checked(env_id)
    assert "close" in report.names("fail"), str(report)
    assert "processes left after close" in report["close"].detail
    assert _commands(f"{DAEMON} {os.getpid()}") == []


def test_marked_processes_are_found_wherever_they_hide() -> None:
    mark = f"test{os.getpid()}"
    subprocess.run([sys.executable, "-c", DAEMON], env={**os.environ, MARK: mark}, check=True)
    left = marked_processes(mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert len(left) == 1


def _commands(text: str) -> list[str]:
    """Command lines of living processes that hold a text."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        found += [line] if text in line else []
    return found


def test_a_check_ends_with_its_parent(module: Module, tmp_path: Path) -> None:
    env_id = module("def reply(self, text):\n    time.sleep(60)\n    return 'late'\n")
    name = next(tmp_path.glob("check_words_*.py")).stem
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    code = (
        f"import {name}\nfrom tiderl.env.checker import check_environment\n"
        f"check_environment({env_id!r}, timeout=60.0)"
    )
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "CHECK_MARK": env_id, "TMPDIR": str(temporary)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environ)
    try:
        deadline = time.monotonic() + 30.0
        while len(_marked(env_id)) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(_marked(env_id)) >= 2
    finally:
        parent.kill()
        parent.wait(10.0)
    deadline = time.monotonic() + 10.0
    while _marked(env_id) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _marked(env_id) == set()
    assert list(temporary.iterdir()) == []


def _marked(mark: str) -> set[int]:
    found = set()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"CHECK_MARK={mark}".encode() in entry.read_bytes().split(b"\0"):
                found.add(int(entry.parent.name))
        except OSError:
            continue
    return found
