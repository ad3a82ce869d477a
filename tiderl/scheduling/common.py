"""Steps that several policies share: options, resume in an order, admit in an order, never stand still.

Invariant: resumes are drafted before admissions. An engine on which nothing runs never keeps a READY task
waiting for room that others hold: they are let go, first victims first, until it fits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from tiderl.scheduling.decisions import Plan, UpdateMode
from tiderl.scheduling.placement import least_loaded, sibling_engine, sticky
from tiderl.scheduling.room import Draft, Room
from tiderl.scheduling.views import Snapshot, Task

Victims = Callable[[Room], Iterable[Task]]  # tasks that hold KV there, those to be let go first at the front
Cost = Callable[[Task], int] | None


def option(default: Any, low: float) -> Any:
    """A field that must not be below `low`."""
    return field(default=default, metadata={"low": low})


@dataclass
class Settings(ABC):
    """What every policy has. `make_policy` sets `name`."""

    name: str = field(default="", init=False)
    update_mode: UpdateMode = "keep"

    def __post_init__(self) -> None:
        if self.update_mode not in ("keep", "recompute", "wait"):
            raise ValueError(f"update_mode is {self.update_mode!r}; it is keep, recompute or wait")
        for each in fields(self):
            value, low = getattr(self, each.name), each.metadata.get("low")
            if low is not None and value is not None and not value >= low:
                raise ValueError(f"{each.name} is {value!r}; it is at least {low}")

    def start(self) -> Any:
        """Nothing is remembered."""
        return None

    def decide(self, snapshot: Snapshot, memory: Any) -> Plan:
        """See `Policy`."""
        draft = Draft(snapshot)
        return draft.plan(self.fill(draft, memory))

    @abstractmethod
    def fill(self, draft: Draft, memory: Any) -> Any:
        """Draft the decisions; returns what to remember."""


def resume(draft: Draft, order: Callable[[Task], Any], victims: Victims, why: str, grow: bool = True) -> None:
    """Resume in this order, each engine stopping at the first that does not fit there.

    With `grow`, a task that holds KV already and only grows may have others let go for it. Where nothing
    runs, the blocked head gets its room in any case.
    """
    for task in sorted(draft.snapshot.ready, key=order):
        if all(room.blocked is not None for room in draft.open):
            break
        room = sticky(draft, task)
        if room is None or not room.accepting or room.blocked is not None:
            continue
        grows = grow and draft.holds(task) and task.engine == room.name
        if draft.fits(task, room) or (grows and draft.make_room(task, room, victims(room), "it grows")):
            draft.resume(task, room, why)
        else:
            room.blocked = task
    unstick(draft, victims)


def unstick(draft: Draft, victims: Victims) -> None:
    """Where nothing runs, let the blocked head have its room."""
    for room in draft.open:
        head = room.blocked
        if head is None or room.running:
            continue
        if draft.make_room(head, room, victims(room), "nothing runs and the next turn does not fit"):
            draft.resume(head, room, "nothing runs")
            room.blocked = None


def startable(draft: Draft, end: int | None = None) -> Iterator[Task]:
    """Queued tasks of allowed groups (before `end`) that fit an empty engine, in stream order."""
    end = draft.snapshot.allowed if end is None else end
    views = [room.view for room in draft.open if room.view.slots > 0]
    largest = max((view.capacity // view.block * view.block for view in views), default=-1)
    for task in draft.snapshot.queued if draft.left > 0 else ():
        if task.order[0] >= end:
            return
        if task.peak <= largest:
            yield task


def admit(
    draft: Draft, tasks: Iterable[Task], why: str, cap: int | None = None, free: int = 0, cost: Cost = None
) -> None:
    """Admit in this order up to `cap` in flight: where a sibling is, else on the least loaded engine.

    With `cost`, while the costs sum up to `free` at most; the first one always where none is in flight.
    """
    starts: dict[int, Room] = {}
    for task in tasks:
        free -= cost(task) if cost else 0
        if draft.left <= 0 or (cap is not None and draft.flying >= cap) or (free < 0 and draft.flying):
            return
        room = starts.get(task.order[0]) or draft.rooms.get(sibling_engine(draft.snapshot, task))
        if room is None or not room.accepting or not room.could_ever(task):
            room = least_loaded(draft, task)
        if room is not None:
            starts[task.order[0]] = room
            draft.admit(task, room, why)


def admit_fitting(draft: Draft, buffer: int = 0) -> None:
    """Admit while the peaks fit, with `buffer` tokens more each, unless a turn waits for room."""
    if any(room.blocked is not None for room in draft.open):
        return

    def cost(task: Task) -> int:
        return task.peak + buffer

    free = sum(room.free for room in draft.open) - sum(map(cost, draft.snapshot.admitted))
    free -= buffer * sum(engine.sessions for engine in draft.snapshot.engines)
    admit(draft, startable(draft), "its next turn fits", free=free, cost=cost)
