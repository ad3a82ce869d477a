"""Turns that start in one engine step, so that equal seeds give equal batches and so equal bits.

Invariant: a turn that ends on its way to the engine is not waited for, and an engine that dies holds up
nobody: its turns are sent again like any others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from tiderl.errors import EngineError
from tiderl.scheduling.decisions import Resume
from tiderl.scheduling.views import State

if TYPE_CHECKING:
    from tiderl.rollout.conductor import Conductor

log = logging.getLogger(__name__)


async def resume_together(conductor: Conductor, resumes: list[Resume]) -> None:
    """Send these turns, each engine's in one step. Raises EngineError when a living engine gets too few."""
    names = sorted({decision.engine for decision in resumes})
    try:
        async with AsyncExitStack() as stack:
            for name in names:
                if (member := conductor.pool.get(name)) is not None:
                    await stack.enter_async_context(member.engine.hold(_running(conductor, name)))
            for decision in resumes:
                conductor.resume(decision)
            await asyncio.sleep(0)
    except EngineError as error:
        if not any([await conductor.fleet.is_dead(name) for name in names]):
            raise
        log.debug("an engine died while turns were on their way to it: %s", error)


def _running(conductor: Conductor, name: str) -> Callable[[], int]:
    """How many turns are on their way now: in lockstep none ran before."""
    return lambda: sum(task.engine == name for task in conductor.table.within(State.RUNNING))
