"""How a running evaluation is shown.

Invariants: a reporter only shows and never changes a result; on a terminal there is one live line, elsewhere
a plain line at the start, at most one every ten seconds, and nothing with control characters.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TextIO

from .result import EpisodeResult

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

EVERY = 10.0
"""Seconds between two plain lines."""


@dataclass
class Tally:
    """Running counts: `done` of `total` have a record, `fresh` of them were played by this process."""

    total: int
    done: int = 0
    fresh: int = 0
    valid: int = 0
    successes: int = 0
    began: float = 0.0

    def add(self, record: EpisodeResult, *, fresh: bool = True) -> None:
        """Count one record."""
        self.done += 1
        self.fresh += fresh
        self.valid += record.valid
        self.successes += record.valid and record.success

    @property
    def invalid(self) -> int:
        """Episodes that infrastructure ended."""
        return self.done - self.valid

    def rate(self, now: float) -> float:
        """Episodes a second of this process."""
        return self.fresh / max(now - self.began, 1e-9)

    def left(self, now: float) -> float | None:
        """Seconds that are left at this rate; None while there is none."""
        rate = self.rate(now)
        return (self.total - self.done) / rate if self.fresh and rate > 0 else None

    def text(self, now: float) -> str:
        """Success so far, failures, rate and time left."""
        words = [f"success {self.successes / self.valid:.3f}" if self.valid else "success n/a"]
        if self.invalid:
            words.append(f"{self.invalid} invalid")
        if self.fresh:
            words.append(f"{self.rate(now):.1f} episodes/s")
        left = self.left(now)
        if left is not None:
            words.append(f"{_clock(left)} left")
        return " · ".join(words)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Reporter(Protocol):
    """Shows an evaluation."""

    def stage(self, text: str) -> None:
        """Something that takes a while begins, such as the start of an engine."""

    def start(self, tally: Tally) -> None: ...

    def episode(self, record: EpisodeResult, tally: Tally) -> None: ...

    def stop(self) -> None: ...


class Silent:
    """Shows nothing; for evaluations that a program runs."""

    def stage(self, text: str) -> None:
        """Nothing."""

    def start(self, tally: Tally) -> None:
        """Nothing."""

    def episode(self, record: EpisodeResult, tally: Tally) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Nothing."""


class Plain:
    """Lines for logs and pipes."""

    def __init__(self, stream: TextIO | None = None, every: float = EVERY) -> None:
        self.stream, self.every, self._last = stream or sys.stderr, every, 0.0

    def _say(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def stage(self, text: str) -> None:
        """One line."""
        self._say(text)

    def start(self, tally: Tally) -> None:
        """What is to do, and what is done already."""
        kept = f", {tally.done} done before" if tally.done else ""
        self._say(f"{tally.total} episodes{kept}")
        self._last = time.monotonic()

    def episode(self, record: EpisodeResult, tally: Tally) -> None:
        """A line when the last one is old enough."""
        now = time.monotonic()
        if now - self._last >= self.every:
            self._last = now
            self._say(f"{tally.done}/{tally.total} · {tally.text(now)}")

    def stop(self) -> None:
        """Nothing: the result's line comes from the caller."""


class Live:
    """A bar on a terminal."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._waiting: TaskID | None = None

    def _bar(self) -> Progress:
        if self._progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[told]}"),
                console=Console(stderr=True),
                transient=True,
            )
            self._progress.start()
        return self._progress

    def stage(self, text: str) -> None:
        """A spinner with the text, until the episodes start."""
        bar = self._bar()
        if self._waiting is not None:
            bar.remove_task(self._waiting)
        self._waiting = bar.add_task(text, total=None, told="")

    def start(self, tally: Tally) -> None:
        """The bar, from where an earlier process left it."""
        bar = self._bar()
        if self._waiting is not None:
            bar.remove_task(self._waiting)
            self._waiting = None
        self._task = bar.add_task(self.label, total=tally.total, completed=tally.done, told="")

    def episode(self, record: EpisodeResult, tally: Tally) -> None:
        """Move the bar."""
        if self._task is not None:
            told = tally.text(time.monotonic())
            self._bar().update(self._task, completed=tally.done, total=tally.total, told=told)

    def stop(self) -> None:
        """Take the bar away; safe to call twice."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def reporter_for(label: str, stream: TextIO | None = None) -> Reporter:
    """A live bar when `stream` (standard error by default) is a terminal, plain lines elsewhere."""
    stream = stream or sys.stderr
    return Live(label) if stream.isatty() else Plain(stream)
