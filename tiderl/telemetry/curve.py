"""Draws the learning curves of runs from their `metrics.jsonl`.

Invariant: a curve shows the numbers on disk; of several runs each is shown, and so is their mean.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tiderl.errors import MissingExtra, TideError
from tiderl.telemetry.metrics import read_lines


def draw_curves(runs: Sequence[Path], out: Path) -> None:
    """Draw success (and held-out success before and after) of `runs` into the picture `out`.

    Raises:
        TideError: a folder holds no metrics.
        MissingExtra: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import to_hex
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("drawing needs matplotlib", fix="pip install matplotlib") from error

    figure = Figure(figsize=(7.2, 4.0), dpi=130)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    curves = []
    for run in runs:
        rows = [r for r in read_lines(run / "metrics.jsonl") if r.get("success") is not None]
        if not rows:
            raise TideError(
                f"'{run}' holds no metrics", fix="give the folder of a run, such as runs/quickstart"
            )
        summary = _summary(run)
        label = f"{summary.get('name', run.name)}, seed {summary['seed']}" if "seed" in summary else run.name
        x, y = [r["update"] for r in rows], [r["success"] for r in rows]
        curves.append(y)
        (line,) = axes.plot(x, y, marker="o", markersize=3, linewidth=1.4, label=label)
        _held_out(axes, summary, x[-1], to_hex(line.get_color()))
    if len(curves) > 1:
        length = min(map(len, curves))
        mean = np.mean([c[:length] for c in curves], axis=0)
        axes.plot(range(1, length + 1), mean, color="black", linewidth=2.2, label="mean")
    axes.set(xlabel="update", ylabel="success", ylim=(-0.03, 1.03))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", fontsize=8, frameon=False, title="◇ before, ◆ after: held-out tasks, 95 %")
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def _held_out(axes: Any, summary: dict[str, Any], last: int, colour: str) -> None:
    for x, key, interval, face in (
        (0, "success_before", "success_before_ci95", "white"),
        (last + 0.6, "success_after", "success_ci95", colour),
    ):
        value, ci = summary.get(key), summary.get(interval)
        if value is None or ci is None:
            continue
        error = [[max(0.0, value - ci[0])], [max(0.0, ci[1] - value)]]
        axes.errorbar(
            x, value, yerr=error, fmt="D", color=colour, markerfacecolor=face, markersize=6, capsize=3
        )


def _summary(run: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads((run / "summary.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return data
