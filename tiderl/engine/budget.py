"""Promises of KV blocks and model-runner slots, made before the engine sees a session or a turn.

Invariant: the sum of promised blocks never passes the usable blocks and the number of leases never passes the
slots. vLLM holds the blocks of a waiting session and never evicts them, so without this rule a full pool
would block for ever; with it every turn that was sent always has the blocks it can need, and nothing is ever
preempted for lack of them.

Two kinds of users share it. `acquire` waits, in order. `try_acquire` and `try_resize` never wait. A new lease
is not given while somebody waits, so that waiters get what is given back; a lease that exists may still grow,
so that whoever holds room can come to an end.
"""

from __future__ import annotations

import asyncio
import heapq
from dataclasses import dataclass, field, replace

from tiderl.errors import Busy, EngineError, PromptTooLong


@dataclass(frozen=True)
class Lease:
    """One session's share: `blocks` KV blocks for `tokens` tokens, and the slot `slot`."""

    blocks: int
    slot: int
    tokens: int
    serial: int


@dataclass(order=True)
class _Waiter:
    priority: int
    serial: int
    blocks: int = field(compare=False)
    tokens: int = field(compare=False)
    future: asyncio.Future[Lease] = field(compare=False)


class KVBudget:
    """Hands out leases; those who wait get theirs in order of priority (lower first), then of arrival.

    Args:
        blocks: usable KV blocks.
        slots: most leases at a time.
        block_size: tokens of a block.
        groups: KV cache groups; a hybrid model keeps one set of blocks for each.
    """

    def __init__(self, blocks: int, slots: int, block_size: int, groups: int = 1) -> None:
        self.blocks, self.slots, self.block_size, self.groups = blocks, slots, block_size, groups
        self.reserved = 0
        self._free_slots = list(range(slots))
        heapq.heapify(self._free_slots)
        self._held: dict[int, Lease] = {}
        self._waiters: list[_Waiter] = []
        self._serial = 0
        self._failure: EngineError | None = None

    @property
    def capacity_tokens(self) -> int:
        return self.blocks // self.groups * self.block_size

    @property
    def promised_tokens(self) -> int:
        """Tokens of KV in all leases, in whole blocks."""
        return self.reserved // self.groups * self.block_size

    @property
    def waiting(self) -> int:
        """Sessions that wait for room."""
        return sum(not w.future.done() for w in self._waiters)

    @property
    def open(self) -> int:
        """Leases held now."""
        return len(self._held)

    @property
    def open_slots(self) -> int:
        """Leases that could still be given, if there were blocks for them."""
        return len(self._free_slots)

    def blocks_for(self, tokens: int) -> int:
        """KV blocks that `tokens` tokens can need."""
        return -(-tokens // self.block_size) * self.groups

    def tokens_of(self, lease: Lease) -> int:
        """Tokens of KV in a lease, in whole blocks."""
        return lease.blocks // self.groups * self.block_size

    def try_acquire(self, tokens: int) -> Lease | None:
        """A lease for `tokens` tokens and a slot at once; None when there is no room or others wait for it.

        Raises:
            EngineError: the engine died.
        """
        if self._failure is not None:
            raise self._failure
        blocks = self._need(tokens)
        self._grant()
        if self._waiters or not self._free_slots or self.reserved + blocks > self.blocks:
            return None
        self._serial += 1
        return self._give(blocks, tokens, self._serial)

    def try_resize(self, lease: Lease, tokens: int) -> Lease | None:
        """The same lease for `tokens` tokens; None, and the old one stays, when there is no room to grow."""
        held = self._held.get(lease.serial)
        if held is None:
            raise ValueError(f"lease {lease.serial} is not held")
        blocks = self._need(tokens)
        if self.reserved - held.blocks + blocks > self.blocks:
            return None
        self.reserved += blocks - held.blocks
        lease = self._held[lease.serial] = replace(held, blocks=blocks, tokens=tokens)
        if blocks < held.blocks:
            self._grant()
        return lease

    async def acquire(self, tokens: int, *, priority: int = 0, timeout: float) -> Lease:
        """Wait for room for `tokens` tokens of KV and a slot.

        Raises:
            PromptTooLong: the reservation is larger than the whole cache; it could never be met.
            Busy: no room within `timeout` seconds.
            EngineError: the engine died meanwhile.
        """
        if self._failure is not None:
            raise self._failure
        blocks = self._need(tokens)
        if blocks > self.blocks:
            raise PromptTooLong(
                f"a session of {tokens} tokens does not fit the KV cache of {self.capacity_tokens}",
                fix="raise engine.kv_tokens or reserve less",
            )
        self._serial += 1
        waiter = _Waiter(priority, self._serial, blocks, tokens, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiters, waiter)
        self._grant()
        try:
            async with asyncio.timeout(timeout):
                return await waiter.future
        except TimeoutError as error:
            self._drop(waiter)
            raise Busy(
                f"no room for {tokens} tokens of KV within {timeout:.0f} s ({self.taken})",
                retry_after=timeout,
                where="engine",
            ) from error
        except asyncio.CancelledError:
            self._drop(waiter)
            raise

    @property
    def taken(self) -> str:
        """How full it is, in words."""
        return f"{self.reserved} of {self.blocks} blocks and {self.open} of {self.slots} slots are taken"

    def release(self, lease: Lease) -> None:
        """Give a lease back. Releasing one twice is an error of ours and raises ValueError."""
        held = self._held.pop(lease.serial, None)
        if held is None:
            raise ValueError(f"lease {lease.serial} is not held")
        self.reserved -= held.blocks
        heapq.heappush(self._free_slots, held.slot)
        self._grant()

    def fail(self, error: EngineError) -> None:
        """The engine is gone: every waiter, now and later, gets `error`."""
        self._failure = error
        for waiter in self._waiters:
            if not waiter.future.done():
                waiter.future.set_exception(error)
        self._waiters.clear()

    def _need(self, tokens: int) -> int:
        if tokens < 1:
            raise ValueError(f"a session needs at least one token, not {tokens}")
        return self.blocks_for(tokens)

    def _give(self, blocks: int, tokens: int, serial: int) -> Lease:
        lease = Lease(blocks, heapq.heappop(self._free_slots), tokens, serial)
        self.reserved += blocks
        self._held[serial] = lease
        return lease

    def _grant(self) -> None:
        while self._waiters:
            head = self._waiters[0]
            if head.future.done():  # timed out or cancelled
                heapq.heappop(self._waiters)
                continue
            if not self._free_slots or self.reserved + head.blocks > self.blocks:
                return
            heapq.heappop(self._waiters)
            head.future.set_result(self._give(head.blocks, head.tokens, head.serial))

    def _drop(self, waiter: _Waiter) -> None:
        """A waiter gave up; a lease granted in the same instant goes back."""
        future = waiter.future
        if future.done() and not future.cancelled() and future.exception() is None:
            self.release(future.result())
            return
        future.cancel()
        self._grant()
