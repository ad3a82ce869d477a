"""`tiderl plot`: learning curves of runs as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The picture to write.")] = Path("curve.png"),
) -> None:
    """Draw the learning curves of one or more runs.

    Example:

      tiderl plot runs/quickstart -o curve.png
    """
    from tiderl.telemetry.curve import draw_curves

    draw_curves(runs, out)
    typer.echo(f"wrote {out}")
