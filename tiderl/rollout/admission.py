"""Lets episodes start as the admission policy decides; the effects around `scheduling.admission`.

Invariant: what is admitted is released exactly once, also when an episode fails or is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tiderl.scheduling.admission import AdmissionPolicy, EngineLoad, WaitingEpisode


class Admission:
    """The queue of episodes that want to start on one engine."""

    def __init__(
        self, policy: AdmissionPolicy, *, capacity_tokens: int, max_sessions: int, block_size: int = 1
    ) -> None:
        self._policy = policy
        self._capacity, self._max_sessions, self._block = capacity_tokens, max_sessions, block_size
        self._waiting: dict[str, tuple[WaitingEpisode, asyncio.Future[None]]] = {}
        self._admitted: dict[str, int] = {}

    @property
    def waiting(self) -> int:
        """Episodes in the queue."""
        return len(self._waiting)

    @property
    def admitted(self) -> int:
        """Episodes that hold a place."""
        return len(self._admitted)

    @asynccontextmanager
    async def place(self, episode: WaitingEpisode) -> AsyncIterator[None]:
        """Wait for a place and hold it. The wait ends when others finish or the task is cancelled."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[episode.key] = (episode, future)
        self._decide()
        try:
            await future
            yield
        finally:
            self._waiting.pop(episode.key, None)
            self._admitted.pop(episode.key, None)
            self._decide()

    def _decide(self) -> None:
        load = EngineLoad(
            self._capacity, sum(self._admitted.values()), self._max_sessions, len(self._admitted), self._block
        )
        for key in self._policy.admit([e for e, _ in self._waiting.values()], load):
            episode, future = self._waiting.pop(key)
            if not future.done():
                need = -(-episode.reserve_tokens // self._block) * self._block
                self._admitted[key] = need
                future.set_result(None)
