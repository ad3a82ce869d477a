"""`ttl`: Continuum: KV is kept over a tool call for a time to live.

Source: Continuum / CacheTTL (arXiv 2511.02230). At a pause the time to live is the one that brings most: the
chance of being back by then, times what a miss costs (computing the context again, and queueing for room),
less what its memory costs others meanwhile. After it the KV is let go. Tasks go first come first served by
the time they *arrived* (program level), not by the turn's.

Invariant: nothing is let go before its time unless a turn on that engine has no room otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiderl.scheduling.common import Settings, admit_fitting, resume
from tiderl.scheduling.room import Draft
from tiderl.scheduling.views import KV, Task
from tiderl.scheduling.waits import EDGES, Waits

UNKNOWN_S = 1.0  # time to live where nothing is known about a tool

Curve = list[tuple[float, float, float]]  # (tau, chance of being back by then, expected seconds held)


@dataclass
class Ttl(Settings):
    """Time to live for KV while a tool works."""

    def fill(self, draft: Draft, memory: object) -> None:
        """See `Settings`."""
        seen = draft.snapshot
        wanted = draft.left > 0 or any(task.kv is not KV.HELD for task in seen.ready)
        curves: dict[str, Curve] = {}
        for task in seen.paused if wanted else ():
            if task.kv is KV.HELD:
                if task.wait not in curves:
                    curves[task.wait] = _curve(seen.waits.get(task.wait, Waits()))
                ttl = _ttl(task, draft, curves[task.wait])
                if seen.now - task.since >= ttl:
                    draft.release(task, "its time to live is over")
                else:
                    draft.wake_at(task.since + ttl)
        resume(draft, lambda t: (t.queued, t.order), draft.longest_away, "arrived first")
        admit_fitting(draft)


def _ttl(task: Task, draft: Draft, curve: Curve) -> float:
    """Seconds to keep it: the best of the curve's edges."""
    room = draft.rooms.get(task.engine)
    if room is None or not curve:
        return UNKNOWN_S
    miss = room.again(task) + room.view.turn_s
    share = room.view.blocks(task.context) / max(room.view.capacity, 1)
    gain, ttl = max((back * miss - held * share, -tau) for tau, back, held in curve)
    return -ttl if gain > 0.0 else 0.0


def _curve(waits: Waits) -> Curve:
    """One point at every edge with observations."""
    curve, back, held, low = [], 0.0, 0.0, 0.0
    for edge, weight in zip(EDGES, waits.weights, strict=False):
        share = weight / waits.total if waits.total else 0.0
        held += (edge - low) * (1.0 - back - share / 2)
        back, low = back + share, edge
        if weight:
            curve.append((edge, back, held))
    return curve
