"""Counters of a whole run.

Invariant: a checkpoint holds them, so after a resume they go on where the checkpoint left them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from tiderl.training.clock import SHARES

if TYPE_CHECKING:
    from tiderl.engine.base import EngineStats


@dataclass
class Totals:
    """Seconds are wall clock; tokens carry loss unless they are called prompt or cached."""

    updates: int = 0
    version: int = 0
    wall_s: float = 0.0
    training_s: float = 0.0
    goodput_tokens: int = 0
    episodes: int = 0
    episodes_masked: int = 0
    versions_published: int = 0
    empty_updates: int = 0
    empty_in_a_row: int = 0
    max_logprob_gap: float = 0.0
    peak_memory_mb: float = 0.0
    first_update_loss: float | None = None
    evaluation_before: dict[str, Any] | None = None
    later_prompt_tokens: int = 0
    later_cached_tokens: int = 0
    reprefilled_tokens: int = 0
    recent_success: list[float] = field(default_factory=list)
    shares_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SHARES, 0.0))

    @property
    def goodput(self) -> float:
        """Loss tokens trained on within the staleness bound / second of wall clock of training."""
        return self.goodput_tokens / self.training_s if self.training_s else 0.0

    @property
    def kv_hit_rate(self) -> float:
        """Prompt tokens served from KV / prompt tokens, over turns >= 2."""
        if not self.later_prompt_tokens:
            return 1.0
        return self.later_cached_tokens / self.later_prompt_tokens

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Totals:
        """The inverse of `to_json`; unknown keys are left out."""
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in data.items() if k in known})


class EngineCounters:
    """Adds what the engines counted since the last look to the run's totals."""

    KEYS = ("later_prompt_tokens", "later_cached_tokens", "reprefilled_tokens")

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], int] = {}

    def add_to(self, totals: Totals, engine: str, stats: EngineStats) -> None:
        """Call as often as wanted; each count of an engine is added once."""
        for key in self.KEYS:
            now = getattr(stats, key)
            setattr(totals, key, getattr(totals, key) + now - self._seen.get((engine, key), 0))
            self._seen[engine, key] = now
