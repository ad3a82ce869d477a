"""`async`: the strongest plain asynchronous rollout: as many tasks in flight as the run allows.

Invariant: an engine is chosen once, the least loaded one (siblings together, for their shared prompt); every
paused task goes to the prefix cache at once, where it stays as long as nothing else needs the blocks; turns
are resumed first come first served as room allows. Nothing is held idle, nothing waits at a barrier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tiderl.scheduling.common import Settings, admit, option, resume, startable
from tiderl.scheduling.room import Draft, by_arrival
from tiderl.scheduling.views import KV, Task


@dataclass
class Async(Settings):
    """Sticky least-loaded, prefix cache, first come first served."""

    concurrency: int | None = option(None, 1)  # most tasks in flight; None: what the run allows

    def fill(self, draft: Draft, memory: object) -> None:
        """See `Settings`."""
        turns(draft)
        admit(draft, startable(draft), "next in the stream", cap=self.concurrency)


def turns(draft: Draft, order: Callable[[Task], Any] = by_arrival) -> None:
    """What all policies of this family do with tasks in flight."""
    for task in draft.snapshot.paused:
        if task.kv is KV.HELD:
            draft.release(task, "paused: to the prefix cache", always=True)
    resume(draft, order, draft.longest_away, "next in order", grow=False)
    for task in draft.snapshot.ready:
        if draft.holds(task):
            draft.release(task, "has to wait for room: to the prefix cache", always=True)
