"""When a turn may be sent to the engine.

Invariant: an episode that entered a gate leaves it exactly once, so a lockstep gate never waits for an
episode that is gone.

`FreeGate` lets every turn through at once. `LockstepGate` waits until every episode in flight has a turn
to send, then sends them in a fixed order while the engine is held: the engine then sees the same batches
in every run, and so rounds alike, whatever the environments' timing was.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from tiderl.errors import TideError

Order = tuple[int, int]


class TurnGate(Protocol):
    """Decides when a turn is sent."""

    def inside(self, order: Order) -> AbstractAsyncContextManager[None]:
        """An episode in flight, from its admission to its end."""
        ...

    async def turn(self, order: Order) -> None:
        """Return when this episode's turn may be sent."""
        ...


class FreeGate:
    """No waiting."""

    @asynccontextmanager
    async def inside(self, order: Order) -> AsyncIterator[None]:
        """See `TurnGate.inside`."""
        yield

    async def turn(self, order: Order) -> None:
        """See `TurnGate.turn`."""


class LockstepGate:
    """Turns of all episodes in flight are sent together, in `order`.

    Args:
        hold: opens a context in which the engine takes requests but runs none.
    """

    def __init__(self, hold: Callable[[int], AbstractAsyncContextManager[None]]) -> None:
        self._hold = hold
        self._inside: set[Order] = set()
        self._ready: dict[Order, asyncio.Future[None]] = {}
        self._release: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def inside(self, order: Order) -> AsyncIterator[None]:
        """See `TurnGate.inside`."""
        self._inside.add(order)
        try:
            yield
        finally:
            self._inside.discard(order)
            self._check()

    async def turn(self, order: Order) -> None:
        """See `TurnGate.turn`."""
        self._ready[order] = asyncio.get_running_loop().create_future()
        self._check()
        try:
            await self._ready[order]
        finally:
            self._ready.pop(order, None)

    def _check(self) -> None:
        busy = self._release is not None and not self._release.done()
        if not busy and self._inside and self._inside <= set(self._ready):
            self._release = asyncio.create_task(self._send_all())

    async def _send_all(self) -> None:
        batch = [self._ready[order] for order in sorted(self._ready)]
        try:
            async with self._hold(len(batch)):
                for future in batch:
                    if not future.done():
                        future.set_result(None)
                await asyncio.sleep(0)
        except TideError as error:
            for future in batch:
                if not future.done():
                    future.set_exception(error)
