"""The decision log of a rollout: every move of every task, every decision with what it was made from.

Invariants: `decisions.jsonl` holds one JSON object a line, in the order in which things happened; a decision
is written with its inputs before its outcome is known, and never changed afterwards; ids go on counting when
a run is resumed, and what a crash tore is cut off. The first key of a line says what it is:

    {"move": TASK, "at", "before", "after", "kv", "engine", "context", ["wait"], ["cause"]}
    {"decision": ID, "at", "kind", "task", "engine", "why", "predicted", "inputs"}
    {"outcome": ID, "at", "actual"}
    {"turn": TASK, "at", "engine", "prompt", "cached", "new", "reprefilled", "sampled", "cause"}
    {"note": TEXT, "at", ...}
    {"resumed": N, "at", "kept_until"}

`at` is in seconds since the rollout began; after a `resumed` line the clock starts again. docs/scheduling.md
says what each field means.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiderl.errors import TideError
from tiderl.telemetry.metrics import plain

FILE = "decisions.jsonl"

FLUSH_S = 1.0
"""Rows are on disk at most this long after they were told."""

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode


@dataclass(frozen=True, slots=True)
class Move:
    """A task changed its state, or (`before` equal to `after`) its KV, its engine or what it waits for."""

    at: float
    task: str
    before: str
    """Empty: the task is new."""
    after: str
    kv: str = ""
    engine: str = ""
    context: int = 0
    wait: str = ""
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Made:
    """A decision: admit, resume, release (or another kind), and what was known when it was made."""

    at: float
    id: int
    kind: str
    task: str
    engine: str = ""
    why: str = ""
    predicted: float | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a decision's prediction came to."""

    at: float
    decision: int
    actual: float | str | None


@dataclass(frozen=True, slots=True)
class Turn:
    """The engine ended a turn; all counts are tokens, counted by the engine."""

    at: float
    task: str
    engine: str = ""
    prompt: int = 0
    cached: int = 0
    new: int = 0
    reprefilled: int = 0
    sampled: int = 0
    cause: str = ""
    """Why tokens were computed again; empty when none were."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something that concerns no single task: an engine joined or died, weights were published."""

    at: float
    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Resumed:
    """The run was stopped and went on; `at` of the rows below counts from here."""

    number: int
    at: float = 0.0
    kept_until: float | None = None


Row = Move | Made | Outcome | Turn | Note | Resumed


class DecisionLog:
    """Appends to a decision log. Calls are cheap: rows are buffered and written by a thread of its own.

    What is told after `close` (tasks that end while a rollout is torn down) is written at once, row by row.

    Args:
        path: the file; its folder must exist.
        keep_until: None starts a new log, which replaces a file that is there. A number resumes one: rows of
            its last part that are later than this are dropped (`math.inf` keeps them all).

    Raises:
        OSError: from any call, when the file could not be written; the first such error is raised again.
    """

    def __init__(self, path: str | os.PathLike[str], *, keep_until: float | None = None) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._buffer: list[str] = []
        self._last: dict[str, tuple[Any, ...]] = {}
        self._next = 0
        self._error: OSError | None = None
        self._closed = threading.Event()
        resumed = self._reopen(keep_until) if keep_until is not None and self.path.exists() else None
        self._file = self.path.open("w" if resumed is None else "a", encoding="utf-8")
        if resumed is not None:
            kept = keep_until if keep_until is not None and math.isfinite(keep_until) else None
            self._append({"resumed": resumed, "at": 0.0, "kept_until": kept})
        self._thread = threading.Thread(target=self._run, name="decisions", daemon=True)
        self._thread.start()

    def __enter__(self) -> DecisionLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def transition(
        self,
        at: float,
        task: str,
        before: str,
        after: str,
        *,
        kv: str,
        engine: str,
        context: int,
        cause: str = "",
        wait: str = "",
    ) -> None:
        """A task moved. Told again without any difference, it leaves no second row."""
        told = (after, kv, engine, context, wait)
        if before == after and not cause and self._last.get(task) == told:
            return
        row = {"move": task, "at": round(at, 4), "before": before, "after": after, "kv": kv}
        row |= {"engine": engine, "context": context}
        if wait:
            row["wait"] = wait
        if cause:
            row["cause"] = cause
        if after in ("done", "failed", "cancelled"):
            self._last.pop(task, None)
        else:
            self._last[task] = told
        self._append(row)

    def decision(
        self,
        at: float,
        kind: str,
        task: str,
        *,
        engine: str = "",
        why: str = "",
        predicted: float | None = None,
        inputs: Mapping[str, float | int | str] | None = None,
    ) -> int:
        """A decision is about to be carried out; returns its id, for `outcome`."""
        number, self._next = self._next, self._next + 1
        row = {"decision": number, "at": round(at, 4), "kind": kind, "task": task, "engine": engine}
        self._append(row | {"why": why, "predicted": predicted, "inputs": dict(inputs or {})})
        return number

    def outcome(self, decision: int, at: float, actual: float | str) -> None:
        """What the prediction of `decision` came to."""
        self._append({"outcome": decision, "at": round(at, 4), "actual": actual})

    def turn(
        self,
        at: float,
        task: str,
        *,
        engine: str,
        prompt_tokens: int,
        cached_tokens: int,
        new_tokens: int,
        reprefilled: int,
        sampled: int,
        cause: str = "",
    ) -> None:
        """The engine ended a turn of `task`."""
        row = {"turn": task, "at": round(at, 4), "engine": engine, "prompt": prompt_tokens}
        row |= {"cached": cached_tokens, "new": new_tokens, "reprefilled": reprefilled, "sampled": sampled}
        self._append(row | {"cause": cause})

    def note(self, at: float, text: str, **fields: Any) -> None:
        """Something that concerns no single task."""
        self._append({"note": text, "at": round(at, 4)} | fields)

    def flush(self) -> None:
        """Write what is buffered."""
        with self._lock:
            rows, self._buffer = self._buffer, []
            if rows and not self._closed.is_set():
                self._file.write("".join(rows))
                self._file.flush()

    def close(self) -> None:
        """Write what is buffered and close the file. May be called twice."""
        if self._closed.is_set():
            return
        self._raise()
        self.flush()
        with self._lock:
            self._closed.set()
            self._file.close()
        self._thread.join(5)

    def _append(self, row: dict[str, Any]) -> None:
        self._raise()
        try:
            line = _encode(row) + "\n"
        except (ValueError, TypeError):  # a number that is not finite, or a numpy scalar
            line = json.dumps(plain(row), separators=(",", ":"), ensure_ascii=False, default=str) + "\n"
        with self._lock:
            if not self._closed.is_set():
                self._buffer.append(line)
                return
            try:
                target = os.open(self.path, os.O_WRONLY | os.O_APPEND)
            except FileNotFoundError:
                return  # the run's folder is gone
            with os.fdopen(target, "w", encoding="utf-8") as file:
                file.write(line)

    def _run(self) -> None:
        while not self._closed.wait(FLUSH_S):
            try:
                self.flush()
            except OSError as error:
                self._error = error
                return

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _reopen(self, keep_until: float) -> int:
        """Drop a torn last line and rows later than `keep_until`; returns how often this run was resumed."""
        parts = 0
        last_part = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file):
                if line.startswith(b'{"resumed"'):
                    parts, last_part = parts + 1, number
        temporary = self.path.with_suffix(".tmp")
        with self.path.open("rb") as source, temporary.open("wb") as target:
            for number, line in enumerate(source):
                row = _json(line)
                if row is None:
                    continue
                if "decision" in row:
                    self._next = max(self._next, int(row["decision"]) + 1)
                if number < last_part or float(row.get("at", 0.0)) <= keep_until:
                    target.write(line)
        os.replace(temporary, self.path)
        return parts + 1


def read_decisions(path: str | os.PathLike[str]) -> list[Row]:
    """All rows of a decision log, in their order; a torn last line (of a live or killed run) is left out.

    Raises:
        TideError: there is no such file, or it is not a decision log.
    """
    return list(iterate_decisions(path))


def iterate_decisions(path: str | os.PathLike[str]) -> Iterator[Row]:
    """The rows one by one; see `read_decisions`."""
    path = Path(path)
    try:
        file = path.open("rb")
    except FileNotFoundError as error:
        raise TideError(
            f"there is no decision log '{path}'", fix="give the folder of a run, such as runs/quickstart"
        ) from error
    with file:
        for number, line in enumerate(file, 1):
            data = _json(line)
            row = None if data is None else _row(data)
            if row is not None:
                yield row
            elif line.endswith(b"\n"):
                raise TideError(
                    f"line {number} of '{path}' is not a row of a decision log",
                    fix=f"give a file that a run wrote, named {FILE}",
                )


def _json(line: bytes) -> dict[str, Any] | None:
    """A whole line as a dictionary; None when it is torn or something else."""
    if not line.endswith(b"\n"):
        return None
    try:
        data = json.loads(line)
    except ValueError:
        return None
    return data if isinstance(data, dict) else None


def _row(data: dict[str, Any]) -> Row | None:
    at = float(data.get("at", 0.0))
    match next(iter(data), ""):
        case "move":
            return Move(
                at,
                data["move"],
                data.get("before", ""),
                data.get("after", ""),
                data.get("kv", ""),
                data.get("engine", ""),
                data.get("context", 0),
                data.get("wait", ""),
                data.get("cause", ""),
            )
        case "decision":
            return Made(
                at,
                data["decision"],
                data.get("kind", ""),
                data.get("task", ""),
                data.get("engine", ""),
                data.get("why", ""),
                data.get("predicted"),
                data.get("inputs") or {},
            )
        case "outcome":
            return Outcome(at, data["outcome"], data.get("actual"))
        case "turn":
            counts = {k: data.get(k, 0) for k in ("prompt", "cached", "new", "reprefilled", "sampled")}
            return Turn(at, data["turn"], data.get("engine", ""), **counts, cause=data.get("cause", ""))
        case "note":
            return Note(at, data["note"], {k: v for k, v in data.items() if k not in ("note", "at")})
        case "resumed":
            return Resumed(data["resumed"], at, data.get("kept_until"))
    return None
