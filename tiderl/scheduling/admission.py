"""Which waiting episodes may start now: pure decisions on frozen snapshots.

Invariant: the reservations of all admitted episodes never pass the engine's capacity, in tokens or in
sessions; episodes are admitted in group order, so the head of the queue is never overtaken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class WaitingEpisode:
    """An episode that asks to start. `order` ranks it: (group ordinal, member)."""

    key: str
    order: tuple[int, int]
    reserve_tokens: int


@dataclass(frozen=True)
class EngineLoad:
    """What one engine has promised so far, in tokens and sessions."""

    capacity_tokens: int
    reserved_tokens: int
    max_sessions: int
    sessions: int
    block_size: int = 1


class AdmissionPolicy(Protocol):
    """Chooses which of the waiting episodes start now."""

    def admit(self, waiting: Sequence[WaitingEpisode], load: EngineLoad) -> tuple[str, ...]:
        """Keys of the episodes to start, in the order in which to start them."""
        ...


class FixedBudget:
    """Admit in group order while the sum of reservations fits the engine's KV tokens."""

    def admit(self, waiting: Sequence[WaitingEpisode], load: EngineLoad) -> tuple[str, ...]:
        """See `AdmissionPolicy.admit`. Stops at the first episode that does not fit (no overtaking)."""
        tokens, sessions, chosen = load.reserved_tokens, load.sessions, []
        for episode in sorted(waiting, key=lambda e: e.order):
            need = -(-episode.reserve_tokens // load.block_size) * load.block_size
            if sessions + 1 > load.max_sessions or tokens + need > load.capacity_tokens:
                break
            tokens, sessions = tokens + need, sessions + 1
            chosen.append(episode.key)
        return tuple(chosen)
