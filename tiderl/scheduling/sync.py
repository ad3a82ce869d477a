"""`sync`: the step barrier of synchronous training, with nothing else against it.

Invariant: only groups of the current update start; turns go first come first served and KV is kept until its
task ends. Admission reserves what a task is expected to need in the end, so that nothing is computed twice;
where expectations fail, the KV that is longest away is let go.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiderl.scheduling.common import Settings, admit, resume, startable
from tiderl.scheduling.room import Draft, by_arrival
from tiderl.scheduling.views import Task


@dataclass
class Sync(Settings):
    """Step barrier, colocated."""

    def fill(self, draft: Draft, memory: object) -> None:
        """See `Settings`."""
        resume(draft, by_arrival, draft.longest_away, "next in order")
        seen = draft.snapshot
        flying = seen.admitted + seen.ready + seen.running + seen.paused
        free = sum(room.view.capacity for room in draft.open) - sum(map(_final, flying))
        new = startable(draft, min(seen.allowed, seen.barrier))
        admit(draft, new, "part of this update, and it fits", free=free, cost=_final)


def _final(task: Task) -> int:
    """Tokens it is expected to need in the end."""
    return task.peak + task.remaining
