"""The trajectories of one task that share a baseline.

Invariant: whatever is computed over a group is computed over its valid members only; an invalid member is
in no mean, no deviation, no count and no loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from .trajectory import Trajectory


@dataclass
class Group:
    """A task's trajectories; `ordinal` is the task's place in the stream."""

    task: Any
    ordinal: int
    members: list[Trajectory] = field(default_factory=list)

    @property
    def valid_members(self) -> list[Trajectory]:
        """Members whose reward counts."""
        return [member for member in self.members if member.valid]

    @property
    def rewards(self) -> list[float]:
        """Rewards of the valid members."""
        return [member.reward for member in self.valid_members]

    @property
    def mean(self) -> float:
        """Mean reward of the valid members; nan when there are none."""
        rewards = self.rewards
        return math.fsum(rewards) / len(rewards) if rewards else math.nan

    @property
    def std(self) -> float:
        """Deviation of the valid members' rewards with n - 1 in the divisor; nan below two of them."""
        rewards, mean = self.rewards, self.mean
        if len(rewards) < 2:
            return math.nan
        return math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))

    @property
    def zero_variance(self) -> bool:
        """True when all valid members have the same reward, so that a baseline leaves nothing to learn."""
        rewards = self.rewards
        return not rewards or max(rewards) - min(rewards) <= 1e-12

    @property
    def loss_tokens(self) -> int:
        """Loss tokens of the valid members."""
        return sum(member.loss_tokens for member in self.valid_members)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that produced a token of a valid member; -1 when there is none."""
        found = (member.oldest_version for member in self.valid_members)
        return min((version for version in found if version >= 0), default=-1)

    def staleness(self, version: int) -> int:
        """`version` minus `oldest_version`; 0 when nothing was sampled."""
        oldest = self.oldest_version
        return version - oldest if oldest >= 0 else 0
