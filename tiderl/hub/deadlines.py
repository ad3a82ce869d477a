"""The table through which a worker's sessions tell the watchdog process their deadlines.

It is shared memory, made before the fork: the serving process writes, the watchdog process reads, and
neither waits for the other. So a deadline holds even while an environment keeps the interpreter's lock.

Invariant: a slot whose deadline is not zero belongs to the session whose id stands beside it.
"""

from __future__ import annotations

import mmap
import time

_ID_BYTES = 32


class DeadlineTable:
    """`slots` deadlines (monotonic seconds) with the session each belongs to and its limit in seconds."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._memory = mmap.mmap(-1, slots * (16 + _ID_BYTES))
        view = memoryview(self._memory)
        self._deadlines = view[: 8 * slots].cast("d")
        self._limits = view[8 * slots : 16 * slots].cast("d")
        self._ids = view[16 * slots :]

    def assign(self, slot: int, session: str) -> None:
        """Give a free slot to a session (at most 32 ASCII characters of its id are kept)."""
        start = slot * _ID_BYTES
        self._ids[start : start + _ID_BYTES] = session.encode("ascii")[:_ID_BYTES].ljust(_ID_BYTES)

    def arm(self, slot: int, limit: float) -> None:
        """From now on the session's call has `limit` seconds."""
        self._limits[slot] = limit
        self._deadlines[slot] = time.monotonic() + limit

    def disarm(self, slot: int) -> None:
        """The call has ended."""
        self._deadlines[slot] = 0.0

    def overdue(self, now: float) -> tuple[str, float] | None:
        """(session id, its limit) of one call past its deadline, the earliest; None when there is none."""
        late = [(deadline, slot) for slot, deadline in enumerate(self._deadlines) if 0.0 < deadline <= now]
        if not late:
            return None
        slot = min(late)[1]
        start = slot * _ID_BYTES
        return bytes(self._ids[start : start + _ID_BYTES]).decode("ascii").strip(), self._limits[slot]
