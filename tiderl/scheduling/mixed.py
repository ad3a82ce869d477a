"""`mixed`: which tasks run together decides what the trainer gets (MISA-T, in TideRL's words).

Of the groups that may start, the first of the kind that is furthest below its wanted share starts next,
counting what was shipped and what is in flight; otherwise as `async`. Without a wanted mix: in stream order.

Invariant: groups are not split; among kinds with a startable task in the first `window`, none starts while
another one's share is further below its target.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

from tiderl.scheduling.asynchronous import turns
from tiderl.scheduling.common import Settings, admit, option, startable
from tiderl.scheduling.room import Draft
from tiderl.scheduling.views import Task


@dataclass
class Mixed(Settings):
    """Admission by deficit of each kind."""

    window: int = option(512, 1)  # how far into the stream it looks, in tasks

    def fill(self, draft: Draft, memory: object) -> None:
        """See `Settings`."""
        turns(draft)
        order = self._mix(draft) if draft.snapshot.target_mix else startable(draft)
        admit(draft, order, "its kind is next")

    def _mix(self, draft: Draft) -> Iterator[Task]:
        seen, target = draft.snapshot, draft.snapshot.target_mix
        counts: Counter[str] = Counter(seen.shipped)
        counts.update([t.kind for t in chain(seen.admitted, seen.ready, seen.running, seen.paused)])
        queues: dict[str, list[Task]] = {}
        for task in islice(startable(draft), self.window):
            queues.setdefault(task.kind, []).insert(0, task)
        while queues:
            one = (sum(counts.values()) + 1) / (sum(target.values()) or 1.0)
            kind = min(queues, key=lambda k: (counts[k] - target.get(k, 0.0) * one, queues[k][-1].order))
            queue, group = queues[kind], queues[kind][-1].order[0]
            while queue and queue[-1].order[0] == group:
                counts[kind] += 1
                yield queue.pop()
            if not queue:
                del queues[kind]
