"""Memory of a family of processes."""

from __future__ import annotations

import subprocess
import sys
import time

from tiderl.telemetry.memory import MemoryWatch, give_back, memory_mb

SIZE_MB = 120


def test_a_childs_memory_counts_and_its_peak_is_kept() -> None:
    before = memory_mb()
    code = f"x = bytearray(b'1') * {SIZE_MB * 10**6}; print('up', flush=True); input()"
    with (
        MemoryWatch() as watch,
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child,
    ):
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == "up\n"
        assert memory_mb() > before + 0.9 * SIZE_MB
        time.sleep(1.2)
        child.communicate("\n", timeout=20)
    assert watch.peak_mb > before + 0.9 * SIZE_MB
    give_back()
    assert memory_mb() < before + 0.5 * SIZE_MB
