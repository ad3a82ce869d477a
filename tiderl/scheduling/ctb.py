"""`ctb`: continuous task batching.

1. Resumes: tasks whose KV is held first, first come first served; then the others in group order. For a turn
   that does not fit, contexts are let go if that pays, least worth first, and only as many as it needs;
   nothing is let go while nothing is blocked.
2. Admission: in group order, as long as what all tasks in flight will want at their common peak stays within
   kappa times the capacity; a wait that is overdue counts with what is left of its chance to end soon.
3. Placement: where the KV is, or the siblings are, unless another engine has so much less to do, and so much
   time to spare, that computing the context again there pays.

What is let go is paid for with engine time, later: at a price, which rises from 0 to 1 as the part `spare` of
the engine's idle time is used up by computing contexts again. A context is let go if holding it saves less
than its KV earns: index x prefill time of the whole KV x price <= `worth`.

Invariant: resumes before new work; a task that waits is never passed by for ever: its own wait buys the room
at last (after `patience` times what is computed again), and where nothing runs it gets it at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any

from tiderl.scheduling.common import Settings, option, startable, unstick
from tiderl.scheduling.hold import Returns
from tiderl.scheduling.placement import leaves, sibling_engine
from tiderl.scheduling.pressure import Memory, observe
from tiderl.scheduling.projection import Projection
from tiderl.scheduling.room import Draft, Room, by_arrival
from tiderl.scheduling.views import KV, State, Task

DEAR = 3.0  # a move must save so many times what it computes again: the other engine's turns wait for that


@dataclass
class Ctb(Settings):
    """Continuous task batching."""

    spare: float = option(0.6, 0.01)
    worth: float = option(0.4, 0.0)
    patience: float = option(50.0, 1.0)

    def start(self) -> Memory:
        """Nothing was seen."""
        return Memory()

    def fill(self, draft: Draft, memory: Any) -> Memory:
        """See `Settings`."""
        tick = _Tick(self, draft, memory)
        tick.resume()
        tick.admit()
        return tick.remember()


class _Tick:
    """One decision."""

    def __init__(self, policy: Ctb, draft: Draft, memory: Memory) -> None:
        self.policy, self.draft, snapshot = policy, draft, draft.snapshot
        self.snapshot = snapshot
        self.returns = Returns(snapshot.now, snapshot.waits)
        seconds = 0.0 if memory.at is None else max(snapshot.now - memory.at, 0.0)
        old, spare = memory.engines, policy.spare
        self.pressure = {e.name: observe(old.get(e.name), e, seconds, spare) for e in snapshot.engines}
        self.ranked: dict[str, list[Task]] = {}
        self.wanted: dict[str, Projection] = {}
        self.bound: set[str] = set()
        waiting = Counter(task.engine for task in snapshot.ready)
        self.loads = {r.name: self._each(r) * (r.running + waiting[r.name]) for r in self.draft.open}

    def remember(self) -> Memory:
        """For the next tick."""
        engines = {}
        for name, room in self.draft.rooms.items():
            bound, blocked = name in self.bound, room.blocked is not None
            engines[name] = replace(self.pressure[name], running=room.running, bound=bound, blocked=blocked)
        return Memory(self.snapshot.now, engines)

    def _each(self, room: Room) -> float:
        return room.view.turn_s / max(self.pressure[room.name].batch, 1.0)

    def resume(self) -> None:
        """READY tasks, those that hold their KV first."""
        ready = self.snapshot.ready
        for task in sorted((t for t in ready if t.kv is KV.HELD), key=by_arrival):
            self._send(task, "its KV is held")
        for task in ready:
            if all(room.blocked is not None for room in self.draft.open):
                break
            if task.kv is not KV.HELD:
                self._send(task, "next in group order")
        unstick(self.draft, self.draft.longest_away)

    def _send(self, task: Task, why: str) -> None:
        room, draft, held = self._place(task), self.draft, task.kv is KV.HELD
        if room is None or (room.blocked is not None and not held):
            return
        if not (draft.fits(task, room) or self._buy(task, room)):
            room.blocked = room.blocked or task
            return
        draft.resume(task, room, why)
        if task.engine != room.name and task.engine in self.loads:  # the turn leaves one queue for another
            self.loads[task.engine] -= self._each(room)
            self.loads[room.name] += self._each(room)

    def _buy(self, task: Task, room: Room) -> bool:
        """Let contexts go for `task` if that pays, or if it has waited long enough."""
        draft, view, pressure = self.draft, room.view, self.pressure[room.name]
        price = min(max(pressure.again, pressure.owed) / max(self.policy.spare * pressure.idle, 1e-9), 1.0)
        own = draft.holds(task) and task.engine == room.name
        waited, patience = self.snapshot.now - task.since, 1.0 if own else self.policy.patience
        spent = 0.0 if own else room.again(task)

        def allows(victim: Task) -> bool:
            nonlocal spent
            spent += room.again(victim)
            whole = view.prefill_s * min(view.capacity, view.slots * max(victim.context, 1))
            if self.returns.index(victim) * whole * price <= self.policy.worth or waited >= spent * patience:
                return True
            draft.wake_at(task.since + spent * patience)
            return False

        if room.name not in self.ranked:
            paused = [t for t in draft.held(room) if t.state is State.PAUSED]
            self.ranked[room.name] = sorted(paused, key=lambda t: (self.returns.index(t), *by_arrival(t)))
        ranked, before = self.ranked[room.name], len(draft.decisions)
        done = draft.make_room(task, room, ranked, f"{task.key} waits for room", allows)
        sold = [ranked.pop(0) for _ in draft.decisions[before:]]
        self.pressure[room.name] = pressure.owing(sum(map(room.again, sold)))
        return done

    def _place(self, task: Task) -> Room | None:
        """The engine for its turn; None: none now."""
        own, holds = self.draft.rooms.get(task.engine), self.draft.holds(task)
        if own is None or not own.could_ever(task) or leaves(self.draft, task, own):
            return self._elsewhere(task, None)
        if not own.accepting:
            return None
        gap = self.loads[own.name] - min(self.loads.values())
        there = {KV.COLD: 0, KV.NONE: task.new}.get(task.kv, task.context)  # NONE: the prompt siblings share
        again = own.view.prefill_s * there
        if gap <= again or (holds and self.draft.fits(task, own)):
            return own
        other = self._elsewhere(task, own)
        if other is None or not self.draft.fits(task, other):
            return own
        gap = (self.loads[own.name] - self.loads[other.name]) * self.pressure[other.name].idle
        return other if gap > DEAR * again else own

    def _elsewhere(self, task: Task, own: Room | None) -> Room | None:
        fits, loads = self.draft.fits, self.loads
        able = [r for r in self.draft.open if r is not own and not r.blocked and r.could_ever(task)]
        return min(able, key=lambda r: (not fits(task, r), loads[r.name], -r.free, r.name), default=None)

    def admit(self) -> None:
        """New tasks in group order, siblings together; the first without room closes its engine."""
        draft, snapshot = self.draft, self.snapshot
        rooms = [room for room in draft.open if room.blocked is None]
        new = startable(draft, snapshot.allowed if rooms else 0)
        for _, members in groupby(new, key=lambda t: t.order[0]):
            group = list(members)
            self.wanted = self.wanted or self._projections(rooms)
            near = draft.rooms.get(sibling_engine(snapshot, group[0]))
            near = near if near and near.accepting else self._start(group, rooms, None)
            for task in group[: draft.left]:
                room = self._start([task], rooms, near)
                if room is None:
                    self.bound.update(r.name for r in rooms if near in (r, None))
                    rooms = [r for r in rooms if near not in (r, None)]
                    break
                near = near or room
                self.wanted[room.name].add(*self._wants(task))
                draft.admit(task, room, "what is in flight leaves room for its growth")
            if not rooms or draft.left <= 0:
                return

    def _start(self, tasks: Sequence[Task], rooms: Sequence[Room], near: Room | None) -> Room | None:
        """Where these can start: `near` their siblings unless another engine is half empty."""

        def full(room: Room) -> float:
            return self.wanted[room.name].peak() / room.view.capacity

        able = [r for r in rooms if self._within(r, tasks) and (near in (r, None) or full(r) < 0.5)]
        return min(able, key=lambda r: (r is not near, full(r), r.name), default=None)

    def _within(self, room: Room, tasks: Sequence[Task]) -> bool:
        """Whether the peak stays within the limit; one task always may where nothing is in flight."""
        projection = self.wanted[room.name]
        if not all(room.could_ever(task) for task in tasks):
            return False
        if projection.tasks == 0.0 and len(tasks) == 1:
            return True
        kappa = self.pressure[room.name].kappa
        if projection.tasks + len(tasks) > kappa * room.view.slots:
            return False
        return projection.peak(map(self._wants, tasks)) <= kappa * room.view.capacity

    def _projections(self, rooms: Sequence[Room]) -> dict[str, Projection]:
        """What all tasks in flight want of these engines."""
        seen, weight = self.snapshot, self.returns.weight
        answer = {r.name: Projection(r.view.capacity) for r in rooms}
        limits = {r.name: self.pressure[r.name].kappa * r.view.capacity for r in rooms}
        for task in chain(seen.running, seen.ready, seen.admitted, seen.paused):
            name = task.engine or rooms[0].name  # those of a dead engine are anywhere soon
            if name in limits:
                answer[name].add(*self._wants(task), weight(task))
                if answer[name].now > limits[name]:
                    del limits[name]  # full: whatever else it has, it takes nothing new
                    if not limits:
                        break
        return answer

    def _wants(self, task: Task) -> tuple[int, int]:
        """(tokens now, tokens to come); as much again as it has when nothing like it has ended yet."""
        known = task.remaining or self.snapshot.shipped.get(task.kind)
        return task.context + task.new, task.growth + (task.remaining if known else task.peak)
