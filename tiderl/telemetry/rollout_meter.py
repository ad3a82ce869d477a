"""What a rollout did with its time and its KV, by cause.

Invariants: every count only grows, so two snapshots give the figures of what lies between them; time is
integrated from event to event on the caller's clock, and each second of a task or an engine is counted once;
KV hit rate is what the engine served from KV, over turns >= 2 of a record, in prompt tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from tiderl.scheduling.views import KV, EngineView, State, Task

CAUSES = ("evicted", "moved", "weights", "mispredicted", "engine_died")
"""Why tokens were computed again; see docs/scheduling.md."""

WAITING = ("environment", "admission", "barrier", "weights")
"""Why an engine had nothing to do."""

_PARTS = {
    State.QUEUED: "queued",
    State.ADMITTED: "reset",
    State.READY: "ready",
    State.RUNNING: "running",
    State.PAUSED: "environment",
}
_GAUGES = frozenset({"at", "tasks", "kv_fill"})


class RolloutMeter:
    """Counters of one rollout, fed by whoever moves its tasks. For one thread; each call is O(engines)."""

    def __init__(self) -> None:
        self._at = 0.0
        self._began: float | None = None
        self._occupied = ""
        self._count: Counter[State] = Counter()
        self._queued: dict[str, int] = {}  # key -> group ordinal
        self._sampled: dict[str, int] = {}  # of the tasks under way
        self._held = 0  # tokens of contexts held by tasks that do not run
        self._running: Counter[str] = Counter()
        self._views: dict[str, EngineView] = {}
        self._allowed = 1 << 62
        self._task_s = dict.fromkeys(_PARTS.values(), 0.0)
        self._waiting_s = dict.fromkeys(WAITING, 0.0)
        self._idle_s: dict[str, float] = {}
        self._engine_s = 0.0
        self._held_idle = 0.0
        self._tokens: Counter[str] = Counter()
        self._again = dict.fromkeys(CAUSES, 0)
        self._failed: Counter[str] = Counter()

    def moved(self, before: Task | None, after: Task, at: float, cause: str = "") -> None:
        """A task entered the table (`before` is None), moved, or changed its KV.

        Args:
            cause: of the end, for a task that failed.
        """
        self._advance(at)
        if before is not None and before.key in self._sampled:
            self._leave(before)
        elif before is not None and before.state in _PARTS:  # the meter came later than the task
            self._task_s[_PARTS[before.state]] += max(0.0, at - before.since)
        if after.state in _PARTS:
            self._enter(after)
        else:
            self._end(after, cause)

    def turn(
        self,
        task: Task,
        *,
        prompt_tokens: int,
        cached_tokens: int,
        new_tokens: int,
        reprefilled: int,
        cause: str = "",
        sampled: int,
    ) -> None:
        """An engine ended a turn of `task`, which still is as it was when the turn was sent."""
        tokens = self._tokens
        tokens["turns"] += 1
        tokens["prompt_tokens"] += prompt_tokens
        tokens["cached_tokens"] += cached_tokens
        tokens["new_tokens"] += new_tokens
        tokens["sampled_tokens"] += sampled
        if task.turn >= 1 and task.context > 0:  # a record that forked begins again
            tokens["kv_prompt_tokens"] += prompt_tokens
            tokens["kv_cached_tokens"] += cached_tokens
        if reprefilled > 0:
            cause = cause or "evicted"
            self._again[cause] = self._again.get(cause, 0) + reprefilled
        if task.key in self._sampled:
            self._sampled[task.key] += sampled

    def engines(self, views: Iterable[EngineView], at: float, *, allowed: int = 1 << 62) -> None:
        """One look at the engines.

        Args:
            allowed: tasks of groups from this ordinal on may not be admitted now (staleness, step barrier).
        """
        self._advance(at)
        self._allowed = allowed
        self._views = {view.name: view for view in views}

    def occupied(self, by: Literal["", "weights", "evaluation"], at: float) -> None:
        """Engines get no turns from now on: new weights, or somebody else's work; "": they do again."""
        self._advance(at)
        self._occupied = by

    def snapshot(self) -> dict[str, Any]:
        """All figures so far, up to the last event or look. Plain numbers and dicts of numbers."""
        tokens, again = self._tokens, sum(self._again.values())
        return _rates(
            {
                "at": self._at,
                "seconds": 0.0 if self._began is None else self._at - self._began,
                "turns": tokens["turns"],
                "prompt_tokens": tokens["prompt_tokens"],
                "cached_tokens": tokens["cached_tokens"],
                "new_tokens": tokens["new_tokens"],
                "sampled_tokens": tokens["sampled_tokens"],
                "kv_prompt_tokens": tokens["kv_prompt_tokens"],
                "kv_cached_tokens": tokens["kv_cached_tokens"],
                "reprefilled_tokens": again,
                "reprefilled_by_cause": dict(self._again),
                "episodes_finished": tokens["finished"],
                "episodes_cancelled": tokens["cancelled"],
                "episodes_failed": sum(self._failed.values()),
                "failed_by_reason": dict(self._failed),
                "tokens_finished": tokens["finished_tokens"],
                "task_s": dict(self._task_s),
                "held_idle_token_s": self._held_idle,
                "engine_s": self._engine_s,
                "engine_idle_s": dict(self._idle_s),
                "waiting_s": dict(self._waiting_s),
                "tasks": {str(state): self._count[state] for state in _PARTS},
                "kv_fill": {
                    view.name: round(view.promised / view.capacity, 4) if view.capacity else 0.0
                    for view in self._views.values()
                },
            }
        )

    def since(self, previous: Mapping[str, Any]) -> dict[str, Any]:
        """The figures of the time after the snapshot `previous`; gauges (`tasks`, `kv_fill`) are as now."""
        now = self.snapshot()
        return _rates({k: v if k in _GAUGES else _minus(v, previous.get(k)) for k, v in now.items()})

    # -- the integral over time

    def _advance(self, at: float) -> None:
        spent = at - self._at
        if spent <= 0:
            return
        self._at = at
        if self._began is None:
            return
        for state, count in self._count.items():
            if count:
                self._task_s[_PARTS[state]] += count * spent
        self._held_idle += self._held * spent
        if self._occupied == "evaluation":
            return
        cause = None
        for view in self._views.values():
            if not view.accepting:
                continue  # it leaves: it has no role any more
            self._engine_s += spent
            if self._running[view.name]:
                continue
            cause = cause or self._why_idle()
            self._waiting_s[cause] += spent
            if sum(self._count.values()):
                self._idle_s[view.name] = self._idle_s.get(view.name, 0.0) + spent

    def _why_idle(self) -> str:
        """Why an engine has nothing to do, by what would have given it something."""
        if self._occupied == "weights":
            return "weights"
        if self._count[State.READY] or any(group < self._allowed for group in self._queued.values()):
            return "admission"
        if self._queued or not self._count[State.PAUSED] + self._count[State.ADMITTED]:
            return "barrier"
        return "environment"

    # -- tasks

    def _enter(self, task: Task) -> None:
        if self._began is None:
            self._began = self._at
        self._sampled.setdefault(task.key, 0)
        self._count[task.state] += 1
        if task.state is State.QUEUED:
            self._queued[task.key] = task.order[0]
        elif task.state is State.RUNNING:
            self._running[task.engine] += 1
        elif task.kv is KV.HELD:
            self._held += task.context

    def _leave(self, task: Task) -> None:
        self._count[task.state] -= 1
        if task.state is State.QUEUED:
            self._queued.pop(task.key, None)
        elif task.state is State.RUNNING:
            self._running[task.engine] -= 1
        elif task.kv is KV.HELD:
            self._held -= task.context

    def _end(self, task: Task, cause: str) -> None:
        sampled = self._sampled.pop(task.key, 0)
        if task.state is State.DONE:
            self._tokens["finished"] += 1
            self._tokens["finished_tokens"] += sampled
        elif task.state is State.CANCELLED:
            self._tokens["cancelled"] += 1
        else:
            self._failed[cause or "unknown"] += 1


def main_wait(values: Mapping[str, Any]) -> tuple[str, float] | None:
    """The cause that took most of the engines' time, and its share; None where nothing was measured."""
    shares = values.get("waiting_share")
    if not isinstance(shares, Mapping) or not shares:
        return None
    cause = max(shares, key=lambda k: shares[k])
    return str(cause), float(shares[cause])


def _rates(values: dict[str, Any]) -> dict[str, Any]:
    """With what follows from the counts."""
    prompt, engine_s = values["kv_prompt_tokens"], values["engine_s"]
    waiting = values["waiting_s"]
    return values | {
        "kv_hit_rate": values["kv_cached_tokens"] / prompt if prompt else None,
        "waiting_total_s": sum(waiting.values()),
        "waiting_share": {k: v / engine_s for k, v in waiting.items()} if engine_s > 0 else {},
    }


def _minus(now: Any, before: Any) -> Any:
    if isinstance(now, Mapping):
        earlier = before if isinstance(before, Mapping) else {}
        return {k: _minus(v, earlier.get(k)) for k, v in now.items()}
    if isinstance(now, (int, float)) and isinstance(before, (int, float)):
        return now - before
    return now
