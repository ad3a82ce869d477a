"""Where the time of a run goes.

Invariant: at any moment exactly one share is running, so the shares add up to the wall clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

SHARES = ("rollout", "training", "publishing", "evaluation", "checkpoint", "waiting")


class ShareClock:
    """Wall-clock seconds by share; what is in no `within` block counts as waiting."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(SHARES, 0.0)
        self._share, self._since = "waiting", time.monotonic()

    @contextmanager
    def within(self, share: str) -> Iterator[None]:
        """Count the block's time as `share`."""
        outer = self._switch(share)
        try:
            yield
        finally:
            self._switch(outer)

    def _switch(self, share: str) -> str:
        now = time.monotonic()
        self.seconds[self._share] += now - self._since
        outer, self._share, self._since = self._share, share, now
        return outer

    def snapshot(self) -> dict[str, float]:
        """Seconds so far, the running share included."""
        self._switch(self._share)
        return dict(self.seconds)
