"""How long environments take: a histogram over logarithmic buckets, with decay.

Invariant: frozen; `seen` makes a new one. Old observations fade by `DECAY` a new one, so that a tool that
changes its speed is believed after some dozens of calls.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

EDGES: tuple[float, ...] = tuple(0.001 * 10 ** (i / 8) for i in range(57))
"""Upper edges of the buckets in seconds: 1 ms to 10,000 s, eight a decade."""

DECAY = 0.99


@dataclass(frozen=True, slots=True)
class Waits:
    """Weights of the observed durations by bucket."""

    weights: tuple[float, ...] = (0.0,) * (len(EDGES) + 1)
    total: float = 0.0
    count: int = 0

    def seen(self, seconds: float) -> Waits:
        """With one more observation."""
        weights = [w * DECAY for w in self.weights]
        weights[bisect.bisect_left(EDGES, seconds)] += 1.0
        return Waits(tuple(weights), self.total * DECAY + 1.0, self.count + 1)

    def left(self, elapsed: float) -> float:
        """Expected seconds still to wait after `elapsed`, to the precision of a bucket.

        What is longer than anything seen is expected to take as long again.
        """
        start = bisect.bisect_left(EDGES, elapsed)
        left, seconds, low = sum(self.weights[start:]), 0.0, elapsed
        if left <= 0.0:
            return elapsed
        for edge, weight in zip(EDGES[start:], self.weights[start:], strict=False):
            seconds += weight * ((low + edge) / 2 - elapsed)
            low = edge
        return (seconds + self.weights[-1] * max(EDGES[-1] - elapsed, elapsed)) / left
