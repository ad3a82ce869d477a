"""Pausing the engine: for a weight update, or to start many turns in one step.

Invariant: the engine is paused exactly while somebody is inside `paused()`; always in mode `keep` with the
caches left alone, since any other kind of pause ends or corrupts sessions that hold KV.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from tiderl.errors import EngineError

Turns = int | Callable[[], int] | None
"""How many turns a hold waits for: a number, a count that may fall, or all that have begun."""


class PauseGate:
    """Counts who wants the engine paused, and turns on their way to it.

    Args:
        pause, resume: the two calls into the engine.
        alive: raises when the engine is dead.
    """

    def __init__(
        self,
        pause: Callable[[], Awaitable[None]],
        resume: Callable[[], Awaitable[None]],
        alive: Callable[[], None],
    ) -> None:
        self._pause, self._resume, self._alive = pause, resume, alive
        self._holders = 0
        self._lock = asyncio.Lock()
        self._begun = 0
        self._settled = 0

    @contextmanager
    def counting(self) -> Iterator[Callable[[], None]]:
        """Around one turn: it counts as settled once it was sent, or when it ends without that."""
        self._begun += 1
        settled = False

        def settle() -> None:
            nonlocal settled
            self._settled += not settled
            settled = True

        try:
            yield settle
        finally:
            settle()

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Nothing is scheduled inside; requests are taken and wait. May be nested and concurrent."""
        entered = False

        async def enter() -> None:
            nonlocal entered
            async with self._lock:
                if self._holders == 0:
                    await self._pause()
                self._holders += 1
                entered = True

        # Neither step is left half done: an engine paused by a cancelled holder would stop everybody.
        try:
            await to_its_end(enter())
            yield
        finally:
            if entered:
                await to_its_end(self._leave())

    @asynccontextmanager
    async def hold(self, turns: Turns, timeout: float) -> AsyncIterator[None]:
        """See `VLLMEngine.hold`."""
        self._alive()
        async with self.paused():
            begun, settled = self._begun, self._settled

            def wanted() -> int:
                return self._begun - begun if turns is None else turns() if callable(turns) else turns

            yield
            try:
                async with asyncio.timeout(timeout):
                    await asyncio.sleep(0)  # tasks made inside the block take their first step
                    while self._settled - settled < wanted():
                        self._alive()
                        await asyncio.sleep(0.0005)
            except TimeoutError as error:
                raise EngineError(
                    f"only {self._settled - settled} of {wanted()} held turns reached the engine within"
                    f" {timeout:.0f} s",
                    where="lockstep",
                ) from error

    async def _leave(self) -> None:
        async with self._lock:
            self._holders -= 1
            if self._holders == 0:
                await self._resume()


async def to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Await `work`, which has deadlines of its own; a cancellation meanwhile is raised only after its end."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from (None if task.cancelled() else task.exception())
    task.result()
