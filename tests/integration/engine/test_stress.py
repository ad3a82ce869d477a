"""Many task sessions over a pool for a quarter of them, everything at once: no hang, no drift."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from tiderl.engine.base import Sampling
from tiderl.engine.settings import EngineSettings
from tiderl.engine.task_session import VLLMTaskSession
from tiderl.engine.vllm import VLLMEngine
from tiderl.errors import Busy

from .conftest import Live, load_reference, settle, tokens

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]

SESSIONS = 200
TOGETHER = 60
BLOCK = 32


class Driver:
    """Plays sessions; lets the KV of others go when there is no room, as a policy would."""

    def __init__(self, engine: VLLMEngine, seed: int) -> None:
        self.engine = engine
        self.chance = random.Random(seed)
        self.idle: set[VLLMTaskSession] = set()
        self.counts: Counter[str] = Counter()
        self.room = asyncio.Semaphore(TOGETHER)

    async def play(self, number: int) -> None:
        async with self.room, self.engine.task_session(session_id=f"s{number}") as session:
            ids: list[int] = []
            for turn in range(self.chance.randint(2, 6)):
                if session.length > 380:
                    break
                chunk = tokens(number * 7 + turn, self.chance.randint(1, 60))
                output = await self.turn(session, chunk, Sampling(self.chance.randint(1, 40), seed=turn))
                if output is None:
                    continue
                ids += [*chunk, *output]
                assert session.snapshot().ids == tuple(ids)
                self.idle.add(session)
                await asyncio.sleep(self.chance.expovariate(1 / 0.03))
                self.idle.discard(session)
                if session.held and self.chance.random() < 0.3:
                    await session.release(fresh=self.chance.random() < 0.3)
                    self.counts["released"] += 1
            self.counts["done"] += 1

    async def turn(self, session: VLLMTaskSession, chunk: list[int], how: Sampling) -> list[int] | None:
        """One turn, asked for until there is room; None when it was cancelled on the way."""
        while True:
            was_held = session.held
            task = asyncio.create_task(session.generate(chunk, how))
            if self.chance.random() < 0.25:
                await asyncio.sleep(self.chance.choice((0.0, 0.002, 0.01, 0.03)))
                task.cancel()
            await asyncio.wait([task])
            if task.cancelled():
                assert not session.held or was_held
                self.counts["cancelled"] += 1
                return None
            if isinstance(error := task.exception(), Busy):
                self.counts["busy"] += 1
                assert session.held == was_held
                await self.make_room(session)
                continue
            if error is not None:
                raise error
            self.counts["replayed" if not was_held else "resumed"] += 1
            return list(task.result().ids)

    async def make_room(self, session: VLLMTaskSession) -> None:
        """Let somebody's KV go: an idle one's, else our own, so that no two wait for each other.

        Mostly just wait: else nobody would ever come back to KV that is still held.
        """
        await asyncio.sleep(0.005)
        if self.chance.random() < 0.98:
            return
        for other in self.chance.sample(sorted(self.idle, key=lambda s: s.name), len(self.idle)):
            self.idle.discard(other)
            if other.held:
                await other.release()
                return
        if session.held:
            await session.release()


async def test_200_sessions_over_a_pool_for_a_quarter_of_them(tiny: Path) -> None:
    settings = EngineSettings(
        model=tiny,
        kv_tokens=2560,
        max_sessions=14,
        max_model_len=512,
        max_batched_tokens=256,
        turn_timeout=60,
    )
    async with VLLMEngine(settings) as engine:
        live = Live(engine, load_reference(tiny), tiny)
        driver = Driver(engine, seed=1)
        stop = asyncio.Event()
        lasting = 0

        async def look() -> None:
            """At every moment: no promise beyond the pool. And no drift that lasts."""
            nonlocal lasting
            while not stop.is_set():
                audit = engine.audit()
                assert audit.promised_tokens <= engine.capacity_tokens
                assert audit.sessions <= engine.max_sessions
                assert engine.open_slots == engine.max_sessions - audit.sessions
                assert audit.used_tokens <= engine.capacity_tokens
                drift = audit.used_tokens > audit.promised_tokens or audit.held_there > audit.sessions
                lasting = lasting + 1 if drift else 0
                assert lasting < 100, audit
                await asyncio.sleep(0.01)

        async def update() -> None:
            while not stop.is_set():
                await live.publish(engine.version, scale=0.001)
                await asyncio.sleep(0.3)

        beside = [asyncio.create_task(look()), asyncio.create_task(update())]
        async with asyncio.timeout(180):
            await asyncio.gather(*(driver.play(n) for n in range(SESSIONS)))
        stop.set()
        await asyncio.gather(*beside)

        await settle(engine)
        audit, stats = engine.audit(), engine.stats()
        assert audit.consistent
        assert (audit.promised_tokens, audit.used_tokens, audit.sessions) == (0, 0, 0)
        assert stats.free_tokens == engine.capacity_tokens
        assert stats.preemptions == 0
        assert engine.open_slots == engine.max_sessions
        assert not engine.idle
        counts = driver.counts
        assert counts["done"] == SESSIONS
        assert min(counts[what] for what in ("busy", "cancelled", "released", "replayed", "resumed")) > 10, (
            counts
        )
        assert stats.reprefilled_tokens > 0
        assert engine.version > 3
