"""The ready buffer: finished groups on their way to the trainer.

Invariants: groups leave in the order of their ordinals among those that are there; each ordinal enters
and leaves once; at most `capacity` groups are inside (`put` waits); no wait outlives a failure of the
other side: `fail` wakes everyone with the error, `close` says that no more will come.
"""

from __future__ import annotations

import asyncio
import heapq
from typing import Generic, Protocol, TypeVar

from ..errors import InfrastructureError


class Ordered(Protocol):
    """What has a place in the task stream."""

    @property
    def ordinal(self) -> int: ...


T = TypeVar("T", bound=Ordered)


class BufferClosed(InfrastructureError):
    """Nothing more will come out of, or can be put into, the ready buffer."""


class ReadyBuffer(Generic[T]):
    """Ordered and bounded; for one event loop.

    Args:
        capacity: the most groups inside.
        in_order: hand out strictly ordinal after ordinal, starting at `first`, even when later ones are
            there already. The groups that are next then find room beside up to `capacity` later ones, so
            that order cannot block.
        first: the first ordinal when `in_order`.
    """

    def __init__(self, capacity: int, *, in_order: bool = False, first: int = 0) -> None:
        if capacity < 1:
            raise ValueError("a buffer needs room for at least one group")
        self.capacity, self.in_order = capacity, in_order
        self._next = first
        self._heap: list[tuple[int, T]] = []
        self._inside: set[int] = set()
        self._out: set[int] = set()  # left, and above the floor below which all have left
        self._floor = first
        self._changed = asyncio.Condition()
        self._error: BaseException | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._heap)

    async def put(self, group: T, *, timeout: float | None = None) -> None:
        """Add a group; waits for room.

        Raises:
            ValueError: a group of this ordinal was put before.
            TimeoutError: there was no room in `timeout` seconds.
            BufferClosed: the buffer is closed.
            BaseException: what the other side failed with.
        """
        ordinal = group.ordinal
        async with asyncio.timeout(timeout), self._changed:
            await self._changed.wait_for(lambda: self._stopped or self._has_room(ordinal))
            self._raise()
            if self._closed:
                raise BufferClosed("the ready buffer is closed")
            if ordinal in self._inside or ordinal in self._out or ordinal < self._floor:
                raise ValueError(f"group {ordinal} was put into the ready buffer before")
            heapq.heappush(self._heap, (ordinal, group))
            self._inside.add(ordinal)
            self._changed.notify_all()

    async def take(self, count: int = 1, *, timeout: float | None = None) -> list[T]:
        """`count` groups, lowest ordinals first; waits until so many can leave.

        Raises:
            ValueError: `count` is below 1 or above the capacity, so it could never be met.
            TimeoutError: they were not there in `timeout` seconds; nothing was taken.
            BufferClosed: the buffer is closed and holds fewer.
            BaseException: what the other side failed with.
        """
        if not 1 <= count <= self.capacity:
            raise ValueError(f"{count} groups cannot be taken from a buffer of {self.capacity}")
        async with asyncio.timeout(timeout), self._changed:
            await self._changed.wait_for(lambda: self._stopped or self._available() >= count)
            self._raise()
            if self._available() < count:
                raise BufferClosed(
                    f"the ready buffer is closed and holds {self._available()} of {count} groups"
                )
            taken = [heapq.heappop(self._heap)[1] for _ in range(count)]
            for group in taken:
                self._inside.discard(group.ordinal)
                self._out.add(group.ordinal)
                self._next = group.ordinal + 1
            while self._floor in self._out:
                self._out.discard(self._floor)
                self._floor += 1
            self._changed.notify_all()
            return taken

    async def close(self) -> None:
        """No more will be put; what is inside can still be taken."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def fail(self, error: BaseException) -> None:
        """Wake both sides with `error`; the first one counts."""
        async with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    @property
    def _stopped(self) -> bool:
        return self._closed or self._error is not None

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _has_room(self, ordinal: int) -> bool:
        if len(self._heap) < self.capacity:
            return True
        return self.in_order and ordinal == self._missing() and self._available() < self.capacity

    def _missing(self) -> int:
        """The lowest ordinal that is not inside, counted from the next to leave."""
        ordinal = self._next
        while ordinal in self._inside:
            ordinal += 1
        return ordinal

    def _available(self) -> int:
        """How many groups may leave now."""
        return self._missing() - self._next if self.in_order else len(self._heap)
