"""`smallest_first`: ThunderAgent's program scheduler.

Source: ThunderAgent-org/ThunderAgent, ThunderAgent/scheduler/router.py. Every task counts with its tokens and
`BUFFER` more. When an engine has more than it holds, the smallest acting (PAUSED) task is let go first, then
the smallest that waits. Tasks are resumed before new ones, few tokens first, on the engine that fits best if
theirs has no room; new ones start while the sum stays below the capacity.

Invariant: KV is let go only for a turn that does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiderl.scheduling.common import Settings, admit_fitting, resume
from tiderl.scheduling.room import Draft, Room
from tiderl.scheduling.views import State, Task

BUFFER = 100  # tokens a task is counted with beyond its own (`BUFFER_PER_PROGRAM`)


@dataclass
class SmallestFirst(Settings):
    """Pause the smallest acting task first, resume in ascending size."""

    def fill(self, draft: Draft, memory: object) -> None:
        """See `Settings`."""

        def victims(room: Room) -> list[Task]:
            return sorted(draft.held(room), key=lambda t: (t.state is State.READY, t.context, t.order))

        resume(draft, lambda t: (t.turn == 0, t.peak, t.order), victims, "fewest tokens first")
        for room in draft.open:  # what waits without KV may go where it fits best
            head = room.blocked
            able = [r for r in draft.open if head and r.blocked is None and draft.fits(head, r)]
            if head and able and not draft.holds(head):
                draft.resume(head, min(able, key=lambda r: (r.free, r.name)), "fits best here")
                room.blocked = None
        admit_fitting(draft, BUFFER)
