"""`tiderl bench`: measure TideRL against other systems and its scheduling policies against each other.

Invariants: whatever is compared runs in one call, one after the other, in an order that rotates from round
to round; Ctrl-C ends the processes that were started and leaves no temporary file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tiderl.errors import ConfigError, nearest

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure TideRL against other systems, and its scheduling policies against each other."""


@app.command()
def train(
    out: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
    rounds: Annotated[int, typer.Option(min=1, max=50, help="How often each side is measured.")] = 3,
    updates: Annotated[int, typer.Option(min=1, max=100, help="Timed updates of a round, after one.")] = 3,
    config: Annotated[str, typer.Option(help="YAML file, or the name of a shipped one.")] = "quickstart",
) -> None:
    """Trained samples per second of a configuration, against TRL's GRPOTrainer.

    TRL gets a virtual environment of its own, made at the first call. What is equal on both sides and
    what is not: docs/benchmarks.md.

    Example:

      tiderl bench train --json bench.json
    """
    from tiderl.bench.train import run_bench

    run_bench(config, rounds=rounds, updates=updates, out=out)


@app.command()
def rollout(
    workload: Annotated[
        str, typer.Argument(help="YAML file, or the name of a shipped workload.", show_default=False)
    ] = "",
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Keys of the workload to replace, as a.b=value.")
    ] = None,
    policies: Annotated[str, typer.Option(help="Names with commas between them, or all.")] = "ctb,sync,async",
    rounds: Annotated[int, typer.Option(min=1, max=50, help="How often each policy is measured.")] = 3,
    out: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
    grid: Annotated[bool, typer.Option("--grid", help="The workload is a grid of workloads.")] = False,
    markdown: Annotated[Path | None, typer.Option(help="Write the table to this file.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep what --json's file holds already.")] = False,
    record: Annotated[
        Path | None, typer.Option(help="Write the episodes of the first policy's first round to this file.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print sizes and KV of the workload, run nothing.")
    ] = False,
) -> None:
    """Finished loss tokens per second of scheduling policies, on the real engine with sleeping environments.

    Each policy runs the same tasks on the same engines; the trainer is simulated by sleeping, its weight
    updates are real. Workloads: heavy_tail, heavy_tail_images, grid. What is measured how, and what is
    unfair to whom: docs/benchmarks.md.

    \b
    Examples:
      tiderl bench rollout heavy_tail --json bench.json
      tiderl bench rollout heavy_tail measure.seconds=20 load.oversubscription=1 --policies all --rounds 1
      tiderl bench rollout --grid --json grid.json --markdown grid.md --resume
    """
    from tiderl.bench.rollout.files import load_grid, load_workload
    from tiderl.bench.rollout.run import Request, run_bench_rollout, show_plan

    changes = list(overrides or ())
    if "=" in workload:  # the workload was left out
        workload, changes = "", [workload, *changes]
    if not workload and not grid:
        raise ConfigError("no workload is named", fix="name one, such as heavy_tail, or add --grid")
    workloads = load_grid(workload or "grid", changes) if grid else [load_workload(workload, changes)]
    names = chosen(policies)
    if dry_run:
        show_plan(workloads)
        return
    run_bench_rollout(
        Request(
            workloads=workloads,
            policies=names,
            rounds=rounds,
            out=out,
            table=markdown,
            record=record,
            resume=resume,
            grid=grid,
        )
    )


@app.command()
def scheduling(
    tasks: Annotated[int, typer.Option(min=1, help="Tasks in flight or queued.")] = 10_000,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Decisions timed of each policy.")] = 20,
    out: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """How long each scheduling policy takes to decide, on snapshots of many tasks. Needs no engine.

    Example:

      tiderl bench scheduling --tasks 10000 --json scheduling.json
    """
    from tiderl.bench.scheduling import run_bench_scheduling

    run_bench_scheduling(tasks=tasks, rounds=rounds, out=out)


def chosen(names: str) -> list[str]:
    """The policies of a list with commas, each once; raises ConfigError for one that is unknown."""
    from tiderl.scheduling import POLICIES

    if names.strip() == "all":
        return list(POLICIES)
    found = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    if not found:
        raise ConfigError("no policy is named", where="--policies", fix=f"name some of {', '.join(POLICIES)}")
    for name in found:
        if name not in POLICIES:
            near = nearest(name, POLICIES, n=1)
            fix = f"did you mean {near[0]}?" if near else f"there are {', '.join(POLICIES)}"
            raise ConfigError(f"there is no policy {name!r}", where="--policies", fix=fix)
    return found
