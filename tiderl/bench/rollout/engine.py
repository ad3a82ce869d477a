"""The engine of a rollout benchmark: the real one, whose model stops when the observation says so.

Invariant: a turn whose observation asks for n words samples n tokens; no scheduler can know n before, since
what is leased and promised stays the most a turn may sample.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tiderl.engine.counters import Cell
from tiderl.engine.vllm import VLLMEngine

if TYPE_CHECKING:
    import numpy as np

    from tiderl.engine.base import Replay, Sampling, TaskSession, TurnOutput
    from tiderl.engine.settings import EngineSettings


class BenchEngine(VLLMEngine):
    """Args:

    lengths: token id -> reply length, of the words that ask for one; empty: every reply is the longest.
    """

    def __init__(self, settings: EngineSettings, lengths: Mapping[int, int]) -> None:
        super().__init__(settings)
        self._lengths = lengths

    @property
    def pid(self) -> int:
        """The engine's process."""
        return self._counters[Cell.PID] if self._counters is not None else 0

    @asynccontextmanager
    async def task_session(
        self, *, session_id: str, priority: int = 0, replay: Replay | None = None
    ) -> AsyncIterator[Any]:
        """See `tiderl.engine.base.Engine.task_session`."""
        async with super().task_session(session_id=session_id, priority=priority, replay=replay) as session:
            yield AskedSession(session, self._lengths)


class AskedSession:
    """A `TaskSession` whose turns end after as many tokens as were asked for."""

    def __init__(self, session: TaskSession, lengths: Mapping[int, int]) -> None:
        self._session, self._lengths = session, lengths

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    async def generate(
        self, new_ids: Sequence[int], sampling: Sampling, images: Sequence[np.ndarray] = ()
    ) -> TurnOutput:
        """See `tiderl.engine.base.TaskSession.generate`."""
        asked = [self._lengths[token] for token in new_ids if token in self._lengths]
        if asked:
            sampling = replace(sampling, max_tokens=min(asked[-1], sampling.max_tokens))
        return await self._session.generate(new_ids, sampling, images)
