"""`tiderl bench scheduling`: how long one decision of each policy takes.

Invariant: policies are timed on the same snapshots, made from a fixed seed and legal in every respect (what
engines have promised is what their tasks hold); the order of policies rotates from round to round. Wall
time includes what the machine does besides; CPU time is the policy's own.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tiderl.scheduling import POLICIES, make_policy
from tiderl.scheduling.views import KV, EngineView, Snapshot, State, Task
from tiderl.scheduling.waits import Waits

LIMIT_MS = 5.0
"""What a tick may take for 10,000 tasks."""

TOOLS = ("web/click", "code/run", "os/shell", "game/step")


def snapshot_of(tasks: int, seed: int, engines: int = 4) -> Snapshot:
    """`tasks` tasks: half of them queued, 40 % paused, the rest ready or running; in groups of eight."""
    rng = random.Random(seed)
    now = 1000.0
    views = {
        f"engine-{i}": EngineView(
            f"engine-{i}", capacity=64 * 1024, slots=128, block=32, prefill_s=4e-4, turn_s=0.4
        )
        for i in range(engines)
    }
    names = list(views)
    started = tasks // 2
    by: dict[State, list[Task]] = {state: [] for state in State}
    for ordinal in range(tasks):
        tool = TOOLS[(ordinal // 8) % len(TOOLS)]
        task = Task(
            key=f"task-{ordinal}",
            order=(ordinal // 8, ordinal % 8),
            kind=tool.split("/")[0],
            state=State.QUEUED,
            new=rng.randint(100, 400),
            growth=64,
            remaining=rng.randint(100, 1500),
            since=now - 300.0,
            queued=now - 300.0,
        )
        if ordinal >= started:
            by[State.QUEUED].append(task)
            continue
        name = names[(ordinal // 8) % engines]
        view = views[name]
        dice = rng.random()
        task = replace(
            task,
            engine=name,
            context=rng.randint(100, 1500),
            turn=rng.randint(1, 12),
            wait=tool,
            since=now - rng.paretovariate(1.1) * 0.2,
        )
        if dice < 0.12:
            state = State.READY
        elif dice < 0.2:
            state = State.RUNNING
        else:
            state, task = State.PAUSED, replace(task, new=0)
        tokens = view.blocks(task.peak if state is State.RUNNING else task.context)
        fits = view.sessions < view.slots and view.promised + tokens <= view.capacity
        if state is State.RUNNING and not fits:
            state = State.READY
        # READY ones that hold KV are few: they go first, and only those since the last tick are left.
        chance = {State.RUNNING: 1.0, State.READY: 0.1}.get(state, 0.5)
        kv = KV.HELD if fits and rng.random() < chance else KV.CACHED
        if kv is KV.HELD:
            views[name] = replace(
                view,
                promised=view.promised + tokens,
                sessions=view.sessions + 1,
                running=view.running + (state is State.RUNNING),
            )
        by[state].append(replace(task, state=state, kv=kv))
    waits = {tool: Waits() for tool in TOOLS}
    for tool in TOOLS:
        for _ in range(200):
            waits[tool] = waits[tool].seen(rng.paretovariate(1.1) * 0.2)
    return Snapshot(
        now,
        tuple(views.values()),
        tuple(by[State.QUEUED]),
        (),
        tuple(by[State.READY]),
        tuple(by[State.RUNNING]),
        tuple(by[State.PAUSED]),
        waits=waits,
        concurrency=started + 64,
        target_mix={"web": 0.4, "code": 0.3, "os": 0.2, "game": 0.1},
        shipped={"web": 100, "code": 100, "os": 100, "game": 100},
    )


def time_policy(name: str, snapshots: list[Snapshot]) -> list[tuple[float, float]]:
    """(wall, CPU) milliseconds of each decision, in a row of ticks 10 ms apart."""
    policy = make_policy(name)
    memory, spent = policy.start(), []
    for snapshot in snapshots:
        wall, cpu = time.perf_counter(), time.thread_time()
        plan = policy.decide(snapshot, memory)
        spent.append(((time.perf_counter() - wall) * 1e3, (time.thread_time() - cpu) * 1e3))
        memory = plan.memory
    return spent


def run_bench_scheduling(tasks: int = 10_000, rounds: int = 20, out: Path | None = None) -> dict[str, Any]:
    """Time every policy; print a table, write the figures to `out` and return them."""
    base = [snapshot_of(tasks, seed) for seed in range(min(rounds, 4))]
    snapshots = [replace(base[i % len(base)], now=base[0].now + 0.01 * i) for i in range(4)]
    names = list(POLICIES)
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for index in range(-1, rounds):  # the first round warms up
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            times = time_policy(name, snapshots)
            if index >= 0:
                spent[name] += times
    table = Table(
        title=f"One decision over {tasks} tasks", caption=f"{rounds} rounds of {len(snapshots)} ticks"
    )
    for column in ("policy", "median ms", "p95 ms", "CPU ms"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    figures: dict[str, Any] = {"tasks": tasks, "rounds": rounds, "limit_ms": LIMIT_MS, "policies": {}}
    for name in names:
        wall, cpu = sorted(w for w, _ in spent[name]), [c for _, c in spent[name]]
        row = {
            "median_ms": round(statistics.median(wall), 3),
            "p95_ms": round(wall[min(int(len(wall) * 0.95), len(wall) - 1)], 3),
            "cpu_ms": round(statistics.median(cpu), 3),
        }
        figures["policies"][name] = row
        table.add_row(name, *(f"{value:.2f}" for value in row.values()))
    Console().print(table)
    if out is not None:
        out.write_text(json.dumps(figures, indent=2) + "\n")
    return figures
