"""Watches a rollout from beside: does the engine hold what we think, and does anything move at all?

Invariant: it only looks; a difference must last before it counts, since messages to an engine take time.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from tiderl.errors import EngineError, InfrastructureError
from tiderl.scheduling.views import KV, State

if TYPE_CHECKING:
    from tiderl.rollout.conductor import Conductor

log = logging.getLogger(__name__)

_LASTING_S = 3.0
"""How long our figures may differ from the engine's before that is a drift."""


class Drift(EngineError):
    """What an engine holds is not what the task table says."""


class Watch:
    """Args: see `Conductor`."""

    def __init__(self, *, strict: bool, stall_s: float) -> None:
        self.strict, self.stall_s = strict, stall_s
        self.drifts = 0
        self._last_move = 0.0
        self._last_look = 0.0
        self._since: dict[str, float] = {}

    def moved(self, at: float) -> None:
        """A task moved in the table."""
        self._last_move = at

    def drift(self, what: str) -> None:
        """Count a difference; an error when strict."""
        self.drifts += 1
        if self.strict:
            raise Drift(what, where="task table")
        if self.drifts <= 10:
            log.warning("%s", what)

    def look(self, conductor: Conductor) -> None:
        """One look at everything; cheap, and at most ten times a second.

        Raises:
            InfrastructureError: nothing has moved for `stall_s` seconds though something could.
            Drift: strict, and an engine's figures have differed from ours for seconds.
        """
        now = time.monotonic()
        if now - self._last_look < 0.09:
            return
        self._last_look = now
        self._compare(conductor, now)
        idle = conductor.now() - self._last_move
        stuck = conductor.table.count(State.READY, State.QUEUED) and not conductor.table.count(
            State.RUNNING, State.PAUSED, State.ADMITTED
        )
        if stuck and idle > self.stall_s and not conductor.stopped and not conductor.fleet.coming:
            raise InfrastructureError(
                f"nothing has moved in the rollout for {idle:.0f} s; the task table:\n"
                f"{conductor.table.dump(conductor.now())}",
                where=f"policy {conductor.policy.name}",
                fix="report it with decisions.jsonl",
            )

    def _compare(self, conductor: Conductor, now: float) -> None:
        for member in conductor.pool:
            name = member.name
            audit = member.engine.audit()
            tasks = conductor.table.on(name)
            held = sum(t.kv is KV.HELD and t.state is not State.RUNNING for t in tasks)
            running = sum(t.state is State.RUNNING for t in tasks)
            differs = ""
            if audit.used_tokens > audit.promised_tokens:
                differs = f"{audit.used_tokens} tokens of KV are used, {audit.promised_tokens} were promised"
            elif audit.held_there > held + running:
                differs = (
                    f"the engine holds {audit.held_there} sessions, the table {held} (+{running} running)"
                )
            if not differs:
                self._since.pop(name, None)
            elif now - self._since.setdefault(name, now) > _LASTING_S:
                self._since[name] = now
                self.drift(f"engine {name}: {differs}")
