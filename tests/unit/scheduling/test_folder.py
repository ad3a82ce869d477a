"""`scheduling/` stays what it is: pure, small, and quick to decide."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import tiderl.scheduling
from tiderl.bench.scheduling import run_bench_scheduling, snapshot_of
from tiderl.scheduling import POLICIES
from tiderl.scheduling.views import KV

FILES = sorted(Path(tiderl.scheduling.__file__).parent.glob("*.py"))
IMPURE = {"time", "random", "asyncio", "threading", "datetime", "os", "socket", "subprocess", "secrets"}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            names.add(node.module or "")
    return names


def test_it_imports_the_standard_library_and_itself_only() -> None:
    for path in FILES:
        for name in imported(path):
            top = name.split(".")[0]
            ours = name == "tiderl.scheduling" or name.startswith("tiderl.scheduling.")
            assert ours or (top in sys.stdlib_module_names and top not in IMPURE), f"{path.name}: {name}"


def test_it_is_below_1500_lines() -> None:
    assert sum(len(path.read_text().splitlines()) for path in FILES) < 1500


def test_the_bench_times_every_policy(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    figures = run_bench_scheduling(tasks=400, rounds=1, out=out)
    assert set(figures["policies"]) == set(POLICIES)
    assert all(row["median_ms"] > 0 for row in figures["policies"].values())
    assert '"tasks": 400' in out.read_text()


def test_what_the_bench_decides_on_is_legal() -> None:
    snapshot = snapshot_of(2000, seed=1)
    for engine in snapshot.engines:
        running = [t for t in snapshot.running if t.engine == engine.name]
        held = [t for t in (*snapshot.ready, *snapshot.paused) if t.engine == engine.name and t.kv is KV.HELD]
        promised = sum(engine.blocks(t.peak) for t in running) + sum(engine.blocks(t.context) for t in held)
        assert promised == engine.promised <= engine.capacity
        assert len(running) + len(held) == engine.sessions <= engine.slots
    assert len(snapshot.queued) == 1000
    assert snapshot.in_flight == 1000
