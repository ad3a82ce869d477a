"""The task table: where every task of a rollout is, written by one writer only (the conductor).

Invariant: a task moves along `WAYS` and no other way, its KV sub-state fits its state, and whoever listens is
told of each move, in order. What the table says an engine has promised is what its sessions lease.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tiderl.scheduling.views import KV, EngineView, State, Task

Listener = Callable[[Task | None, Task, float, str], None]
"""(before, after, when, cause); before is None for a new task."""

_ENDS = frozenset({State.DONE, State.FAILED, State.CANCELLED})

WAYS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.ADMITTED}) | _ENDS,
    State.ADMITTED: frozenset({State.READY}) | _ENDS,
    State.READY: frozenset({State.RUNNING}) | _ENDS,
    State.RUNNING: frozenset({State.PAUSED, State.READY}) | _ENDS,
    State.PAUSED: frozenset({State.READY}) | _ENDS,
    State.DONE: frozenset(),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
}
"""RUNNING -> READY: its engine died under it, and the turn is sent again elsewhere."""

_KV: dict[State, frozenset[KV]] = {
    State.QUEUED: frozenset({KV.NONE}),
    State.ADMITTED: frozenset({KV.NONE}),
    State.READY: frozenset(KV),
    State.RUNNING: frozenset({KV.HELD}),
    State.PAUSED: frozenset({KV.HELD, KV.CACHED, KV.COLD}),
}

_KV_WAYS: dict[KV, frozenset[KV]] = {
    KV.NONE: frozenset({KV.NONE, KV.HELD}),
    KV.HELD: frozenset(KV),  # NONE: the engine died during the first turn, or the record forked
    KV.CACHED: frozenset({KV.CACHED, KV.HELD, KV.COLD, KV.NONE}),
    KV.COLD: frozenset({KV.COLD, KV.HELD, KV.NONE}),
}


class IllegalMove(RuntimeError):
    """A task was to go where no way leads; an error of ours, never of the user."""


class TaskTable:
    """Tasks by key. Ended tasks leave it."""

    def __init__(self, listener: Listener | None = None) -> None:
        self._tasks: dict[str, Task] = {}
        self._by_state: dict[State, dict[str, Task]] = {state: {} for state in State}
        self._listener = listener

    def __getitem__(self, key: str) -> Task:
        return self._tasks[key]

    def __contains__(self, key: str) -> bool:
        return key in self._tasks

    def __len__(self) -> int:
        return len(self._tasks)

    def get(self, key: str) -> Task | None:
        """A task that has not ended; None when there is none of that key."""
        return self._tasks.get(key)

    def add(self, task: Task) -> None:
        """A new task, QUEUED.

        Raises:
            IllegalMove: its key is taken, or it is in another state.
        """
        if task.key in self._tasks:
            raise IllegalMove(f"task {task.key} is in the table already")
        if task.state is not State.QUEUED or task.kv is not KV.NONE:
            raise IllegalMove(f"task {task.key} would enter the table {task.state}, not queued")
        self._put(task)
        self._tell(None, task, task.queued, "")

    def move(self, key: str, state: State, at: float, cause: str = "", **changes: Any) -> Task:
        """Change a task's state (and other fields with it); returns the task as it is now.

        Raises:
            IllegalMove: no way leads there; nothing has changed.
        """
        before = self._get(key)
        if state not in WAYS[before.state]:
            raise IllegalMove(f"task {key} cannot go from {before.state} to {state}")
        after = replace(before, state=state, since=at, **changes)
        self._check(before, after)
        del self._by_state[before.state][key]
        if state.final:
            del self._tasks[key]
        else:
            self._put(after)
        self._tell(before, after, at, cause)
        return after

    def change(self, key: str, at: float, cause: str = "", **changes: Any) -> Task:
        """Change fields of a task that stays in its state (its KV, where it is, what it waits for).

        Raises:
            IllegalMove: its KV cannot become that.
        """
        before = self._get(key)
        after = replace(before, **changes)
        self._check(before, after)
        self._put(after)
        self._tell(before, after, at, cause)
        return after

    def within(self, *states: State) -> tuple[Task, ...]:
        """Tasks in these states, in the order of the task stream."""
        found: list[Task] = []
        for state in states:
            found.extend(self._by_state[state].values())
        return tuple(sorted(found, key=_order))

    def count(self, *states: State) -> int:
        """How many tasks are in these states."""
        return sum(len(self._by_state[state]) for state in states)

    def on(self, engine: str) -> list[Task]:
        """Tasks that run on an engine or have KV there."""
        return [
            task
            for task in self._tasks.values()
            if task.engine == engine and (task.state is State.RUNNING or task.kv in (KV.HELD, KV.CACHED))
        ]

    def promised(self, view: EngineView) -> tuple[int, int, int]:
        """(tokens in whole blocks, sessions, running turns) that an engine has promised."""
        tokens = sessions = running = 0
        for task in self._by_state[State.RUNNING].values():
            if task.engine == view.name:
                tokens += view.blocks(task.peak)
                sessions += 1
                running += 1
        for state in (State.READY, State.PAUSED):
            for task in self._by_state[state].values():
                if task.engine == view.name and task.kv is KV.HELD:
                    tokens += view.blocks(task.context)
                    sessions += 1
        return tokens, sessions, running

    def tasks(self) -> list[Task]:
        """Every task that has not ended."""
        return list(self._tasks.values())

    def dump(self, now: float, limit: int = 40) -> str:
        """The table in words, for an error about a rollout that stands still."""
        lines = [
            f"{t.key}: {t.state} for {now - t.since:.1f} s, turn {t.turn}, KV {t.kv}"
            f"{' on ' + t.engine if t.engine else ''}, context {t.context} + {t.new} + {t.growth}"
            for t in sorted(self._tasks.values(), key=_order)
        ]
        rest = f"\n... and {len(lines) - limit} more" if len(lines) > limit else ""
        return "\n".join(lines[:limit]) + rest

    def _get(self, key: str) -> Task:
        task = self._tasks.get(key)
        if task is None:
            raise IllegalMove(f"task {key} is not in the table")
        return task

    def _put(self, task: Task) -> None:
        self._tasks[task.key] = self._by_state[task.state][task.key] = task

    def _tell(self, before: Task | None, after: Task, at: float, cause: str) -> None:
        if self._listener is not None:
            self._listener(before, after, at, cause)

    @staticmethod
    def _check(before: Task, after: Task) -> None:
        if after.state.final:
            return
        if after.kv not in _KV_WAYS[before.kv]:
            raise IllegalMove(f"the KV of task {after.key} cannot go from {before.kv} to {after.kv}")
        if after.kv not in _KV[after.state]:
            raise IllegalMove(f"task {after.key} cannot be {after.state} with KV {after.kv}")
        if after.kv is KV.HELD and not after.engine:
            raise IllegalMove(f"task {after.key} holds KV on no engine")


def _order(task: Task) -> tuple[int, int]:
    return task.order
