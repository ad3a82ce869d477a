"""The small parts of worker processes: deadlines, what they inherit, how their end is told."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from tiderl.hub import launch, origin
from tiderl.hub.deadlines import DeadlineTable
from tiderl.hub.process import WorkerExit, tail


def test_deadlines_name_the_session_that_is_late_longest() -> None:
    table = DeadlineTable(3)
    now = time.monotonic()
    assert table.overdue(now + 1e6) is None
    for slot, (session, limit) in enumerate([("a" * 32, 5.0), ("b" * 32, 2.0), ("c" * 32, 9.0)]):
        table.assign(slot, session)
        table.arm(slot, limit)
    assert table.overdue(now + 1.0) is None
    assert table.overdue(now + 3.0) == ("b" * 32, 2.0)
    assert table.overdue(now + 99.0) == ("b" * 32, 2.0)
    table.disarm(1)
    assert table.overdue(now + 99.0) == ("a" * 32, 5.0)


def test_deadlines_are_seen_by_another_process() -> None:
    table = DeadlineTable(1)
    child = os.fork()
    if child == 0:
        table.assign(0, "s")
        table.arm(0, 0.0)
        os._exit(0)
    os.waitpid(child, 0)
    assert table.overdue(time.monotonic()) == ("s", 0.0)


def test_workers_inherit_path_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.syspath_prepend("/special")
    given = launch.variables(sys.executable, {"OMP_NUM_THREADS": "2", "MINE": "x"})
    assert given["MINE"] == "x"
    assert given["OMP_NUM_THREADS"] == "2"  # what the user asks for wins
    assert given["MKL_NUM_THREADS"] == "1"
    content = json.loads(given["TIDERL_WORKER_LAUNCH"])
    assert content["path"][0] == "/special"
    assert content["pythonpath"] == "/somewhere"
    other = json.loads(launch.variables("/usr/bin/other", {})["TIDERL_WORKER_LAUNCH"])
    assert "/special" in other["path"]
    assert not any(path.startswith(sys.base_prefix + os.sep) for path in other["path"])


def test_worker_takes_over_the_path_and_hides_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours:/somewhere")
    monkeypatch.setenv("TIDERL_WORKER_LAUNCH", json.dumps({"path": ["/a", "/b"], "pythonpath": "/somewhere"}))
    monkeypatch.setattr(sys, "path", ["/b", "/c"])
    monkeypatch.setattr(launch, "in_worker", False)
    launch.apply()
    assert sys.path == ["/a", "/b", "/c"]
    assert os.environ["PYTHONPATH"] == "/somewhere"
    assert "TIDERL_WORKER_LAUNCH" not in os.environ
    assert launch.in_worker


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (WorkerExit(5, 3, None, 0.0, "last line"), "worker 5 exited with code 3; end of its log:\nlast line"),
        (WorkerExit(5, -9, None, 0.0, ""), "worker 5 was killed by SIGKILL"),
        (WorkerExit(5, 139, None, 0.0, ""), "worker 5 was killed by SIGSEGV"),
        (WorkerExit(5, None, None, 0.0, ""), "worker 5 is gone"),
        (
            WorkerExit(5, -9, "s", 0.5, "x"),
            "worker 5 was stopped because a session in it passed its limit of 0.5 s",
        ),
    ],
)
def test_t02_the_end_of_a_worker_in_words(end: WorkerExit, text: str) -> None:
    assert end.describe() == text


def test_tail_is_bounded(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(f"line {i}" for i in range(10_000)))
    assert tail(log).splitlines()[-1] == "line 9999"
    assert len(tail(log).splitlines()) == 20
    assert tail(tmp_path / "none") == ""


def test_t53_ids_not_loaded_here_have_no_origin() -> None:
    assert origin.origin_of("nobody/Knows-v0") is None
