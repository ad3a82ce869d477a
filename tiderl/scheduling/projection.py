"""How much KV the tasks in flight will want, once they have grown.

Tasks add tokens at about one pace and end after their expected remaining ones; the most they want together
at any moment from now on is what admission compares with the capacity (after LightLLM's past-future
scheduler). Tasks that start together grow together: their peak is far above what they hold now.

Invariant: a task more never lowers the peak.
"""

from __future__ import annotations

from collections.abc import Iterable

BUCKETS = 48


class Projection:
    """Future KV of one engine, by buckets of remaining tokens."""

    def __init__(self, capacity: int) -> None:
        self._width = max(capacity // 96, 1)
        self._tokens, self._count = [0.0] * BUCKETS, [0.0] * BUCKETS
        self.now = self.tasks = 0.0  # tokens wanted now, by how many tasks

    def add(self, tokens: int, remaining: int, weight: float = 1.0) -> None:
        """One task: what it holds now, what it still adds, and how much of it is wanted."""
        at = min(remaining // self._width, BUCKETS - 1)
        self._tokens[at] += weight * (tokens + remaining - at * self._width)
        self._count[at] += weight
        self.now += weight * tokens
        self.tasks += weight

    def peak(self, more: Iterable[tuple[int, int]] = ()) -> float:
        """Most tokens wanted at one moment from now on, with these (tokens, remaining) added."""
        extra: dict[int, list[int]] = {}
        for tokens, remaining in more:
            at = min(remaining // self._width, BUCKETS - 1)
            extra.setdefault(at, []).append(tokens + remaining - at * self._width)
        wanted = count = best = 0.0
        for at in range(BUCKETS - 1, -1, -1):
            wanted += self._tokens[at] + sum(extra.get(at, ()))
            count += self._count[at] + len(extra.get(at, ()))
            best = max(best, wanted + count * at * self._width)
        return best
