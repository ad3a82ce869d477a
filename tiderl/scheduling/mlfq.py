"""`mlfq`: Libra's multi-level feedback queue.

Source: Libra's C-MLFQ. A task's level follows from the tokens it is expected to have left, seen again after
every turn. A level that waits for `lift_s` seconds rises by one.

Invariant: a task is resumed before all READY ones of longer levels on its engine; KV is let go only for a
turn that does not fit, longest level first, and never for one of a longer level while something runs.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from tiderl.scheduling.common import Settings, admit_fitting, option, resume
from tiderl.scheduling.room import Draft, Room, by_arrival
from tiderl.scheduling.views import State, Task

EDGES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)  # upper edges of the levels, in expected remaining tokens


@dataclass
class Mlfq(Settings):
    """Levels by expected remaining tokens."""

    lift_s: float = option(5.0, 0.001)

    def fill(self, draft: Draft, memory: object) -> None:
        """See `Settings`."""

        def rank(task: Task) -> tuple[int, float, tuple[int, int]]:
            lifted = _level(task) - int((draft.snapshot.now - task.since) / self.lift_s)
            return max(lifted, 0), task.since, task.order

        def victims(room: Room) -> list[Task]:
            return sorted(draft.held(room), key=lambda t: (t.state is State.READY, -_level(t), by_arrival(t)))

        resume(draft, rank, victims, "lowest level first")
        for room in draft.open:
            head = room.blocked
            if head is not None:
                lower = [v for v in victims(room) if v.state is State.PAUSED and _level(v) >= _level(head)]
                if draft.make_room(head, room, lower, "a shorter one waits"):
                    draft.resume(head, room, "shorter than those let go")
                    room.blocked = None
        admit_fitting(draft)


def _level(task: Task) -> int:
    return bisect.bisect_left(EDGES, task.new + task.growth + task.remaining)
