"""What `ctb` remembers of each engine: how much time it has to spare, and how far it may be overbooked.

Time is to spare when no turn runs, and also when few do, as a step takes a time of its own that turns share.
How much follows from how long turns take beside how many others: a + b * batch, fitted over what was seen.
One per cent more turns in flight bring a / (a + b * batch) per cent more throughput; a part of that may be
spent on computing contexts again.

Invariant: only differences of times are used. Kappa, the overbooking, grows only while there is time to
spare, nothing waits and the limit binds; it falls while contexts are computed again in time that is not
to spare, and at once after a preemption.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tiderl.scheduling.views import EngineView

KAPPA_LOW, KAPPA_HIGH, GROWTH, CUT, SOON = 0.5, 16.0, 0.5, 0.8, 0.3
"""Bounds of kappa, its growth a window by the idle share left, and what a preemption leaves of it."""
WINDOW_TURNS, WINDOW_S = (
    10.0,
    1.0,
)  # shares are averaged over so many turns, and not less than so many seconds
PRIOR_BATCH, PRIOR_WEIGHT = 8.0, 0.02
"""Until batches of different sizes were seen, a step's own time is that of so many turns."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """One engine, as of the last tick; shares of time and batch are moving averages."""

    busy: float = 1.0  # share in which it worked on a turn
    again: float = 0.0  # share it spent computing again what was let go
    owed: float = 0.0  # share it will soon spend on what was let go, moving average
    batch: float = 1.0  # turns it worked on while it worked
    kappa: float = 1.0
    window: float = WINDOW_S  # seconds of the averages
    running: int = 0
    bound: bool = False  # whether the limit kept tasks out
    blocked: bool = False  # whether a READY task waited for room
    lost: int = 0
    preemptions: int = 0
    fit: tuple[float, ...] = (0.0,) * 5
    """Decayed sums of 1, batch, batch**2, turn seconds, batch * turn seconds."""

    @property
    def idle(self) -> float:
        """Share of time to spare: in which no turn ran, or that of the steps' own."""
        return 1.0 - self.busy * (1.0 - self._fixed())

    def owing(self, seconds: float) -> Pressure:
        """With so many more seconds of contexts let go, of which the part `SOON` is needed in this window."""
        return replace(self, owed=self.owed + SOON * seconds / self.window) if seconds else self

    def _fixed(self) -> float:
        n, b, bb, t, bt = self.fit
        if n <= 0.0 or t <= 0.0:
            return PRIOR_BATCH / (PRIOR_BATCH + self.batch)
        mean, seconds = b / n, t / n
        weight = PRIOR_WEIGHT * mean * mean
        slope = bt / n - mean * seconds + weight * seconds / (PRIOR_BATCH + mean)
        slope = min(max(slope / (bb / n - mean * mean + weight), 0.0), seconds / mean)
        own = seconds - slope * mean
        return own / (own + slope * self.batch) if own > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class Memory:
    """All engines, as of the last tick."""

    at: float | None = None
    engines: Mapping[str, Pressure] = field(default_factory=dict)


def observe(before: Pressure | None, view: EngineView, seconds: float, spare: float) -> Pressure:
    """`before`, `seconds` later; the part `spare` of idle time may go into computing contexts again."""
    if before is None:
        return Pressure(lost=view.lost, preemptions=view.preemptions)
    window = max(WINDOW_S, WINDOW_TURNS * view.turn_s)
    part = min(seconds / window, 0.5)
    new = 1.0 - math.exp(-part)
    busy = before.busy + new * ((1.0 if before.running else 0.0) - before.busy)
    batch = before.batch + (new * (before.running - before.batch) if before.running else 0.0)
    again = before.again * (1.0 - new) + max(view.lost - before.lost, 0) * view.prefill_s / window
    fit, kappa = before.fit, before.kappa
    if before.running and view.turn_s > 0.0:
        seen = (1.0, batch, batch * batch, view.turn_s, batch * view.turn_s)
        fit = tuple(math.exp(-part / 10) * f + part * s for f, s in zip(fit, seen, strict=True))
    owed = before.owed * (1.0 - new)
    after = replace(before, busy=busy, batch=batch, again=again, owed=owed, fit=fit, window=window)
    over = again - spare * after.idle
    if view.preemptions > before.preemptions:
        kappa *= CUT
    elif kappa < 1.0:
        kappa = min(1.0, kappa + 0.05 * part)
    elif over < 0.0 and before.bound and not before.blocked:
        kappa *= 1.0 - part * over * GROWTH
    elif over > 0.0:
        kappa = max(1.0, kappa * (1.0 - part * min(over, 0.5)))
    kappa = min(max(kappa, KAPPA_LOW), KAPPA_HIGH)
    return replace(after, kappa=kappa, lost=view.lost, preemptions=view.preemptions)
