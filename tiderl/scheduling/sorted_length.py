"""`sorted`: SortedRL's order: what is expected to end first goes first.

Tasks start and resume by expected length, so that updates are made of the short ones as soon as they are
there; otherwise as `async`. Off-policyness is bounded by the pace of the stream (`Snapshot.allowed`), which
also brings the long ones to their turn. Its bias towards short answers is why lengths are reported.

Invariant: among the first `window` startable tasks of the stream, none starts before a shorter one.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import islice

from tiderl.scheduling.asynchronous import turns
from tiderl.scheduling.common import Settings, admit, option, startable
from tiderl.scheduling.room import Draft
from tiderl.scheduling.views import Task


@dataclass
class SortedLength(Settings):
    """Shortest expected first."""

    window: int = option(512, 1)  # how far into the stream it looks, in tasks

    def fill(self, draft: Draft, memory: object) -> None:
        """See `Settings`."""
        turns(draft, _to_come)
        seen = islice(startable(draft), self.window)
        admit(draft, heapq.nsmallest(draft.left, seen, key=_to_come), "expected to be short")


def _to_come(task: Task) -> tuple[int, float, tuple[int, int]]:
    return task.new + task.growth + task.remaining, task.since, task.order
