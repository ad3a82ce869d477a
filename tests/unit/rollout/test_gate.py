"""Lockstep under asyncio: nothing is lost, nothing is kept."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tiderl.errors import EngineError
from tiderl.rollout.gate import LockstepGate


class Engine:
    """Counts what is sent while it is held."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, int]]] = []
        self.held = False

    @asynccontextmanager
    async def hold(self, count: int) -> AsyncIterator[None]:
        assert not self.held
        self.held, batch = True, []
        self.batches.append(batch)
        yield
        while len(batch) < count:
            await asyncio.sleep(0)
        self.held = False


async def episode(gate: LockstepGate, engine: Engine, order: tuple[int, int], turns: int) -> None:
    async with gate.inside(order):
        for _ in range(turns):
            await asyncio.sleep(random.random() / 200)
            await gate.turn(order)
            engine.batches[-1].append(order)


@pytest.mark.parametrize("attempt", range(3))
async def test_batches_do_not_depend_on_timing(attempt: int) -> None:
    engine = Engine()
    gate = LockstepGate(engine.hold)
    turns = {(g, m): 1 + (g + 2 * m) % 3 for g in range(3) for m in range(4)}
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        for order, count in turns.items():
            group.create_task(episode(gate, engine, order, count))
    expected = [sorted(o for o, n in turns.items() if n > i) for i in range(3)]
    assert engine.batches == expected


async def test_an_episode_that_dies_holds_up_nobody() -> None:
    engine = Engine()
    gate = LockstepGate(engine.hold)

    async def dies() -> None:
        async with gate.inside((0, 0)):
            await asyncio.sleep(0.01)
            raise ValueError

    async with asyncio.timeout(5):
        results = await asyncio.gather(dies(), episode(gate, engine, (0, 1), 2), return_exceptions=True)
    assert isinstance(results[0], ValueError)
    assert engine.batches == [[(0, 1)], [(0, 1)]]


async def test_an_engine_that_cannot_be_held_fails_the_turns() -> None:
    @asynccontextmanager
    async def hold(count: int) -> AsyncIterator[None]:
        raise EngineError("dead")
        yield

    gate = LockstepGate(hold)
    async with asyncio.timeout(5):
        with pytest.raises(EngineError, match="dead"):
            async with gate.inside((0, 0)):
                await gate.turn((0, 0))
