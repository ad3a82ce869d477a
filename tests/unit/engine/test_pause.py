"""The pause gate: paused exactly while somebody is inside, also when holders are cancelled."""

from __future__ import annotations

import asyncio

import pytest

from tiderl.engine.pause import PauseGate
from tiderl.errors import EngineError


class Calls:
    """Records the calls a gate makes into its engine."""

    def __init__(self) -> None:
        self.paused = 0
        self.log: list[str] = []
        self.dead = False

    async def pause(self) -> None:
        await asyncio.sleep(0)
        self.paused += 1
        self.log.append("pause")

    async def resume(self) -> None:
        await asyncio.sleep(0)
        self.paused -= 1
        self.log.append("resume")

    def alive(self) -> None:
        if self.dead:
            raise EngineError("it died")

    def gate(self) -> PauseGate:
        return PauseGate(self.pause, self.resume, self.alive)


async def test_nested_and_concurrent_pauses_are_one() -> None:
    calls = Calls()
    gate = calls.gate()

    async def one(seconds: float) -> None:
        async with gate.paused(), gate.paused():
            assert calls.paused == 1
            await asyncio.sleep(seconds)
            assert calls.paused == 1

    await asyncio.gather(*(one(0.001 * k) for k in range(5)))
    assert calls.paused == 0
    assert calls.log == ["pause", "resume"]


async def test_a_cancelled_holder_still_resumes() -> None:
    calls = Calls()
    gate = calls.gate()

    async def one() -> None:
        async with gate.paused():
            await asyncio.sleep(10)

    task = asyncio.create_task(one())
    await asyncio.sleep(0.01)
    assert calls.paused == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.01)
    assert calls.paused == 0


@pytest.mark.parametrize("steps", range(8))
async def test_a_holder_cancelled_at_any_step_leaves_the_engine_running(steps: int) -> None:
    calls = Calls()
    gate = calls.gate()

    async def one() -> None:
        async with gate.paused():
            await asyncio.sleep(0)

    task = asyncio.create_task(one())
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert calls.paused == 0
    async with gate.paused():
        assert calls.paused == 1
    assert calls.paused == 0


async def test_hold_waits_for_sent_or_failed_turns() -> None:
    calls = Calls()
    gate = calls.gate()

    async def turn(delay: float, fails: bool) -> None:
        with gate.counting() as settle:
            await asyncio.sleep(delay)
            if fails:
                raise ValueError
            assert calls.paused == 1
            settle()
            while calls.paused:
                await asyncio.sleep(0.001)

    async with gate.hold(3, timeout=5):
        tasks = [asyncio.create_task(turn(0.01 * k, fails=k == 1)) for k in range(3)]
    assert calls.paused == 0
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(r) for r in results] == [type(None), ValueError, type(None)]
    with pytest.raises(EngineError, match="0 of 2"):
        async with gate.hold(2, timeout=0.01):
            pass
    assert calls.paused == 0
    calls.dead = True
    with pytest.raises(EngineError, match="died"):
        async with gate.hold(1, timeout=1):
            pass


async def test_a_cancellation_is_raised_when_the_work_has_ended() -> None:
    from tiderl.engine.pause import to_its_end

    done = []

    async def work(fails: bool) -> None:
        await asyncio.sleep(0.03)
        done.append(fails)
        if fails:
            raise EngineError("it failed")

    for fails in (False, True):
        task = asyncio.create_task(to_its_end(work(fails)))
        for _ in range(3):
            await asyncio.sleep(0.005)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert done == [False, True]
    await to_its_end(work(False))
    with pytest.raises(EngineError, match="failed"):
        await to_its_end(work(True))
