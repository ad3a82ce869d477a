"""How much memory a run takes, all its processes together.

Invariant: a page that several processes share is counted once (proportional set size), and the peak is over
samples taken all the time, so what an update takes and gives back is seen too. The exact figure walks every
page (0.1 s and more for a few GB, with the process held meanwhile), so a watch reads it only when a figure
that costs nothing, each process' resident pages, passes its highest by `STEP`.
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

from tiderl.processes import descendants

PERIOD_S = 0.5
STEP = 1.01


def resident_mb() -> float:
    """An upper bound of `memory_mb` at no cost: shared pages count in every process that has them."""
    pages = 0
    for pid in _processes():
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except OSError:
            continue
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _processes() -> list[int]:
    return [os.getpid(), *descendants(os.getpid())]


def memory_mb() -> float:
    """Resident memory of this process and its descendants, in MB."""
    total = 0
    for pid in _processes():
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # it ended meanwhile, or belongs to another user
        total += next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
    return total * 1024 / 1e6


def give_back() -> None:
    """Return freed memory to the system; glibc keeps what tensors of an update took."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return  # another C library: it has no such call


class MemoryWatch:
    """Samples the memory in a thread of its own while the block runs: `peak_mb` is the highest."""

    def __init__(self) -> None:
        self.peak_mb = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(5)

    def _run(self) -> None:
        highest = 0.0
        while not self._stop.wait(PERIOD_S):
            resident = resident_mb()
            if resident > STEP * highest:
                highest = resident
                self.peak_mb = max(self.peak_mb, memory_mb())
