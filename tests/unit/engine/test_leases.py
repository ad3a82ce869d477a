"""Leases that grow and shrink without waiting, beside sessions that wait: nothing is promised twice."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.engine.budget import KVBudget, Lease
from tiderl.errors import EngineError


@given(
    blocks=st.integers(1, 30),
    slots=st.integers(1, 6),
    groups=st.integers(1, 2),
    moves=st.lists(st.tuples(st.sampled_from("nrsw"), st.integers(1, 400), st.integers(0, 5)), max_size=60),
)
def test_the_sum_of_leases_is_what_is_reserved(
    blocks: int, slots: int, groups: int, moves: list[tuple[str, int, int]]
) -> None:
    """n: new lease, r: resize, s: give back (stop), w: somebody waits for a session."""

    async def main() -> None:
        budget = KVBudget(blocks, slots, block_size=32, groups=groups)
        held: list[Lease] = []
        waiting: list[asyncio.Task[Lease]] = []

        def check() -> None:
            nonlocal waiting
            held.extend(t.result() for t in waiting if t.done())
            waiting = [t for t in waiting if not t.done()]
            assert budget.reserved == sum(x.blocks for x in held) <= blocks
            assert budget.promised_tokens == sum(budget.tokens_of(x) for x in held)
            assert budget.open == len(held) == slots - budget.open_slots
            assert len({x.slot for x in held}) == len(held)
            assert all(0 <= x.slot < slots for x in held)
            assert all(x.blocks == budget.blocks_for(x.tokens) for x in held)
            assert budget.waiting == len(waiting)

        for what, tokens, which in moves:
            need = budget.blocks_for(tokens)
            if what == "n":
                fits = not waiting and len(held) < slots and budget.reserved + need <= blocks
                lease = budget.try_acquire(tokens)
                assert (lease is not None) == fits
                held += [lease] if lease else []
            elif what == "w" and need <= blocks:
                waiting.append(asyncio.create_task(budget.acquire(tokens, timeout=30)))
            elif held and what == "r":
                old = held[which % len(held)]
                fits = budget.reserved - old.blocks + need <= blocks
                new = budget.try_resize(old, tokens)
                assert (new is not None) == fits
                if new is not None:
                    assert (new.slot, new.serial, new.tokens) == (old.slot, old.serial, tokens)
                    held[held.index(old)] = new
            elif held and what == "s":
                budget.release(held.pop(which % len(held)))
            for _ in range(3):
                await asyncio.sleep(0)
            check()
        # Whoever waits is served once the others let go, though newcomers ask all the time.
        while held:
            budget.release(held.pop(0))
            if budget.waiting:
                assert budget.try_acquire(1) is None
            for _ in range(3):
                await asyncio.sleep(0)
            check()
        assert not waiting

    asyncio.run(main())


async def test_a_lease_that_shrinks_lets_a_waiter_in() -> None:
    budget = KVBudget(10, 4, 32)
    lease = budget.try_acquire(10 * 32)
    assert lease is not None
    waiter = asyncio.create_task(budget.acquire(4 * 32, timeout=5))
    await asyncio.sleep(0)
    assert budget.try_acquire(1) is None
    smaller = budget.try_resize(lease, 7 * 32)
    assert smaller is not None
    await asyncio.sleep(0)
    assert not waiter.done()
    assert budget.try_acquire(32) is None  # three blocks are free, but somebody waits
    assert budget.try_resize(smaller, 8 * 32) is not None  # who has room may come to an end with it
    smallest = budget.try_resize(smaller, 6 * 32)
    assert smallest is not None
    got = await asyncio.wait_for(waiter, 1)
    assert budget.reserved == 10
    assert budget.try_resize(smallest, 6 * 32 + 1) is None
    assert budget.reserved == 10
    # An older copy of the lease gives back what is held, not what it once was.
    budget.release(lease)
    budget.release(got)
    assert (budget.reserved, budget.open, budget.open_slots) == (0, 0, 4)
    with pytest.raises(ValueError, match="not held"):
        budget.try_resize(smallest, 1)


async def test_newcomers_do_not_starve_a_session_that_waits() -> None:
    """Tasks come and go all the time and would always take what is free first."""
    budget = KVBudget(8, 8, 32)
    chance = random.Random(1)
    served = asyncio.Event()
    refused = 0

    async def task() -> None:
        nonlocal refused
        while not served.is_set():
            lease = budget.try_acquire(32 * chance.randint(1, 3))
            if lease is None:
                refused += 1
            else:
                await asyncio.sleep(0.001 * chance.randint(0, 3))
                lease = budget.try_resize(lease, 32 * chance.randint(1, 3)) or lease
                await asyncio.sleep(0.001)
                budget.release(lease)
            await asyncio.sleep(0)

    async def session() -> None:
        for _ in range(20):
            budget.release(await budget.acquire(8 * 32, timeout=5))
            await asyncio.sleep(0.005)
        served.set()

    async with asyncio.timeout(20):
        await asyncio.gather(session(), *(task() for _ in range(8)))
    assert refused
    assert budget.reserved == budget.open == 0


async def test_a_dead_engine_leases_nothing() -> None:
    budget = KVBudget(4, 4, 32)
    lease = budget.try_acquire(40)
    assert lease is not None
    budget.fail(EngineError("it died"))
    with pytest.raises(EngineError, match="died"):
        budget.try_acquire(1)
    with pytest.raises(ValueError, match="at least one"):
        budget.try_resize(lease, 0)
    budget.release(lease)
    assert budget.reserved == 0
