"""The processes below a process: find them, keep them there, end them.

Invariant: what is found is alive (no zombie); whatever its process group or session, a process that was
started below is found, once `adopt_orphans` was called also when its parent has ended.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_ROUNDS = 5


def state_of(pid: int) -> tuple[str, int] | None:
    """The state letter of a process and the id of its parent; None where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")  # a program may bear any bytes as name
    except OSError:
        return None
    state, parent = text.rpartition(")")[2].split()[:2]
    return state, int(parent)


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    found = state_of(pid)
    return found is not None and found[0] not in "ZX"


def descendants(root: int) -> list[int]:
    """Ids of the living processes below `root`, nearest first; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        found = state_of(int(entry.name))  # None: it ended while we looked
        if found is not None and found[0] not in "ZX":
            children.setdefault(found[1], []).append(int(entry.name))
    below = list(children.get(root, ()))
    for pid in below:  # grows while we walk
        below.extend(children.get(pid, ()))
    return below


def kill_below(root: int) -> None:
    """Kill every descendant of `root`, those in other process groups too, until none is left."""
    for _ in range(_ROUNDS):  # a process may fork while we walk
        alive = descendants(root)
        if not alive:
            return
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue


def adopt_orphans() -> None:
    """Let a process whose parent has ended stay below this one, so that it can be found and ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextmanager
def terminated_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does: `asyncio.run` cancels, and everything is closed.

    Also in a job that a shell put into the background, where SIGINT is ignored and `asyncio.run` would
    never learn of it. For the main thread.
    """
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    terminate = signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, terminate)
        signal.signal(signal.SIGINT, interrupt)
