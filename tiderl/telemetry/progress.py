"""What a person sees of a run: a live bar on a terminal, one plain line an update elsewhere.

Invariant: nothing is drawn over other output, and the same numbers are shown in both forms; only what is
true for a moment (tasks by state, how full each engine is) is shown on a terminal alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Remaining
from rich.text import Text

from tiderl.telemetry.rollout_meter import main_wait

SHOWN = {
    "success": "success {:.2f}",
    "reward": "reward {:.2f}",
    "loss": "loss {:+.4f}",
    "goodput_tokens_per_s": "goodput {:.0f} tok/s",
    "kv_hit_rate": "KV hit {:.3f}",
    "reprefilled_tokens": "re-prefilled {:,}",
    "staleness": "staleness {:.1f}",
    "max_logprob_gap": "gap {:.1e}",
}


def describe(values: Mapping[str, Any]) -> str:
    """The shown metrics in one line."""
    parts = [form.format(values[key]) for key, form in SHOWN.items() if values.get(key) is not None]
    rollouts = values.get("rollouts", values)
    if (wait := main_wait(rollouts)) is not None and wait[1] >= 0.005:
        parts.append(f"engines wait {sum(rollouts['waiting_share'].values()):.0%}, mostly {wait[0]}")
    if (warning := length_warning(values)) is not None:
        parts.append(f"WARNING: {warning}")
    return " · ".join(parts)


def length_warning(values: Mapping[str, Any]) -> str | None:
    """What the alarm about lengths says; None while it is silent."""
    bias = values.get("length_bias")
    if not values.get("length_alarm") or bias is None:
        return None
    return f"trained episodes are {abs(bias):.1%} {'shorter' if bias < 0 else 'longer'} than generated ones"


def describe_rollout(values: Mapping[str, Any]) -> str:
    """Tasks by state and how full each engine is, from a snapshot of the `RolloutMeter`."""
    tasks: Mapping[str, int] = values.get("tasks") or {}
    fill: Mapping[str, float] = values.get("kv_fill") or {}
    parts = [" · ".join(f"{count} {state}" for state, count in tasks.items())]
    parts += [f"{name} KV {share:.0%}" for name, share in fill.items()]
    return " | ".join(part for part in parts if part)


class _Bar(Progress):
    """A bar with one more line below it."""

    line = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self.line:
            yield Text(f"  {self.line}", style="dim", no_wrap=True, overflow="ellipsis")


class RunProgress:
    """Progress of a run with `total` updates."""

    def __init__(self, total: int, *, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False)
        self.live = self.console.is_terminal and sys.stderr.isatty()
        self.total, self._started, self._done = total, time.monotonic(), 0
        self._progress: _Bar | None = None
        self._warned = False
        self._task: Any = None

    def __enter__(self) -> RunProgress:
        if self.live:
            self._progress = _Bar(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                Remaining(),
                TextColumn("{task.fields[status]}", markup=False),
                console=self.console,
            )
            self._task = self._progress.add_task("updates", total=self.total, status="")
            self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def say(self, text: str, *, style: str | None = None) -> None:
        """A line that stays."""
        console = self._progress.console if self._progress is not None else self.console
        console.print(text, markup=False, soft_wrap=True, style=style)

    def status(self, text: str) -> None:
        """What is going on now; only on a terminal."""
        if self._progress is not None:
            self._progress.update(self._task, status=text)

    def rollout(self, values: Mapping[str, Any]) -> None:
        """What the rollout does now, from `RolloutMeter.snapshot()`; only on a terminal."""
        if self._progress is not None:
            self._progress.line = describe_rollout(values)

    def start_at(self, update: int) -> None:
        """A resumed run begins with some updates done."""
        self._done = update
        if self._progress is not None:
            self._progress.update(self._task, completed=update)

    def update(self, number: int, values: Mapping[str, Any]) -> None:
        """Update `number` (from 1) is done."""
        spent = time.monotonic() - self._started
        steps = number - self._done
        left = spent / steps * (self.total - number) if steps > 0 else 0.0
        text = describe(values)
        if self._progress is not None:
            self._progress.update(self._task, completed=number, status=text)
        else:
            self.say(f"update {number}/{self.total} · {text} · {spent:.0f} s, at most {left:.0f} s left")
        warning = length_warning(values)
        if warning is not None and not self._warned:  # a line that stays, once for each time it goes off
            self.say(
                f"WARNING: {warning}, over the run so far: the policy is not trained on what it does; "
                "see docs/scheduling.md",
                style="bold yellow",
            )
        self._warned = warning is not None
