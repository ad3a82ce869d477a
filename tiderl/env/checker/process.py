"""The item that looks for what an environment leaves behind after `close`.

Invariant: one session has been opened and closed before the count begins, so that caches which are
made once for the whole process are not charged.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tiderl.env.checker.context import Context, Failed, Skipped
from tiderl.processes import descendants

ROUNDS = 3
GRACE = 2.0
"""Seconds that threads and processes get to end after `close`."""


def close(ctx: Context) -> str:
    """No thread, process, open file or temporary file is left; a second `close` is harmless."""
    sample = ctx.sample()
    if not sample:
        raise Skipped("not checked: there are no tasks")
    policy = ctx.best_policy()
    with _own_temporary_folder() as folder:
        processes = set(descendants(os.getpid()))
        _session(ctx, sample[0], policy)
        threads, files = set(threading.enumerate()), open_files()
        for index in range(ROUNDS):
            _session(ctx, sample[index % len(sample)], policy)
        _forbid_processes(set(descendants(os.getpid())) - processes)
        _forbid_threads(threads)
        if open_files() - files >= ROUNDS:
            gc.collect()  # what only waits for the collector is not left
        if (grown := open_files() - files) >= ROUNDS:
            raise Failed(
                f"{grown} more open files or sockets after {ROUNDS} closed sessions", "close them in close()"
            )
        left = sorted(path.name for path in folder.iterdir())
        if left:
            raise Failed(
                f"{len(left)} temporary files left after close, for instance {left[0]!r}",
                "remove in close() what the environment created (tempfile.TemporaryDirectory has cleanup())",
            )
    return f"{ROUNDS + 1} sessions closed twice each; no thread, process, open file or temporary file left"


def _session(ctx: Context, sample: tuple[str, object, int], policy: str) -> None:
    split, task, seed = sample
    with ctx.driver.session() as env:
        ctx.driver.episode(env, policy, task, split, seed)
        ctx.driver.reset(env, task, split, seed)  # closed in the middle of an episode, as a stopped run does
        ctx.driver.close(env)


def _forbid_processes(left: set[int]) -> None:
    deadline = time.monotonic() + GRACE
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left &= set(descendants(os.getpid()))
    if left:
        names = ", ".join(sorted(f"{pid} {command_of(pid)}" for pid in left))
        raise Failed(
            f"{len(left)} processes left after close: {names}", "end them and wait for them in close()"
        )


def _forbid_threads(before: set[threading.Thread]) -> None:
    deadline = time.monotonic() + GRACE
    while True:
        left = [thread for thread in threading.enumerate() if thread not in before and thread.is_alive()]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    if any(not thread.daemon for thread in left) or len(left) >= ROUNDS:
        raise Failed(
            f"{len(left)} threads left after close: {', '.join(sorted(thread.name for thread in left))}",
            "stop and join them in close()",
        )


@contextmanager
def _own_temporary_folder() -> Iterator[Path]:
    """Let `tempfile` create in a folder that nobody else uses, for a while."""
    folder = Path(tempfile.mkdtemp(prefix="tiderl-check-"))
    kept = tempfile.tempdir, os.environ.get("TMPDIR")
    tempfile.tempdir, os.environ["TMPDIR"] = str(folder), str(folder)
    try:
        yield folder
    finally:
        tempfile.tempdir = kept[0]
        if kept[1] is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = kept[1]
        shutil.rmtree(folder, ignore_errors=True)


def command_of(pid: int) -> str:
    """The start of a process's command line, for texts."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    words[0] = words[0].rpartition(b"/")[2]  # a long path of the interpreter would crowd out what it runs
    return b" ".join(words).decode("utf-8", "replace").strip()[:60]


def open_files() -> int:
    """How many file descriptors this process has open; 0 where that cannot be known."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0
