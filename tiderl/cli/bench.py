"""`tiderl bench`: measure TideRL against other systems, both sides in one run.

Invariants: each side runs in fresh processes of its own, one after the other, in an order that rotates
from round to round; Ctrl-C ends the processes that were started and leaves no temporary file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure TideRL against other systems."""


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
