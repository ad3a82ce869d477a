"""What engines still have room for while a plan is drafted.

Invariant: the promises follow the rules of `Policy`: held on its own engine, a resume adds `blocks(peak) -
blocks(context)`; elsewhere, or not held, it takes `blocks(peak)` and a slot.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from tiderl.scheduling.decisions import Admit, Decision, Plan, Release, Resume
from tiderl.scheduling.views import KV, EngineView, Snapshot, State, Task
from tiderl.scheduling.waits import EDGES

Allows = Callable[[Task], bool] | None


def by_arrival(task: Task) -> tuple[float, tuple[int, int]]:
    """First come, first served."""
    return task.since, task.order


class Room:
    """One engine: tokens, slots and running turns, as the draft so far leaves them."""

    def __init__(self, view: EngineView) -> None:
        self.view, self.name, self.accepting = view, view.name, view.accepting
        self.free = view.capacity - view.promised
        self.slots = view.slots - view.sessions
        self.running = view.running
        self.blocked: Task | None = None  # first READY task that waits for room here

    def could_ever(self, task: Task) -> bool:
        """Whether its next turn fits when the engine is empty."""
        return self.view.slots > 0 and self.view.blocks(task.peak) <= self.view.capacity

    def again(self, task: Task) -> float:
        """Seconds to compute its context again; 0.0 while nothing was measured."""
        return self.view.prefill_s * task.context


class Draft:
    """A plan in the making."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot, self.flying = snapshot, snapshot.in_flight
        self.rooms = {view.name: Room(view) for view in snapshot.engines}
        self.open = [room for room in self.rooms.values() if room.accepting]
        self.decisions: list[Decision] = []
        self.wake: float | None = None
        self._moved: set[str] = set()  # released or resumed
        self._held: dict[str, list[Task]] | None = None
        self._left: dict[tuple[str, int], float] = {}
        self._loads: Counter[str] | None = None

    @property
    def loads(self) -> Counter[str]:
        """Tasks in flight by engine."""
        if self._loads is None:
            self._loads, seen = Counter(), self.snapshot
            flying = chain(seen.admitted, seen.ready, seen.running, seen.paused)
            self._loads.update([task.engine for task in flying])
            self._loads.update([each.engine for each in self.decisions if isinstance(each, Admit)])
        return self._loads

    @property
    def left(self) -> int:
        """Tasks that may still be admitted."""
        return self.snapshot.concurrency - self.flying

    def holds(self, task: Task) -> bool:
        """Whether it holds KV and waits."""
        return task.kv is KV.HELD and task.key not in self._moved

    def held(self, room: Room) -> list[Task]:
        """Tasks that hold KV there and can be let go."""
        if self._held is None:
            self._held = {name: [] for name in self.rooms}
            for task in (*self.snapshot.paused, *self.snapshot.ready):
                if task.kv is KV.HELD:
                    self._held.setdefault(task.engine, []).append(task)
        return [task for task in self._held[room.name] if task.key not in self._moved]

    def longest_away(self, room: Room) -> list[Task]:
        """Those of `held`: PAUSED ones, longest away first, then READY ones, newest in the stream first."""
        held = self.held(room)
        away = sorted((t for t in held if t.state is State.PAUSED), key=by_arrival)
        return away + [t for t in reversed(held) if t.state is State.READY]

    def need(self, task: Task, room: Room) -> tuple[int, int]:
        """(tokens, slots) that resuming `task` there takes."""
        tokens = room.view.blocks(task.peak)
        if task.engine == room.name and self.holds(task):
            return tokens - room.view.blocks(task.context), 0
        return tokens, 1

    def fits(self, task: Task, room: Room) -> bool:
        """Whether `task` can be resumed there now."""
        tokens, slots = self.need(task, room)
        return room.accepting and tokens <= room.free and slots <= room.slots

    def resume(self, task: Task, room: Room, why: str) -> None:
        """READY -> RUNNING; the caller has asked `fits`. Held elsewhere, it is let go there first."""
        here = task.engine == room.name
        again = 0.0 if here and (self.holds(task) or task.kv is KV.CACHED) else float(task.context)
        if self.holds(task) and not here:
            self.release(task, f"moves to {room.name}")
        tokens, slots = self.need(task, room)
        room.free -= tokens
        room.slots -= slots
        room.running += 1
        self._moved.add(task.key)
        self.decisions.append(Resume(task.key, room.name, why, again))

    def release(self, task: Task, why: str, *, always: bool = False) -> None:
        """HELD -> CACHED of a PAUSED or READY task; `always`: nothing was predicted."""
        room = self.rooms.get(task.engine)
        if room is not None:
            room.free += room.view.blocks(task.context)
            room.slots += 1
        self._moved.add(task.key)
        self.decisions.append(Release(task.key, why, None if always else self._back_in(task)))

    def admit(self, task: Task, room: Room, why: str) -> None:
        """QUEUED -> ADMITTED."""
        self.flying += 1
        if self._loads is not None:
            self._loads[room.name] += 1
        self.decisions.append(Admit(task.key, room.name, why))

    def make_room(
        self, task: Task, room: Room, victims: Iterable[Task], why: str, allows: Allows = None
    ) -> bool:
        """Let go as many `victims` as `task` needs, first ones first; none if those allowed are too few."""
        if not room.accepting or not room.could_ever(task):
            return False
        tokens, slots = self.need(task, room)
        tokens, slots, chosen = tokens - room.free, slots - room.slots, list[Task]()
        for victim in victims:
            if tokens <= 0 and slots <= 0:
                break
            if victim.key == task.key or victim.key in self._moved:
                continue
            if allows is not None and not allows(victim):
                return False
            chosen.append(victim)
            tokens -= room.view.blocks(victim.context)
            slots -= 1
        if tokens > 0 or slots > 0:
            return False
        for victim in chosen:
            self.release(victim, why)
        return True

    def wake_at(self, when: float) -> None:
        """Ask again at `when` at the latest."""
        self.wake = when if self.wake is None else min(when, self.wake)

    def plan(self, memory: Any = None) -> Plan:
        """The finished plan."""
        return Plan(tuple(self.decisions), memory, self.wake)

    def _back_in(self, task: Task) -> float | None:
        """Seconds until its environment answers, for all that is known."""
        if task.state is not State.PAUSED:
            return 0.0
        waits, elapsed = self.snapshot.waits.get(task.wait), self.snapshot.now - task.since
        key = task.wait, bisect.bisect_left(EDGES, elapsed)
        if waits is not None and key not in self._left:
            self._left[key] = waits.left(elapsed)
        return self._left.get(key)
