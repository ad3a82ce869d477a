"""How much memory a run takes, all its processes together.

Invariant: a page that several processes share is counted once (proportional set size), and the peak is over
samples taken all the time, so what an update takes and gives back is seen too.
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

from tiderl.processes import descendants

PERIOD_S = 0.5


def memory_mb() -> float:
    """Resident memory of this process and its descendants, in MB."""
    total = 0
    for pid in [os.getpid(), *descendants(os.getpid())]:
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
    """Samples `memory_mb` in a thread of its own while the block runs."""

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
        while not self._stop.wait(PERIOD_S):
            self.peak_mb = max(self.peak_mb, memory_mb())
