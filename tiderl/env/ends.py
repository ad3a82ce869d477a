"""How an episode ends. Invariant: every finished episode has exactly one `EndReason`."""

from __future__ import annotations

from enum import StrEnum


class EndReason(StrEnum):
    """Why an episode ended. The first two terminate, the others truncate."""

    SUCCESS = "success"
    FAILURE = "failure"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT_LENGTH = "context_length"
    TIME = "time"
    INVALID_ACTIONS = "invalid_actions"
    CANCELLED = "cancelled"
    INFRASTRUCTURE = "infrastructure"

    @property
    def terminal(self) -> bool:
        """True when the task ended by its own rules (`terminated`), False for `truncated`."""
        return self in (EndReason.SUCCESS, EndReason.FAILURE)

    @property
    def valid(self) -> bool:
        """True when the episode's reward may be used; infrastructure and cancellation are masked."""
        return self not in (EndReason.INFRASTRUCTURE, EndReason.CANCELLED)
