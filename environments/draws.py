"""Numbers drawn from a hash of a key, for tasks that are made from their id.

Invariant: the same key gives the same numbers on every machine and with every version of Python and
NumPy, whatever any random generator does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
ONE_IN = 8


class Draws:
    """An endless stream of uniform integers made of SHA-256 of a key and a counter."""

    def __init__(self, key: str) -> None:
        self._key, self._count = key, 0

    def below(self, n: int) -> int:
        """An integer in 0..n-1 (bias below n / 2**64)."""
        digest = hashlib.sha256(f"{self._key}#{self._count}".encode()).digest()
        self._count += 1
        return int.from_bytes(digest[:8], "big") % n

    def between(self, low: int, high: int) -> int:
        """An integer in low..high, both included."""
        return low + self.below(high - low + 1)

    def pick(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[self.below(len(items))]

    def sample(self, items: Sequence[T], k: int) -> list[T]:
        """`k` different items, in random order."""
        rest = list(items)
        return [rest.pop(self.below(len(rest))) for _ in range(k)]


def split_of(content: str) -> str:
    """The split that a task's content belongs to: "test" for one in eight, else "train"."""
    return "test" if Draws(f"split/{content}").below(ONE_IN) == 0 else "train"


def draw_in_split(key: str, split: str, make: Callable[[Draws], tuple[str, T]]) -> T:
    """What `make` draws, drawn again until its content belongs to `split`.

    Args:
        key: names the task; the same key gives the same task.
        split: "train" or "test".
        make: draws (content, task); the content decides the split.
    """
    draws = Draws(f"{key}/{split}")
    while True:
        content, task = make(draws)
        if split_of(content) == split:
            return task
