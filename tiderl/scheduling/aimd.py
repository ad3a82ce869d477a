"""`aimd`: prime-rl's concurrency controller over `async`.

Source: PrimeIntellect-ai/prime-rl, src/prime_rl/orchestrator/concurrency.py (`ConcurrencyController`, commit
559b447, August 2026), with its constants. The cap on tasks in flight grows by `TURNOVER_GROWTH` a turnover of
the pipeline while engines are clear and the cap binds; above `KV_SOFT` it is trimmed to what engines hold at
`KV_TARGET`, and it is cut after preemptions or by a queue that persists. Two things differ: a poll is
`POLL_S`, as our episodes take seconds, not minutes; and no work in flight is cancelled: the pool drains.

Invariant: the cap is never below `min_inflight` nor above the run's concurrency.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tiderl.scheduling.asynchronous import turns
from tiderl.scheduling.common import Settings, admit, option, startable
from tiderl.scheduling.room import Draft
from tiderl.scheduling.views import Snapshot

TURNOVER_GROWTH, BINDING = 1.25, 0.9
KV_GROW, KV_SOFT, KV_TARGET, TRIM_COOLDOWN = 0.6, 0.8, 0.7, 6
QUEUE_RATIO, QUEUE_PERSISTENCE, QUEUE_CUT = 0.5, 6, 0.9
PREEMPTION_CUT, ESCALATED_CUT, ESCALATION_GRACE = 0.8, 0.5, 6
POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Controller:
    """The controller's state; `overloaded`, `cooldown` and `grace` count polls."""

    cap: float
    polled: float
    finished: int
    preemptions: int
    can_grow: bool = False
    overloaded: int = 0
    cooldown: int = 0
    grace: int = 0
    draining: bool = False
    escalated: bool = False


@dataclass
class Aimd(Settings):
    """A cap on tasks in flight under feedback from the engines."""

    initial_inflight: int | None = option(None, 1)
    min_inflight: int = option(1, 1)

    def fill(self, draft: Draft, memory: Any) -> Controller:
        """See `Settings`."""
        snapshot = draft.snapshot
        turns(draft)
        state = self._grow(snapshot, memory or self._begin(snapshot))
        if snapshot.now - state.polled >= POLL_S:
            state = self._poll(snapshot, state)
        draft.wake_at(state.polled + POLL_S)
        admit(draft, startable(draft), "below the cap", cap=int(state.cap))
        return state

    def _begin(self, snapshot: Snapshot) -> Controller:
        """The pessimistic first cap: capacity over the longest task that is expected."""
        longest = max((t.peak + t.remaining for t in snapshot.queued[:64]), default=1)
        cap = self.initial_inflight or sum(e.capacity for e in snapshot.engines) / longest
        finished, preemptions = sum(snapshot.shipped.values()), sum(e.preemptions for e in snapshot.engines)
        return Controller(self._clamp(cap, snapshot), snapshot.now, finished, preemptions)

    def _grow(self, snapshot: Snapshot, state: Controller) -> Controller:
        """Growth by what ended since the last tick."""
        finished = sum(snapshot.shipped.values())
        ended = max(finished - state.finished, 0)
        flying, cap = snapshot.in_flight + ended, state.cap
        if ended and state.can_grow and flying >= BINDING * cap:
            cap = self._clamp(cap * TURNOVER_GROWTH ** (ended / flying), snapshot)
        return replace(state, cap=cap, finished=finished)

    def _poll(self, snapshot: Snapshot, state: Controller) -> Controller:
        """Trims and cuts."""
        engines, flying = snapshot.engines, snapshot.in_flight
        usage = max((e.promised / e.capacity for e in engines if e.capacity), default=0.0)
        preemptions = sum(e.preemptions for e in engines)
        preempted = preemptions > state.preemptions
        running, waiting = len(snapshot.running), len(snapshot.ready)
        overloaded = state.overloaded + 1 if running and waiting > QUEUE_RATIO * running else 0
        queueing = overloaded >= QUEUE_PERSISTENCE
        draining, grace, escalated = state.draining, state.grace, state.escalated
        if draining and flying <= state.cap and not preempted and not queueing:
            draining, grace = False, ESCALATION_GRACE
        if not draining and escalated:
            grace -= 1
            escalated = grace > 0
        can_grow = usage <= KV_GROW and not waiting and not preempted and not draining
        cap, cooldown = state.cap, max(0, state.cooldown - 1)
        if not draining and (preempted or queueing):
            cut = ESCALATED_CUT if escalated else QUEUE_CUT if queueing else PREEMPTION_CUT
            cap, draining, escalated, overloaded = min(cap, flying * cut), True, True, 0
        elif not draining and usage > KV_SOFT and flying and not cooldown:
            cap, cooldown = min(cap, flying * KV_TARGET / usage), TRIM_COOLDOWN
        seen = (self._clamp(cap, snapshot), snapshot.now, state.finished, preemptions)
        return Controller(*seen, can_grow, overloaded, cooldown, grace, draining, escalated)

    def _clamp(self, cap: float, snapshot: Snapshot) -> float:
        return max(min(cap, snapshot.concurrency), self.min_inflight)
