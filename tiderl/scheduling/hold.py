"""Keep or let go: how much a context is worth to keep while its environment works.

The figure is an index, in 1/s: the best, over all horizons, of the chance to be back by then over the
expected seconds of holding until then (Gittins' index of "hold, and give up after"). Times the seconds of
computing the context again it is what holding saves per second. It is conditioned on the time already waited:
under heavy tails, the longer a task is away, the longer it will be.

Invariant: a figure is computed once a tick for each kind of wait and bucket of time waited.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping

from tiderl.scheduling.views import State, Task
from tiderl.scheduling.waits import EDGES, Waits

PRIOR, PRIOR_BUCKETS = 2.0, 41
"""Two observations, spread over the buckets up to 100 s: until more is known, the hazard falls with time."""

BACK = 1e9  # index of a task that is back already

_WIDTHS = tuple(high - low for low, high in zip((0.0, *EDGES), (*EDGES, 2 * EDGES[-1]), strict=True))


class Returns:
    """When paused tasks come back, for one tick."""

    def __init__(self, now: float, waits: Mapping[str, Waits]) -> None:
        self._now, self._waits = now, waits
        self._known: dict[tuple[str, int], float] = {}

    def index(self, task: Task) -> float:
        """What holding it is worth, per second of computing it again."""
        if task.state is not State.PAUSED:
            return BACK
        return self._at(task.wait, bisect.bisect_left(EDGES, self._now - task.since))

    def weight(self, task: Task) -> float:
        """Its index over that of a wait that begins: 1.0, or less the longer it is overdue."""
        return min(1.0, self.index(task) / self._at(task.wait, 0)) if task.state is State.PAUSED else 1.0

    def _at(self, wait: str, bucket: int) -> float:
        found = self._known.get((wait, bucket))
        if found is None:
            found = self._known[wait, bucket] = _index(self._waits.get(wait, Waits()).weights, bucket)
        return found


def _index(weights: tuple[float, ...], start: int) -> float:
    mass = [w + (PRIOR / PRIOR_BUCKETS if at < PRIOR_BUCKETS else 0.0) for at, w in enumerate(weights)]
    left = sum(mass[start:])
    if left <= 0.0:  # longer than anything seen or expected
        return 1.0 / EDGES[min(start, len(EDGES) - 1)]
    best = back = held = 0.0
    for width, each in zip(_WIDTHS[start:], mass[start:], strict=True):
        held += width * (1.0 - back - each / left / 2)
        back += each / left
        if back > best * held:
            best = back / held
    return best
