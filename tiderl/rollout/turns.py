"""One task's turns, on whichever engine it is given.

Invariants: the replay payload (ids, images) is complete after every turn, so that any engine can go on from
it; a turn that an engine's death cut short has left no trace in it and is sampled again elsewhere; a
session is touched by one at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from tiderl.engine.base import Replay, Sampling, TurnOutput
from tiderl.engine.pause import to_its_end
from tiderl.env.ends import EndReason
from tiderl.errors import Busy, EngineError, PromptTooLong, TideError

if TYPE_CHECKING:
    import numpy as np

    from tiderl.engine.base import TaskSession
    from tiderl.rollout.conductor import Conductor

log = logging.getLogger(__name__)

_TRIES = 8
"""How often one turn is sent again after an engine died under it or had no room."""


class TaskHandle:
    """What an episode sees of the conductor: a source of sessions for one admitted task."""

    def __init__(self, conductor: Conductor, key: str) -> None:
        self._conductor, self.key = conductor, key

    @property
    def max_model_len(self) -> int:
        """Longest context of the engines, in tokens."""
        return self._conductor.pool.max_model_len

    def acting(self, tool: str) -> None:
        """The reply is on its way to the environment, as a call of `tool`."""
        self._conductor.acting(self.key, tool)

    def finish(self, end: EndReason, *, tokens: int = 0) -> None:
        """The episode has ended; `tokens` were sampled in it."""
        self._conductor.ended(self.key, end, tokens)

    @asynccontextmanager
    async def session(
        self, reserve_tokens: int, *, session_id: str | None = None, priority: int = 0
    ) -> AsyncIterator[TaskTurns]:
        """One record's context; see `tiderl.engine.base.Engine.session`. Room is found turn by turn."""
        limit = min(reserve_tokens, self.max_model_len)
        turns = TaskTurns(self._conductor, self.key, session_id or self.key, limit)
        self._conductor.begin(self.key, turns)
        try:
            yield turns
        finally:
            await to_its_end(turns.close())  # the task stays in the table while the engine holds its room


class TaskTurns:
    """A `KVSession` over engines that come and go."""

    def __init__(self, conductor: Conductor, key: str, name: str, limit: int) -> None:
        self._conductor, self.key, self.name, self._limit = conductor, key, name, limit
        self._ids: list[int] = []
        self._images: list[np.ndarray] = []
        self._turns = 0
        self._salt = -1
        self._length = 0
        self._session: TaskSession | None = None
        self._stack = AsyncExitStack()
        self._lock = asyncio.Lock()
        self._closed = False
        self.engine = ""
        self.fresh_next = False
        """Weights changed in `recompute`: what is cached must not be read again."""

    @property
    def length(self) -> int:
        """Tokens of context so far; an image counts with all its tokens."""
        return self._length

    async def generate(
        self, new_ids: Sequence[int], sampling: Sampling, images: Sequence[np.ndarray] = ()
    ) -> TurnOutput:
        """See `tiderl.engine.base.KVSession.generate`. Waits until the policy gives the turn an engine."""
        conductor, new = self._conductor, list(new_ids)
        if self._length + len(new) + 1 > self._limit:
            raise PromptTooLong(
                f"the context would have {self._length + len(new)} tokens and one more to sample, "
                f"the limit is {self._limit}",
                where=f"task {self.key}",
                fix="reserve more tokens, raise engine.max_model_len, or end the episode",
            )
        growth = min(sampling.max_tokens, self._limit - self._length - len(new))
        sampling = replace(sampling, max_tokens=growth)  # what is leased is what the table promises
        conductor.ready(self.key, self._length, new=len(new), images=len(images), growth=growth)
        error: TideError | None = None
        for _ in range(_TRIES):
            name = await conductor.granted(self.key)
            try:
                async with self._lock:
                    session = await self._on(name)
                    out = await session.generate(new, sampling, images)
            except Busy as busy:
                error = busy
                conductor.refused(self.key, name, str(busy))
                continue
            except EngineError as fault:
                error = fault
                if not await conductor.fleet.is_dead(name):
                    raise
                await self._forget(name)
                conductor.lost_turn(self.key, name)
                continue
            self._keep(new, images, out, session)
            if self.fresh_next:
                await self.let_go(fresh=True)
            conductor.paused(self.key, name, self._length, out)
            return out
        raise EngineError(f"a turn was sent {_TRIES} times in vain: {error}", where=f"task {self.key}")

    async def let_go(self, *, fresh: bool = False) -> None:
        """HELD -> CACHED: blocks and slot are free when this returns."""
        async with self._lock:
            if self._session is not None and not self._closed:
                await self._session.release(fresh=fresh)
        if fresh:
            self.fresh_next = False
            self._salt = -1

    async def leave(self) -> None:
        """Give up the session for good; the next turn is computed from the replay payload."""
        async with self._lock:
            await self._stack.aclose()
            self._session, self.engine = None, ""

    async def close(self) -> None:
        """Free whatever is still held. Quiet when the engine is dead."""
        async with self._lock:  # whoever lets go meanwhile must find it done, not under way
            self._closed = True
            await self._stack.aclose()
            self._session = None
        self._conductor.closed(self.key, self)

    def _keep(
        self, new: list[int], images: Sequence[np.ndarray], out: TurnOutput, session: TaskSession
    ) -> None:
        if len(images):
            self._conductor.history.saw_images(len(images), out.new_tokens - len(new))
        self._ids += new
        self._ids += out.ids
        self._images += images
        self._turns += 1
        self._length = session.length
        if self._salt < 0:
            self._salt = out.versions[0]

    async def _on(self, name: str) -> TaskSession:
        """The session on engine `name`; a new one there gets the whole context."""
        if self._session is not None and self.engine == name:
            if self.fresh_next:
                await self._session.release(fresh=True)
                self.fresh_next = False
            return self._session
        await self._stack.aclose()
        self._session = None
        replay = None
        if self._turns:
            version = self._salt
            replay = Replay(tuple(self._ids), tuple(self._images), self._turns, version)
        engine = self._conductor.pool[name].engine
        self._session = await self._stack.enter_async_context(
            engine.task_session(session_id=self.name, replay=replay)
        )
        self.engine = name
        return self._session

    async def _forget(self, name: str) -> None:
        """The engine is dead: there is nothing to give back to it."""
        try:
            async with asyncio.timeout(30):
                await self._stack.aclose()
        except EngineError as error:
            log.debug("a session of the dead engine %s ended with: %s", name, error)
        self._session, self.engine = None, ""
