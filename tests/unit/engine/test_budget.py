"""The reservation never passes the capacity, serves in order, and can never block for ever."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiderl.engine.budget import KVBudget, Lease
from tiderl.errors import Busy, EngineError, PromptTooLong


@settings(max_examples=60, deadline=None)
@given(
    blocks=st.integers(1, 40),
    slots=st.integers(1, 6),
    groups=st.integers(1, 2),
    wants=st.lists(st.tuples(st.integers(1, 300), st.integers(-2, 2), st.booleans()), max_size=25),
    seed=st.integers(0, 10**6),
)
def test_reservations_stay_within_the_cache_and_everybody_is_served(
    blocks: int, slots: int, groups: int, wants: list[tuple[int, int, bool]], seed: int
) -> None:
    budget = KVBudget(blocks, slots, block_size=32, groups=groups)
    chance = random.Random(seed)
    held: list[Lease] = []
    served: list[int] = []

    async def one(number: int, tokens: int, priority: int, give_up: bool) -> None:
        try:
            lease = await budget.acquire(tokens, priority=priority, timeout=0.001 if give_up else 30)
        except PromptTooLong:
            assert budget.blocks_for(tokens) > blocks
            return
        except Busy:
            assert give_up
            return
        held.append(lease)
        served.append(number)
        assert (
            sum(x.blocks for x in held) <= budget.reserved <= blocks
        )  # a lease just granted is not in `held`
        assert len(held) <= budget.open <= slots
        assert len({x.slot for x in held}) == len(held)
        assert all(0 <= x.slot < slots for x in held)
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        held.remove(lease)
        budget.release(lease)

    async def main() -> None:
        async with asyncio.timeout(20):
            await asyncio.gather(*(one(k, *want) for k, want in enumerate(wants)))

    asyncio.run(main())
    assert budget.reserved == budget.open == budget.waiting == 0
    patient = [
        k
        for k, (tokens, _, give_up) in enumerate(wants)
        if not give_up and budget.blocks_for(tokens) <= blocks
    ]
    assert set(patient) <= set(served)


async def test_priority_first_then_arrival_and_nobody_is_overtaken() -> None:
    budget = KVBudget(10, 8, 1)
    first = await budget.acquire(8, timeout=1)
    order: list[str] = []

    async def one(name: str, tokens: int, priority: int) -> None:
        lease = await budget.acquire(tokens, priority=priority, timeout=5)
        order.append(name)
        await asyncio.sleep(0)
        budget.release(lease)

    tasks = []
    for name, tokens, priority in (("big", 9, 0), ("small", 1, 0), ("late but first", 3, -1)):
        tasks.append(asyncio.create_task(one(name, tokens, priority)))
        await asyncio.sleep(0)
    assert order == []  # `small` would fit, but `big` came first
    assert budget.waiting == 3
    budget.release(first)
    await asyncio.gather(*tasks)
    assert order == ["late but first", "big", "small"]


async def test_a_cancelled_or_late_waiter_lets_the_next_one_in() -> None:
    budget = KVBudget(4, 4, 1)
    lease = await budget.acquire(3, timeout=1)
    head = asyncio.create_task(budget.acquire(4, timeout=5))
    late = asyncio.create_task(budget.acquire(2, timeout=0.02))
    tail = asyncio.create_task(budget.acquire(1, timeout=5))
    await asyncio.sleep(0)
    with pytest.raises(Busy, match="retry after"):
        await late
    head.cancel()
    with pytest.raises(asyncio.CancelledError):
        await head
    budget.release(await tail)
    budget.release(lease)
    assert budget.reserved == budget.waiting == 0


async def test_a_lease_granted_while_its_waiter_is_cancelled_goes_back() -> None:
    budget = KVBudget(4, 4, 1)
    lease = await budget.acquire(4, timeout=1)
    waiter = asyncio.create_task(budget.acquire(4, timeout=5))
    await asyncio.sleep(0)
    budget.release(lease)  # grants to the waiter, which has not run yet
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert budget.reserved == budget.open == 0


async def test_failing_wakes_waiters_and_refuses_newcomers() -> None:
    budget = KVBudget(1, 1, 1)
    lease = await budget.acquire(1, timeout=1)
    waiter = asyncio.create_task(budget.acquire(1, timeout=5))
    await asyncio.sleep(0)
    budget.fail(EngineError("it died"))
    with pytest.raises(EngineError, match="died"):
        await waiter
    with pytest.raises(EngineError, match="died"):
        await budget.acquire(1, timeout=5)
    budget.release(lease)
    with pytest.raises(ValueError, match="not held"):
        budget.release(lease)


async def test_what_can_never_fit_is_refused_at_once() -> None:
    budget = KVBudget(4, 2, 32)
    assert budget.capacity_tokens == 128
    with pytest.raises(PromptTooLong, match="does not fit"):
        await budget.acquire(129, timeout=5)
    with pytest.raises(ValueError, match="at least one"):
        await budget.acquire(0, timeout=5)
