"""On which engine a turn runs: where its KV is, as long as that pays.

Invariant: new turns go to accepting engines only; a task that holds KV on an engine that takes no turns moves
when it has waited for as long as computing its context again takes (at most twice the cost of foresight).
"""

from __future__ import annotations

import bisect

from tiderl.scheduling.room import Draft, Room
from tiderl.scheduling.views import Snapshot, Task

PATIENCE = 0.25  # seconds after which it moves where no prefill time is known


def sticky(draft: Draft, task: Task) -> Room | None:
    """Its own engine; the least loaded one that could take it when it has none or that takes no turns."""
    own = draft.rooms.get(task.engine)
    if own is None or not own.could_ever(task) or leaves(draft, task, own):
        return least_loaded(draft, task)
    return own


def leaves(draft: Draft, task: Task, own: Room) -> bool:
    """Whether its engine takes no turns and it is better off elsewhere."""
    if own.accepting or not draft.holds(task):
        return not own.accepting
    patience = own.again(task) or PATIENCE
    if draft.snapshot.now - task.since >= patience:
        return True
    draft.wake_at(task.since + patience)
    return False


def least_loaded(draft: Draft, task: Task) -> Room | None:
    """The accepting engine with the fewest tasks that could ever take it; more room decides ties."""
    able = [room for room in draft.open if room.could_ever(task)]
    return min(able, key=lambda r: (draft.loads[r.name], -r.free, r.name), default=None)


def sibling_engine(snapshot: Snapshot, task: Task) -> str:
    """Where another member of its group is; empty: none in flight. The prompt they share is there."""
    group = task.order[0]
    for tasks in (snapshot.running, snapshot.paused, snapshot.ready, snapshot.admitted):
        at = bisect.bisect_left(tasks, (group, -1), key=lambda t: t.order)
        if at < len(tasks) and tasks[at].order[0] == group:
            return tasks[at].engine
    return ""
