"""Engines of a rollout that join, leave and die while tasks run.

Invariant: no task is lost with an engine. One that leaves ends its turns first; under one that dies, turns
are sent again elsewhere, and what it held is cold. When none is left and none is coming, everybody is told.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from tiderl.errors import EngineError, TideError
from tiderl.scheduling.views import State

if TYPE_CHECKING:
    from tiderl.engine.vllm import VLLMEngine
    from tiderl.rollout.conductor import Conductor

log = logging.getLogger(__name__)

Spawn = Callable[[str], Awaitable[tuple[str, "VLLMEngine"]]]
"""Starts an engine in place of the named dead one: its name, and itself with the newest weights."""


class Fleet:
    """The conductor's hand on its engines. `spawn`: None: what is left must do."""

    def __init__(self, conductor: Conductor, spawn: Spawn | None) -> None:
        self._conductor, self._spawn = conductor, spawn
        self._coming: dict[str, asyncio.Task[None]] = {}

    @property
    def coming(self) -> bool:
        """An engine is being started in place of a dead one."""
        return bool(self._coming)

    async def join(self, name: str, engine: VLLMEngine) -> None:
        """A started engine with the newest weights begins to take turns. Raises EngineError."""
        await self._conductor.pool.add(name, engine)
        self._conductor.teller.note(self._conductor.now(), f"engine {name} joined")
        self._conductor.poke()

    async def leave(self, name: str) -> VLLMEngine:
        """An engine stops taking turns; its tasks go on elsewhere. Returns it, empty and running.

        Raises:
            EngineError: there is none of that name.
            TimeoutError: a turn on it did not end in time; it takes turns again.
        """
        conductor = self._conductor
        member = conductor.pool.get(name)
        if member is None:
            raise EngineError(f"there is no engine {name}", fix=f"choose one of {list(conductor.pool.names)}")
        member.accepting = False
        try:
            await conductor.settled()
            await conductor.until_none_runs(name)
            await asyncio.gather(*(conductor.drop_kv(t.key, "moved") for t in conductor.table.on(name)))
            conductor.pool.drop(name)
        except BaseException:
            member.accepting = True
            raise
        conductor.teller.note(conductor.now(), f"engine {name} left")
        conductor.poke()
        return member.engine

    def look(self) -> None:
        """Take dead engines out."""
        for member in list(self._conductor.pool):
            if (error := member.error()) is not None:
                self._died(member.name, error)

    async def is_dead(self, name: str) -> bool:
        """Whether an engine has died; if so it is out of the pool when this returns."""
        pool = self._conductor.pool
        for _ in range(20):  # the process may be noticed a moment after its turn failed
            member = pool.get(name)
            if member is None:
                return True
            if (error := member.error()) is not None:
                self._died(name, error)
                return True
            await asyncio.sleep(0.05)
        return False

    async def close(self) -> None:
        """Stop starting engines."""
        coming = list(self._coming.values())
        for task in coming:
            task.cancel()
        if coming:
            await asyncio.wait(coming, timeout=60)

    def _died(self, name: str, error: EngineError) -> None:
        conductor = self._conductor
        if conductor.pool.drop(name, dead=True) is None:
            return
        log.warning("engine %s died: %s", name, error)
        conductor.teller.note(conductor.now(), f"engine {name} died", error=str(error))
        for task in conductor.table.on(name):
            if task.state is not State.RUNNING:  # a running turn notices by itself
                conductor.lose_kv(task, "engine_died")
        if self._spawn is not None:
            self._coming[name] = asyncio.create_task(self._replace(name, self._spawn))
        elif not len(conductor.pool):
            conductor.fail(error)
        conductor.poke()

    async def _replace(self, name: str, spawn: Spawn) -> None:
        try:
            await self.join(*await spawn(name))
        except TideError as error:
            log.warning("no engine could be started in place of %s: %s", name, error)
            if not len(self._conductor.pool):
                self._conductor.fail(error)
        finally:
            self._coming.pop(name, None)
