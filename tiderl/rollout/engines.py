"""The engines of a run: started together, replaced when they die, closed together.

Invariant: an engine that takes a dead one's place runs the newest weights before it takes a turn, and all
engines have the same settings but for their log.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tiderl.errors import EngineError
from tiderl.rollout.pool import EnginePool

if TYPE_CHECKING:
    import torch

    from tiderl.engine.settings import EngineSettings
    from tiderl.engine.vllm import VLLMEngine

Newest = Callable[[], Awaitable[tuple[Iterable[tuple[str, "torch.Tensor"]], int]]]
"""The newest weights and their version."""


class Engines:
    """Args:

    settings: of each engine.
    ranks: how many.
    respawn: how many dead ones are replaced in all.
    """

    def __init__(self, settings: EngineSettings, ranks: int = 1, *, respawn: int = 0) -> None:
        self.settings, self.ranks = settings, ranks
        self.pool = EnginePool()
        self.newest: Newest | None = None
        """Set by the owner of the weights once version 1 exists."""
        self._left = respawn
        self._numbers = itertools.count()

    def first(self) -> VLLMEngine:
        """Any one of them. Raises EngineError when none is left."""
        for member in self.pool:
            return member.engine
        raise EngineError("no engine is running")

    async def start(self) -> None:
        """Start all of them. Raises what `VLLMEngine.start` raises; those that came up stay in the pool."""
        names = [f"engine-{next(self._numbers)}" for _ in range(self.ranks)]
        first, *others = names
        await self.pool.add(first, await self._started(first))  # it warms what the others share
        for name, engine in zip(others, await asyncio.gather(*map(self._started, others)), strict=True):
            await self.pool.add(name, engine)

    async def spawn(self, dead: str) -> tuple[str, VLLMEngine]:
        """An engine in place of `dead`, under a name of its own, with the newest weights.

        Raises:
            EngineError: too many have died already, or it did not start.
        """
        if self._left <= 0:
            raise EngineError(
                f"{dead} died and no further engine is started",
                fix="look into the engine's log; raise engine.respawn",
            )
        self._left -= 1
        name = f"engine-{next(self._numbers)}"
        engine = await self._started(name)
        try:
            while self.newest is not None:
                weights, version = await self.newest()
                if version <= engine.version:
                    break
                await engine.publish(weights, version)
        except BaseException:
            await engine.close()
            raise
        return name, engine

    async def close(self) -> None:
        """End all of them."""
        await self.pool.close()

    async def _started(self, name: str) -> VLLMEngine:
        from tiderl.engine.vllm import VLLMEngine

        log = self.settings.log_file
        if log is not None and name != "engine-0":
            log = Path(log).with_name(f"{Path(log).stem}-{name.rpartition('-')[2]}{Path(log).suffix}")
        engine = VLLMEngine(replace(self.settings, log_file=log))
        try:
            await engine.start()
        except BaseException:
            await engine.close()
            raise
        return engine
