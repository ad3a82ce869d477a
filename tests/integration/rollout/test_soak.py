"""500 episodes at four times over-subscription, with everything going wrong at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from dataclasses import replace

import pytest

from tiderl.engine.counters import Cell
from tiderl.engine.settings import EngineSettings
from tiderl.env.ends import EndReason

from .conftest import Episode, Weights, conducting, play, pure

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

EPISODES = 500


async def test_500_episodes_with_deaths_aborts_and_updates(settings: EngineSettings) -> None:
    rng = random.Random(7)
    weights = Weights(settings.model)
    done: list[Episode] = []
    cancelled: list[str] = []
    settings = replace(settings, kv_tokens=1024)  # two of them: 16 episodes of 128 tokens fit, 64 want in

    async with conducting(settings, ranks=2, respawn=2, concurrency=64) as (conductor, engines):
        newest: tuple[list, int] = ([], 0)

        async def source() -> tuple[list, int]:
            return newest

        engines.newest = source

        async def one(number: int) -> None:
            key = f"g{number // 4:06d}m{number % 4:02d}"
            turns = rng.randint(2, 5)
            episode = await play(
                conductor,
                key,
                (number // 4, number % 4),
                turns=turns,
                observation=16,
                wait=0.05,
                die_at=1 if rng.random() < 0.05 else -1,
            )
            assert len(episode.turns) == turns or episode.end is EndReason.INFRASTRUCTURE
            done.append(episode)

        work = {number: asyncio.create_task(one(number)) for number in range(EPISODES)}

        async def aborts() -> None:
            while True:
                await asyncio.sleep(0.25)
                alive = [n for n, t in work.items() if not t.done()]
                if alive:
                    number = rng.choice(alive[:64])
                    work[number].cancel()
                    cancelled.append(str(number))

        async def updates() -> None:
            nonlocal newest
            for version in range(1, 1000):
                await asyncio.sleep(1.0)
                tensors = weights.perturb()
                newest = (tensors, version)
                await conductor.publish(tensors, version)

        async def death() -> None:
            await asyncio.sleep(4.0)
            os.killpg(engines.first()._counters[Cell.PID], signal.SIGKILL)  # type: ignore[index]

        beside = [asyncio.create_task(w()) for w in (aborts, updates, death)]
        results = await asyncio.wait_for(asyncio.gather(*work.values(), return_exceptions=True), 240)
        for task in beside:
            task.cancel()
        ended = await asyncio.gather(*beside, return_exceptions=True)
        assert not [e for e in ended if isinstance(e, Exception)], ended

        # Not one lost, not one doubled.
        failures = [r for r in results if isinstance(r, Exception)]
        assert not failures, failures[:3]
        aborted = sum(isinstance(r, asyncio.CancelledError) for r in results)
        assert len(done) + aborted == EPISODES
        assert max(Counter(e.key for e in done).values()) == 1
        assert len(conductor.table) == 0
        assert conductor.watch.drifts == 0
        assert "engine-2" in conductor.pool.names  # the killed one was replaced
        assert conductor.pool["engine-2"].engine.stats().decode_tokens > 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                while any(m.engine.audit().used_tokens for m in conductor.pool):
                    await asyncio.sleep(0.05)
        for member in conductor.pool:
            audit = member.engine.audit()
            assert (audit.promised_tokens, audit.sessions, audit.used_tokens) == (0, 0, 0)

    # Every token's version is right: recomputed with the weights of the version it claims.
    sample = rng.sample(done, 80)
    checked = [
        (gap, out)
        for episode in sample
        for gap, (_, out) in zip(weights.gaps(episode), episode.turns, strict=True)
        if pure(out)
    ]
    assert len(checked) > 80
    assert len({out.versions[0] for _, out in checked}) > 3
    assert max(gap for gap, _ in checked) <= 1e-4
    assert any(not pure(out) for e in done for _, out in e.turns)
