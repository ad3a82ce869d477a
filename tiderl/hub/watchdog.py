"""The watchdog half of a worker: a small process of its own that enforces deadlines by killing.

The worker's first process forks: the child serves sessions (`host.py`), the parent stays here. It has
one thread, imports nothing heavy and holds no lock of the child, so it also ends an environment that
blocks in C code. It leads the worker's process group.

Invariants: a call past its deadline, the death of the hub's process, or the end of the child ends every
process below the worker, whatever its group; how the worker ended is written to the note file before its
first process ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from tiderl.hub.deadlines import DeadlineTable

_PR_SET_CHILD_SUBREAPER = 36
_TICK = 0.04
_HOUSEKEEPING = 0.5
_MAX_LOG_BYTES = 8 * 2**20


def process_alive(pid: int) -> bool:
    """True while a process of that id exists (also as somebody else's)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def descendants(root: int) -> list[int]:
    """Process ids below `root`, nearest first (empty where there is no /proc)."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended while we looked
        children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = list(children.get(root, ()))
    for pid in found:  # grows while we walk
        found.extend(children.get(pid, ()))
    return found


def kill_below(root: int) -> None:
    """Kill every descendant of `root`, those in other process groups too, until none is left."""
    for _ in range(5):  # a process may fork while we walk
        alive = [pid for pid in descendants(root) if not _is_zombie(pid)]
        if not alive:
            return
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue


def watch(child: int, table: DeadlineTable, *, parent: int, note: Path, folder: Path) -> NoReturn:
    """Watch the serving process `child` until it ends or must end; never returns.

    Args:
        parent: process id of the hub; when it is gone, `folder` (the hub's) is removed too.
        note: file that tells the hub how the worker ended.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _adopt_orphans()
    first_parent = os.getppid()
    next_look = 0.0
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            _write(note, {"reason": "exit", "code": code})
            kill_below(os.getpid())  # what the environments left behind
            os._exit(code if code >= 0 else 128 - code)
        now = time.monotonic()
        late = table.overdue(now)
        if late is not None:
            _write(note, {"reason": "deadline", "session": late[0], "limit": late[1]})
            _end()
        if now >= next_look:
            next_look = now + _HOUSEKEEPING
            _bound_log()
            if os.getppid() != first_parent or not process_alive(parent):
                kill_below(os.getpid())
                shutil.rmtree(folder, ignore_errors=True)
                _end()
        time.sleep(_TICK)


def _adopt_orphans() -> None:
    # So that a process whose parent has ended stays below us and can be found.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end() -> NoReturn:
    kill_below(os.getpid())
    os.killpg(0, signal.SIGKILL)
    os._exit(128 + signal.SIGKILL)


def _write(note: Path, content: dict[str, object]) -> None:
    try:
        note.write_text(json.dumps(content))
    except OSError:
        return  # the hub has removed its folder: nobody is left to read it


def _bound_log() -> None:
    # The log is open for appending in all of the worker's processes, so cutting it is safe.
    try:
        if os.fstat(2).st_size > _MAX_LOG_BYTES:
            os.ftruncate(2, 0)
    except OSError:
        return  # not a file


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
