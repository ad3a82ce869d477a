"""Progress of a rollout benchmark on standard error: a bar on a terminal, lines elsewhere.

Invariant: the bar counts cells and, within one, the seconds of its window, so it moves all the time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class BenchProgress:
    """Args:

    cells: how many are measured in all.
    """

    def __init__(self, cells: int) -> None:
        self.console = Console(stderr=True, highlight=False)
        self._live = self.console.is_terminal and sys.stderr.isatty()
        self._cells, self._done = cells, 0
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> BenchProgress:
        if self._live:
            self._progress = Progress(
                BarColumn(bar_width=24),
                TextColumn("{task.fields[cell]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[status]}"),
                console=self.console,
            )
            self._task = self._progress.add_task("cells", total=self._cells, status="", cell=self._label())
            self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        console = self._progress.console if self._progress is not None else self.console
        console.print(text, markup=False, soft_wrap=True)

    def now(self, text: str) -> None:
        """What is going on."""
        self._update(float(self._done), text)

    def teller(self, title: str, seconds: float) -> Callable[[float, str], None]:
        """Tells how far a cell of about so many seconds is."""

        def tell(spent: float, text: str) -> None:
            self._update(self._done + min(0.99, spent / max(seconds, 1e-9)), f"{title} · {text}")

        return tell

    def done(self, text: str) -> None:
        """A cell is measured."""
        self._done += 1
        self.say(text)
        self._update(float(self._done), "")

    def skip(self, cells: int) -> None:
        """So many cells were measured before."""
        self._done += cells
        self._update(float(self._done), "")

    def _label(self) -> str:
        return f"{self._done}/{self._cells}"

    def _update(self, completed: float, status: str) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=completed, status=status, cell=self._label())
