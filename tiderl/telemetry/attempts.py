"""The tasks of a rollout, put together from its decision log.

Invariant: a task that was queued again (its run was resumed) has one attempt for each time, in order; what a
task did is told by its own rows alone.
"""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tiderl.errors import TideError, nearest
from tiderl.telemetry.decisions import FILE, Made, Move, Note, Outcome, Resumed, Row, Turn, iterate_decisions

PARTS = {
    "queued": "queued",
    "admitted": "reset",
    "ready": "ready",
    "running": "running",
    "paused": "environment",
}
"""State -> what a task's seconds in it are called."""

ENDS = ("done", "failed", "cancelled")

_ENOUGH = 5
"""Pauses before one can say what is usual."""


@dataclass
class Attempt:
    """One way of a task through the table."""

    task: str
    number: int
    rows: list[tuple[int, Row]] = field(default_factory=list)
    """(place in the log, row); notes of its time included."""
    until: float = 0.0
    """Its end; for a task under way, the last moment the log knows of."""
    cut: bool = False
    """The run was stopped under it."""


@dataclass(frozen=True)
class TaskSummary:
    """A task in figures. Seconds, and tokens as the engine counted them."""

    task: str
    state: str
    """`interrupted`: its run was stopped under it."""
    reason: str
    attempts: int
    turns: int
    context: int
    seconds: float
    waits: dict[str, float]
    """Seconds queued, in reset, ready, running, and in the environment."""
    sampled: int
    reprefilled: int
    reprefilled_by_cause: dict[str, int]
    released: int
    """How often its KV was let go."""
    mispredicted: int
    """How often it came back sooner than predicted."""
    engines: list[str]

    def to_json(self) -> dict[str, Any]:
        """As `tiderl rollout tasks --json` prints it."""
        return asdict(self)


class RolloutStory:
    """Everything a decision log tells, by task."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.attempts: dict[str, list[Attempt]] = {}
        self._pauses: dict[str, list[tuple[int, float]]] = {}
        self._read(rows)

    def summaries(self) -> list[TaskSummary]:
        """Every task, in the order in which they were queued; the last attempt of each."""
        return [summary_of(found[-1], len(found)) for found in self.attempts.values()]

    def find(self, text: str) -> str:
        """The task named `text`, or the only one whose name holds it.

        Raises:
            TideError: there is none, or there are several.
        """
        if text in self.attempts:
            return text
        found = [task for task in self.attempts if text and text in task]
        if len(found) == 1:
            return found[0]
        if found:
            some = ", ".join(found[:5]) + (", ..." if len(found) > 5 else "")
            raise TideError(f"{len(found)} tasks match '{text}'", fix=f"choose one of {some}")
        near = nearest(text, self.attempts)
        raise TideError(
            f"no task '{text}' in this run",
            fix=f"did you mean {' or '.join(near)}?" if near else "`tiderl rollout tasks RUN` lists them",
        )

    def usual(self, wait: str, before: int) -> float | None:
        """Median seconds of the environment's answers to `wait` that came before row `before`."""
        seen = [seconds for place, seconds in self._pauses.get(wait, ()) if place < before]
        return statistics.median(seen) if len(seen) >= _ENOUGH else None

    def _read(self, rows: Iterable[Row]) -> None:
        live: dict[str, Attempt] = {}
        paused: dict[str, tuple[float, str]] = {}
        made: dict[int, str] = {}
        for place, row in enumerate(rows):
            if isinstance(row, Resumed):
                for attempt in live.values():
                    attempt.cut = True
                live, paused = {}, {}
                continue
            if isinstance(row, Move) and (not row.before or row.task not in live):
                found = self.attempts.setdefault(row.task, [])
                live[row.task] = Attempt(row.task, len(found) + 1)
                found.append(live[row.task])
            for attempt in live.values() if isinstance(row, Note) else ():
                attempt.rows.append((place, row))
            if isinstance(row, Made):
                made[row.id] = row.task
            task = made.get(row.decision, "") if isinstance(row, Outcome) else getattr(row, "task", "")
            if task in live:
                live[task].rows.append((place, row))
                live[task].until = row.at
            if isinstance(row, Move):
                self._pause(paused, place, row)
                if row.after in ENDS:
                    live.pop(row.task, None)
        last = max((attempt.until for attempt in live.values()), default=0.0)
        for attempt in live.values():
            attempt.until = last

    def _pause(self, paused: dict[str, tuple[float, str]], place: int, row: Move) -> None:
        if row.after == "paused":
            since, wait = paused.get(row.task, (row.at, ""))
            paused[row.task] = (since, row.wait or wait)
        elif row.task in paused:
            since, wait = paused.pop(row.task)
            self._pauses.setdefault(wait, []).append((place, row.at - since))


def summary_of(attempt: Attempt, attempts: int = 1) -> TaskSummary:
    """The figures of one attempt."""
    waits = dict.fromkeys(PARTS.values(), 0.0)
    again: Counter[str] = Counter()
    engines: list[str] = []
    state, since, began, reason, context = "", attempt.until, None, "", 0
    turns = sampled = released = mispredicted = 0
    release: Made | None = None
    for _, row in attempt.rows:
        if isinstance(row, Turn):
            sampled += row.sampled
            if row.reprefilled:
                again[row.cause or "evicted"] += row.reprefilled
        elif isinstance(row, Made) and row.kind == "release":
            released, release = released + 1, row
        elif isinstance(row, Move):
            began = row.at if began is None else began
            if state in PARTS:
                waits[PARTS[state]] += row.at - since
            turns += (row.before, row.after) == ("running", "paused")
            if row.after == "ready" and row.before == "paused":
                mispredicted += came_too_soon(release, row.at)
                release = None
            state, since, context = row.after, row.at, row.context
            if row.after in ENDS:
                reason = row.cause
            if row.after == "running" and row.engine not in engines:
                engines.append(row.engine)
    if state in PARTS:
        waits[PARTS[state]] += attempt.until - since
    return TaskSummary(
        task=attempt.task,
        state="interrupted" if attempt.cut else state,
        reason=reason,
        attempts=attempts,
        turns=turns,
        context=context,
        seconds=attempt.until - (attempt.until if began is None else began),
        waits=waits,
        sampled=sampled,
        reprefilled=sum(again.values()),
        reprefilled_by_cause=dict(again),
        released=released,
        mispredicted=mispredicted,
        engines=engines,
    )


def came_too_soon(release: Made | None, at: float) -> bool:
    """Whether a task whose KV was let go by `release` is back sooner than was predicted."""
    return release is not None and release.predicted is not None and at - release.at < release.predicted


def decision_log_of(run: str | os.PathLike[str]) -> Path:
    """The decision log of a run, given by its folder, by its name below `runs/`, or itself.

    Raises:
        TideError: there is none; near names are named.
    """
    path = Path(run)
    if path.is_file():
        return path
    for folder in (path, Path("runs") / path):
        if (folder / FILE).is_file():
            return folder / FILE
    if path.is_dir() or (Path("runs") / path).is_dir():
        raise TideError(
            f"run '{run}' holds no {FILE}", fix="give a run that was made with tiderl train or bench rollout"
        )
    known: dict[str, Path] = {}
    for parent in {path.parent, Path("runs")}:
        known |= {found.parent.name: found.parent for found in parent.glob(f"*/{FILE}")}
    near = [str(known[name]) for name in nearest(path.name, known)]
    fix = f"did you mean {' or '.join(near)}?" if near else "give its folder, such as runs/quickstart"
    raise TideError(f"there is no run '{run}'", fix=fix)


def read_story(run: str | os.PathLike[str]) -> RolloutStory:
    """The story of a run's tasks. Raises `TideError`; see `decision_log_of` and `iterate_decisions`."""
    return RolloutStory(iterate_decisions(decision_log_of(run)))


def waiting_shares(summary: TaskSummary | Mapping[str, float]) -> dict[str, float]:
    """Share of its time that a task spent in each part."""
    waits = summary.waits if isinstance(summary, TaskSummary) else summary
    total = sum(waits.values())
    return {part: seconds / total if total else 0.0 for part, seconds in waits.items()}
