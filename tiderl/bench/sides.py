"""One side of a benchmark in a process of its own, watched through the metrics file that it writes.

Invariant: when `run_side` returns or raises, nothing that it started is alive.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tiderl.errors import ResourceError, TideError
from tiderl.telemetry.metrics import read_lines

START_TIMEOUT = 1800.0
UPDATE_TIMEOUT = 1200.0
"""Seconds until the first update is done, and until each later one (TRL on a core shared with others)."""
END_TIMEOUT = 300.0
POLL = 0.2
LONGEST_BASE = 24
TAIL_LINES = 12
_PR_SET_PDEATHSIG = 1

SAME_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "NO_COLOR": "1",
}
"""Set for both sides. Threads that spin while they wait would slow either side on a busy machine."""


def side_environment(temporary: Path) -> dict[str, str]:
    """The environment of both sides: the caller's, the same settings, temporary files of their own."""
    kept = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONHOME", "PYTHONPATH")}
    temporary.mkdir(parents=True, exist_ok=True)
    return kept | SAME_ENVIRONMENT | {"TMPDIR": str(temporary)}


@contextmanager
def short_folder(prefix: str) -> Iterator[Path]:
    """A temporary folder with a short path: sockets below it have at most 107 letters in theirs."""
    base = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(
        prefix=prefix, dir=base if len(base) <= LONGEST_BASE else "/tmp"
    ) as made:
        yield Path(made)


def run_side(
    title: str,
    command: Sequence[str],
    *,
    folder: Path,
    metrics: Path,
    updates: int,
    on_update: Callable[[int], None],
) -> list[dict[str, Any]]:
    """Run `command` in `folder` until it ends; returns the lines of `metrics`.

    Each line gets `cpu_s`: the CPU seconds of the side's processes when the line was seen, up to
    `POLL` late; None where they had ended before that.

    Args:
        title: the side's name, for errors.
        command: what to start; its output goes to `folder`/log.txt.
        folder: its working folder.
        metrics: the file it appends one JSON line an update to.
        updates: how many updates it will make, the warm-up included.
        on_update: called with the number of updates done, when that changes.

    Raises:
        TideError: it failed; the text ends with what it said last.
        ResourceError: it made no progress in time.
    """
    log = folder / "log.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(
            list(command),
            cwd=folder,
            env=side_environment(folder / "t"),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is ours to handle
            preexec_fn=_die_with_parent,
        )
    spent: list[float | None] = []
    try:
        done, since = 0, time.monotonic()
        while process.poll() is None:
            time.sleep(POLL)
            if (now := len(read_lines(metrics))) != done:
                spent += [cpu_seconds(process.pid)] * (now - done)
                done, since = now, time.monotonic()
                on_update(done)
            limit = START_TIMEOUT if not done else UPDATE_TIMEOUT if done < updates else END_TIMEOUT
            if time.monotonic() - since > limit:
                raise ResourceError(
                    f"{title} made no progress for {limit:.0f} s after update {done}; it said: {tail(log)}",
                    fix="run it on a less busy machine",
                )
    finally:
        end_tree(process)
    rows = read_lines(metrics)
    if process.returncode or len(rows) != updates:
        raise TideError(
            f"{title} ended with code {process.returncode} after {len(rows)} of {updates} updates; "
            f"it said: {tail(log)}"
        )
    spent += [None] * (len(rows) - len(spent))
    return [row | {"cpu_s": seconds} for row, seconds in zip(rows, spent, strict=True)]


def cpu_seconds(pid: int) -> float | None:
    """CPU seconds that a process and its living descendants have used; None when it has ended."""
    import psutil

    total = 0.0
    try:
        top = psutil.Process(pid)
        for process in [top, *top.children(recursive=True)]:
            times = process.cpu_times()
            total += times.user + times.system
    except psutil.NoSuchProcess:
        return None
    return total


def tail(log: Path) -> str:
    """The last lines of a log, on one line."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return " | ".join(line.strip() for line in lines[-TAIL_LINES:] if line.strip())


def end_tree(process: subprocess.Popen[bytes], timeout: float = 10.0) -> None:
    """Kill `process` and all its descendants, and wait until they are gone."""
    import psutil

    try:
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    except psutil.NoSuchProcess:
        family = []
    if process.poll() is None:
        process.kill()
        process.wait(timeout)
    try:
        os.killpg(process.pid, signal.SIGKILL)  # what is left of its group
    except (ProcessLookupError, PermissionError):
        pass
    for one in family:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(family, timeout)


_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def machine() -> Mapping[str, Any]:
    """What the figures were measured on."""
    import platform

    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 1e9, 1),
        "python": platform.python_version(),
        "system": platform.platform(),
    }
