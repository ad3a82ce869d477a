"""The watchdog half of a worker: a small process of its own that enforces deadlines by killing.

The worker's first process forks: the child serves sessions (`host.py`), the parent stays here. It has
one thread, imports nothing heavy and holds no lock of the child, so it also ends an environment that
blocks in C code. It leads the worker's process group.

Invariants: a call past its deadline, the death of the hub's process, or the end of the child ends every
process below the worker, whatever its group; how the worker ended is written to the note file before its
first process ends.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import NoReturn

from tiderl.hub.deadlines import DeadlineTable
from tiderl.processes import adopt_orphans, kill_below

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


def watch(child: int, table: DeadlineTable, *, parent: int, note: Path, folder: Path) -> NoReturn:
    """Watch the serving process `child` until it ends or must end; never returns.

    Args:
        parent: process id of the hub; when it is gone, `folder` (the hub's) is removed too.
        note: file that tells the hub how the worker ended.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    adopt_orphans()
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
