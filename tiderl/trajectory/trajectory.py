"""One episode as training and evaluation see it.

Invariants: the reward is the sum of the turns' rewards, never the last one; an episode that
infrastructure ended, or in which no model was called, is not `valid` and its reward means nothing;
images are known by content hash, one array each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..env.ends import EndReason
from ..env.images import image_hash
from ..env.messages import Message, images_of
from .record import TokenRecord

if TYPE_CHECKING:
    import numpy as np


@dataclass
class Trajectory:
    """The record of one episode. `group` and `ordinal` name its place in the task stream."""

    episode_id: str
    task: Any
    group: str
    ordinal: int
    member: int
    seed: int
    env_id: str
    split: str
    records: list[TokenRecord] = field(default_factory=list)
    """One, or several when the template could not keep the prefix (`forks`)."""
    rewards: list[float] = field(default_factory=list)
    """One a turn."""
    end: EndReason = EndReason.CANCELLED
    """Why it ended; cancelled until it has ended."""
    success: bool = False
    turns: int = 0
    """Replies of the model."""
    messages: list[Message] = field(default_factory=list)
    invalid_actions: int = 0
    forks: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Where the time went, by part."""
    note: str = ""
    """What happened, for people: the error that ended it."""

    @property
    def reward(self) -> float:
        """The return: the sum of all turns' rewards."""
        return math.fsum(self.rewards)

    @property
    def valid(self) -> bool:
        """True when the reward counts: it ended by itself or by a limit, and a model was called."""
        called = self.sampled_tokens > 0 if self.records else self.turns > 0
        return self.end.valid and called

    @property
    def sampled_tokens(self) -> int:
        """Tokens the engine sampled."""
        return sum(record.sampled_tokens for record in self.records)

    @property
    def loss_tokens(self) -> int:
        """Tokens that carry loss."""
        return sum(record.loss_tokens for record in self.records)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that produced a token; -1 when none was sampled."""
        return min((r.oldest_version for r in self.records if r.oldest_version >= 0), default=-1)

    def staleness(self, version: int) -> int:
        """`version` minus the oldest version that produced a token; 0 when none was sampled."""
        oldest = self.oldest_version
        return version - oldest if oldest >= 0 else 0

    @property
    def images(self) -> dict[str, np.ndarray]:
        """The images of the messages by content hash, in order of appearance."""
        found: dict[str, np.ndarray] = {}
        for message in self.messages:
            for image in images_of(message):
                found.setdefault(image_hash(image), image)
        return found

    def masked(self) -> Trajectory:
        """A copy that counts in its group's baseline but carries no loss."""
        return replace(self, records=[record.masked() for record in self.records])
