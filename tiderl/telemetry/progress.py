"""What a person sees of a run: a live bar on a terminal, one plain line an update elsewhere.

Invariant: nothing is drawn over other output, and the same numbers are shown in both forms.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Remaining

SHOWN = {
    "success": "success {:.2f}",
    "reward": "reward {:.2f}",
    "loss": "loss {:+.4f}",
    "goodput_tokens_per_s": "goodput {:.0f} tok/s",
    "kv_hit_rate": "KV hit {:.3f}",
    "staleness": "staleness {:.1f}",
    "max_logprob_gap": "gap {:.1e}",
}


def describe(values: Mapping[str, Any]) -> str:
    """The shown metrics in one line."""
    parts = [form.format(values[key]) for key, form in SHOWN.items() if values.get(key) is not None]
    return " · ".join(parts)


class RunProgress:
    """Progress of a run with `total` updates."""

    def __init__(self, total: int, *, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False)
        self.live = self.console.is_terminal and sys.stderr.isatty()
        self.total, self._started, self._done = total, time.monotonic(), 0
        self._progress: Progress | None = None
        self._task: Any = None

    def __enter__(self) -> RunProgress:
        if self.live:
            self._progress = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                Remaining(),
                TextColumn("{task.fields[status]}"),
                console=self.console,
            )
            self._task = self._progress.add_task("updates", total=self.total, status="")
            self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        console = self._progress.console if self._progress is not None else self.console
        console.print(text, markup=False, soft_wrap=True)

    def status(self, text: str) -> None:
        """What is going on now; only on a terminal."""
        if self._progress is not None:
            self._progress.update(self._task, status=text)

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
