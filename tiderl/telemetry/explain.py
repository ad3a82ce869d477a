"""One task of a rollout, told in words from the decision log.

Invariant: every sentence follows from rows of the log; times are relative to when the task was queued; what
was predicted stands beside what came.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tiderl.telemetry.attempts import (
    PARTS,
    Attempt,
    RolloutStory,
    TaskSummary,
    came_too_soon,
    summary_of,
    waiting_shares,
)
from tiderl.telemetry.decisions import Made, Move, Note, Turn

AGAIN = {
    "evicted": "its KV had been let go and was evicted from the prefix cache",
    "moved": "it went to another engine",
    "weights": "the weights had changed",
    "mispredicted": "its KV had been let go and it came back sooner than predicted",
    "engine_died": "its engine had died",
}
"""Why tokens are computed again, in words."""

_LOST = {
    "engine_died": "its engine died and its KV with it",
    "weights": "new weights came: its KV will be computed again",
    "moved": "its KV was given up: it goes on on another engine",
    "refused": "the engine had no room after all",
}
_MUCH = 3.0
"""Times the usual: a wait this long was much longer."""


@dataclass(frozen=True)
class Line:
    """One sentence. `at` is on the run's clock, `after` since the task was queued, both in seconds."""

    at: float
    after: float
    text: str


@dataclass(frozen=True)
class Story:
    """One attempt at a task."""

    task: str
    attempt: int
    lines: tuple[Line, ...]
    summary: TaskSummary

    def to_json(self) -> dict[str, Any]:
        """As `tiderl rollout explain --json` prints it."""
        lines = [{"at": line.at, "after_s": line.after, "text": line.text} for line in self.lines]
        return {
            "task": self.task,
            "attempt": self.attempt,
            "lines": lines,
            "summary": self.summary.to_json(),
        }


def explain(log: RolloutStory, task: str) -> list[Story]:
    """The stories of a task, one an attempt. `task` is a name or an unambiguous part of one.

    Raises:
        TideError: see `RolloutStory.find`.
    """
    found = log.attempts[log.find(task)]
    stories = []
    for attempt in found:
        lines = _Narrator(log, attempt).tell()
        stories.append(Story(attempt.task, attempt.number, lines, summary_of(attempt, len(found))))
    return stories


class _Narrator:
    """Walks over the rows of one attempt."""

    def __init__(self, log: RolloutStory, attempt: Attempt) -> None:
        self.log, self.attempt = log, attempt
        self.lines: list[Line] = []
        self.began = next((row.at for _, row in attempt.rows if isinstance(row, Move)), 0.0)
        self.at = self.since = self.began
        self.place = 0
        self.state = self.kv = self.engine = self.wait = ""
        self.context = self.turn = self.new = 0
        self.made: dict[str, Made] = {}
        self.ended: Turn | None = None

    def tell(self) -> tuple[Line, ...]:
        """All sentences."""
        for place, row in self.attempt.rows:
            self.place, self.at = place, row.at
            if isinstance(row, Made):
                self.made[row.kind] = row
                self.new = int(row.inputs.get("new", self.new) or 0)
            elif isinstance(row, Turn):
                self.ended = row
            elif isinstance(row, Note) and (self.turn or not row.text.startswith("weights")):
                self.say(f"meanwhile ({PARTS.get(self.state, self.state)}): {row.text}{_fields(row.fields)}")
            elif isinstance(row, Move):
                self._move(row)
        self.at = self.attempt.until
        if self.attempt.cut:
            self.say(f"the run was stopped while it was {self.state}")
        elif self.state in PARTS:
            self.say(f"{self.state} since {duration(self.at - self.since)}, when the log ends")
        self.say(_in_all(summary_of(self.attempt)))
        return tuple(self.lines)

    def say(self, text: str) -> None:
        """One more sentence, now."""
        self.lines.append(Line(self.at, round(self.at - self.began, 4), text))

    def _move(self, row: Move) -> None:
        if row.before == row.after:
            if row.kv != self.kv or (row.cause and row.cause != "released"):
                self._changed(row)
        else:
            tell: dict[str, Callable[[Move], None]] = {
                "queued": lambda _: self.say("queued"),
                "admitted": self._admitted,
                "ready": self._ready,
                "running": self._running,
                "paused": self._paused,
            }
            tell.get(row.after, self._end)(row)
            self.state, self.since = row.after, row.at
        self.kv, self.context = row.kv, row.context
        self.engine = row.engine or self.engine
        self.wait = row.wait if row.before != row.after else row.wait or self.wait

    def _admitted(self, row: Move) -> None:
        made = self.made.pop("admit", None)
        engine = f" to {row.engine}" if row.engine else ""
        self.say(f"admitted{engine} after {duration(row.at - self.since)} in the queue{_reason(made)}")

    def _ready(self, row: Move) -> None:
        took = duration(row.at - self.since)
        if row.before == "admitted":
            self.say(f"its environment was reset after {took}")
        elif row.before == "running":
            why = _LOST.get(row.cause, row.cause or "the turn was cut short")
            self.say(f"after {took} {why}; the turn is sent again")
        else:
            self.say(f"the environment answered{self._tool()} after {took}{self._expected(row)}")
            if (verdict := self._verdict(row)) is not None:
                self.say(verdict)

    def _running(self, row: Move) -> None:
        made = self.made.pop("resume", None)
        moved = self.engine and row.engine != self.engine and self.turn
        where = f"moved from {self.engine} to {row.engine}" if moved else f"on {row.engine}"
        kv = {
            "held": "its KV was held",
            "cached": "its KV had been let go, the prefix cache may still have it",
            "cold": "its KV is gone, all is computed again",
        }.get(self.kv)
        text = (
            f"turn {self.turn + 1} begins {where} after {duration(row.at - self.since)} of waiting for room"
        )
        text += f": context {row.context:,}" + (f" + {self.new:,} new tokens" if self.new else "")
        self.say(f"{text}{'; ' + kv if kv else ''}{_reason(made)}")
        self.made["sent"] = made or Made(row.at, -1, "resume", row.task)

    def _paused(self, row: Move) -> None:
        self._turn_ended(row)
        self.made.pop("release", None)
        if row.kv != "held":
            self.say(f"its KV was not held after the turn: it is {row.kv}")

    def _turn_ended(self, row: Move) -> None:
        self.turn += 1
        turn, sent = self.ended, self.made.pop("sent", None)
        text = f"turn {self.turn} ended after {duration(row.at - self.since)}"
        if turn is not None:
            text += f": {turn.new:,} new tokens read, {turn.sampled:,} sampled"
            if turn.reprefilled:
                why = AGAIN.get(turn.cause, turn.cause or "evicted")
                text += f", {turn.reprefilled:,} computed again ({why})"
            expected = sent.predicted if sent is not None else None
            if expected is not None and abs(expected - turn.reprefilled) > max(32, 0.2 * expected):
                text += f", {expected:,.0f} were predicted to be"
        self.say(f"{text}; context {row.context:,}")
        self.ended = None

    def _changed(self, row: Move) -> None:
        if row.cause == "released":
            made = self.made.get("release")
            text = f"its KV of {self.context:,} tokens was let go after {duration(row.at - self.since)}"
            if made is not None and made.predicted is not None:
                text += f", since it was not expected back before {duration(made.predicted)} more"
            self.say(text + _reason(made))
        elif row.cause in _LOST:
            self.say(_LOST[row.cause])
        elif row.kv == "cached":
            self.say("its KV was let go into the prefix cache")
        else:
            self.say(f"its KV is {row.kv} now{f' ({row.cause})' if row.cause else ''}")

    def _end(self, row: Move) -> None:
        took = duration(row.at - self.since)
        if row.before == "running" and self.ended is not None:
            self._turn_ended(row)
        elif row.before == "paused":
            self.say(f"the environment answered{self._tool()} after {took}{self._expected(row)}")
        reason = f": {row.cause}" if row.cause and row.cause != row.after else ""
        turns = "1 turn" if self.turn == 1 else f"{self.turn} turns"
        self.say(f"{row.after}{reason}, after {turns}, {duration(row.at - self.began)} after it was queued")

    # -- what was predicted, and what came

    def _tool(self) -> str:
        tool = self.wait.rpartition("/")[2]
        return f" ({tool})" if tool else ""

    def _expected(self, row: Move) -> str:
        usual = self.log.usual(self.wait, self.place)
        hold = self.made.get("hold")
        if hold is not None and hold.predicted is not None:
            return f", {duration(hold.predicted)} were predicted"
        return "" if usual is None else f"; usual until then were {duration(usual)}"

    def _verdict(self, row: Move) -> str | None:
        """Was it right to keep its KV, or to let it go?"""
        release, hold = self.made.pop("release", None), self.made.pop("hold", None)
        took = row.at - self.since
        if release is not None and release.predicted is not None:
            came, expected = duration(row.at - release.at), duration(release.predicted)
            if came_too_soon(release, row.at):
                return (
                    f"mispredicted: its KV was let go, and it came back {came} later, sooner than {expected}"
                )
            return (
                f"it was right to let its KV go: it came back {came} later, {expected} or more were predicted"
            )
        if release is not None:
            return f"its KV had been let go; it came back {duration(row.at - release.at)} later"
        if self.kv != "held":
            return None
        expected_s = hold.predicted if hold is not None else self.log.usual(self.wait, self.place)
        if expected_s is None:
            return "its KV was held meanwhile"
        if took > _MUCH * expected_s and took > 0.1:
            idle = f"{self.context * took:,.0f} token-seconds of KV lay idle"
            return (
                f"mispredicted: its KV was held, and it took much longer than {duration(expected_s)}: {idle}"
            )
        return "it was right to hold its KV"


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def _reason(made: Made | None) -> str:
    """Why a decision was made, and what was known then."""
    if made is None:
        return ""
    known = _inputs(made.inputs)
    text = f"; why: {made.why}" if made.why else ""
    return f"{text}; then {known}" if known else text


def _inputs(inputs: Mapping[str, Any]) -> str:
    rest = {k: v for k, v in inputs.items() if k not in ("context", "new", "waited")}
    parts = []
    if "promised" in rest and "capacity" in rest:
        promised, capacity = rest.pop("promised"), rest.pop("capacity")
        parts.append(f"{promised:,} of its {capacity:,} KV tokens were promised")
    words = {"running": "{} turns ran on it", "queued": "{} tasks were queued", "ready": "{} ready"}
    words["paused"] = "{} paused"
    parts += [form.format(rest.pop(name)) for name, form in words.items() if name in rest]
    return ", ".join(parts + [f"{name} was {value}" for name, value in rest.items()])


def _fields(fields: Mapping[str, Any]) -> str:
    return f" ({', '.join(f'{k} {v}' for k, v in fields.items())})" if fields else ""


def _in_all(summary: TaskSummary) -> str:
    shares = ", ".join(
        f"{share:.0%} {part}" for part, share in waiting_shares(summary).items() if share >= 0.005
    )
    text = f"in all {duration(summary.seconds)}" + (f": {shares}" if shares else "")
    causes = ", ".join(f"{cause} {n:,}" for cause, n in summary.reprefilled_by_cause.items())
    return text + (f"; {summary.reprefilled:,} tokens computed again ({causes})" if causes else "")
