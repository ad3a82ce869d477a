"""The ready buffer: order, bound, and no wait that the other side's death could leave for ever."""

from __future__ import annotations

import asyncio

import pytest

from tiderl.errors import EngineError
from tiderl.trajectory.buffer import BufferClosed, ReadyBuffer
from tiderl.trajectory.group import Group


def group(ordinal):
    return Group("t", ordinal)


def ordinals(groups):
    return [g.ordinal for g in groups]


async def test_lowest_ordinals_leave_first_and_each_once():
    buffer = ReadyBuffer(8)
    for ordinal in (5, 1, 3):
        await buffer.put(group(ordinal))
    assert ordinals(await buffer.take(2)) == [1, 3]
    for known in (1, 5):
        with pytest.raises(ValueError, match=f"group {known} was put"):
            await buffer.put(group(known))
    await buffer.put(group(0))
    assert ordinals(await buffer.take(2)) == [0, 5]
    assert len(buffer) == 0


async def test_put_waits_for_room_and_take_for_groups():
    buffer = ReadyBuffer(2)
    await buffer.put(group(0))
    await buffer.put(group(1))
    with pytest.raises(TimeoutError):
        await buffer.put(group(2), timeout=0.01)
    waiting = asyncio.create_task(buffer.put(group(2)))
    await asyncio.sleep(0)
    assert ordinals(await buffer.take(1, timeout=1)) == [0]
    await asyncio.wait_for(waiting, 1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await buffer.take(2, timeout=1)
            await buffer.take(1, timeout=0.01)
    assert len(buffer) == 0


async def test_in_order_waits_for_the_missing_one_and_always_has_room_for_it():
    buffer = ReadyBuffer(2, in_order=True, first=3)
    await buffer.put(group(5))
    await buffer.put(group(4))
    with pytest.raises(TimeoutError):
        await buffer.take(1, timeout=0.01)
    with pytest.raises(TimeoutError):
        await buffer.put(group(6), timeout=0.01)
    await buffer.put(group(3), timeout=1)
    assert ordinals(await buffer.take(2, timeout=1)) == [3, 4]
    assert ordinals(await buffer.take(1, timeout=1)) == [5]


async def test_in_order_is_bounded_too():
    buffer = ReadyBuffer(2, in_order=True)
    await buffer.put(group(0))
    await buffer.put(group(1))
    with pytest.raises(TimeoutError):
        await buffer.put(group(2), timeout=0.01)


async def test_c5_failure_of_one_side_wakes_the_other():
    buffer = ReadyBuffer(1)
    taker = asyncio.create_task(buffer.take(1))
    await asyncio.sleep(0)
    await buffer.fail(EngineError("the engine died"))
    with pytest.raises(EngineError, match="died"):
        await asyncio.wait_for(taker, 1)
    with pytest.raises(EngineError):
        await buffer.put(group(0))


async def test_c6_end_of_data_is_a_state_not_a_wait():
    buffer = ReadyBuffer(4)
    await buffer.put(group(0))
    taker = asyncio.create_task(buffer.take(2))
    await asyncio.sleep(0)
    await buffer.close()
    with pytest.raises(BufferClosed, match="holds 1 of 2"):
        await asyncio.wait_for(taker, 1)
    assert ordinals(await buffer.take(1)) == [0]
    with pytest.raises(BufferClosed):
        await buffer.put(group(1))


async def test_cancelled_waiter_takes_nothing_along():
    buffer = ReadyBuffer(1)
    taker = asyncio.create_task(buffer.take(1))
    await asyncio.sleep(0)
    taker.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taker
    await buffer.put(group(0))
    assert ordinals(await buffer.take(1, timeout=1)) == [0]


async def test_demand_that_can_never_be_met_is_an_error():
    with pytest.raises(ValueError, match="room"):
        ReadyBuffer(0)
    for count in (0, 3):
        with pytest.raises(ValueError, match="cannot be taken"):
            await ReadyBuffer(2).take(count)


async def test_many_producers_and_one_consumer_see_every_group_once():
    buffer = ReadyBuffer(3)
    producers = [asyncio.create_task(buffer.put(group(ordinal), timeout=5)) for ordinal in range(30)]
    seen = []
    while len(seen) < 30:
        seen += ordinals(await buffer.take(2, timeout=5))
    await asyncio.gather(*producers)
    assert sorted(seen) == list(range(30))
