"""What the parent tells the scheduler about a request, inside the request's id.

Invariant: `parse(str(name) + anything vLLM appends) == name`; an id that is not ours parses to None.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_OURS = re.compile(r"(\d+)~([^~]*)~(\d+)(?:~(\d+)~(\d+)~([kf]))?(?:-[0-9a-f]+)?")


@dataclass(frozen=True)
class RequestName:
    """A resumable request of one of our sessions."""

    slot: int
    session: str
    epoch: int
    """Counts the engine's requests; a session that is replayed gets a new one."""
    turn: int = 0
    """Which turn of the session its first one is, from 1; 0: not told, the scheduler's memory decides."""
    known: int = 0
    """Tokens of its first prompt that were computed before, here or on another engine."""
    kept: bool = False
    """Its cache salt is to stay as it is, though it may be of older weights."""

    def __str__(self) -> str:
        text = f"{self.slot:04d}~{self.session}~{self.epoch}"
        if not self.turn:
            return text
        return f"{text}~{self.turn}~{self.known}~{'k' if self.kept else 'f'}"

    @classmethod
    def parse(cls, request_id: str) -> RequestName | None:
        """The name in a request id; None when the request is none of our sessions'."""
        found = _OURS.fullmatch(request_id)
        if found is None:
            return None
        slot, session, epoch, turn, known, kept = found.groups()
        return cls(int(slot), session, int(epoch), int(turn or 0), int(known or 0), kept == "k")
