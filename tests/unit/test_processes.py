"""Processes below a process: found, kept below it, killed, whatever their group, session or name."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tiderl import processes
from tiderl.hub import watchdog

SPAWNS = """
import signal
import subprocess, time
print(subprocess.Popen(["sleep", "60"], start_new_session=True).pid, flush=True)
time.sleep(60)
"""


def gone(pid: int, limit: float = 5.0) -> bool:
    end = time.monotonic() + limit
    while processes.is_running(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return not processes.is_running(pid)


def test_kill_below_reaches_other_sessions_and_spares_the_root() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", SPAWNS], stdout=subprocess.PIPE, text=True) as outer:
        assert outer.stdout is not None
        inner = int(outer.stdout.readline())
        below = processes.descendants(os.getpid())
        assert below.index(outer.pid) < below.index(inner)
        processes.kill_below(outer.pid)
        assert gone(inner)
        assert watchdog.process_alive(outer.pid)
        outer.kill()


def test_a_zombie_is_not_alive() -> None:
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended and is not reaped
        assert watchdog.process_alive(child.pid)
        assert not processes.is_running(child.pid)
        assert child.pid not in processes.descendants(os.getpid())


@pytest.mark.parametrize("name", [b"a) S 1 (b", b"sp ace", b"\xff\xfe"])
def test_a_program_of_any_name_is_found(tmp_path: Path, name: bytes) -> None:
    program = os.path.join(os.fsencode(tmp_path), name)
    shutil.copy(os.fsencode(shutil.which("sleep") or "/bin/sleep"), program)
    with subprocess.Popen([program, "60"]) as child:
        try:
            assert child.pid in processes.descendants(os.getpid())
        finally:
            child.kill()


ADOPTS = """
import os, subprocess, sys
from tiderl import processes
if sys.argv[1] == "adopt":
    processes.adopt_orphans()
code = 'import subprocess as s; print(s.Popen(["sleep", "60"], stdout=s.DEVNULL, stderr=s.DEVNULL).pid)'
orphan = int(subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True).stdout)
print(orphan, orphan in processes.descendants(os.getpid()))
if sys.argv[1] == "adopt":
    processes.kill_below(os.getpid())
else:
    os.kill(orphan, 9)
"""


@pytest.mark.parametrize("adopt", [True, False])
def test_an_orphan_stays_below_who_adopts_it(adopt: bool) -> None:
    word = "adopt" if adopt else "leave"
    done = subprocess.run(
        [sys.executable, "-c", ADOPTS, word], capture_output=True, text=True, timeout=60, check=True
    )
    orphan, found = done.stdout.split()
    assert found == str(adopt)
    assert gone(int(orphan))


@pytest.mark.parametrize("ignored", [False, True], ids=["terminal", "background"])
def test_sigterm_ends_a_block_as_ctrl_c_does(ignored: bool) -> None:
    """Also where the shell that started the job had SIGINT ignored."""
    program = """
import asyncio
from tiderl.processes import terminated_as_interrupt

async def wait():
    print("ready", flush=True)
    try:
        await asyncio.sleep(30)
    finally:
        print("closed", flush=True)

try:
    with terminated_as_interrupt():
        asyncio.run(wait())
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.SIG_DFL),
    )
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=20)[0] == "closed\ninterrupted\n"
    finally:
        process.kill()
