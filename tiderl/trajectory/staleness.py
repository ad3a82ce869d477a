"""What happens to trajectories that are too old, decided when a group is shipped to the trainer.

Invariants: staleness is the trainer's version at that moment minus the oldest version that produced a
token, so time spent in a queue counts; every decision reports the lengths of what was kept and of what
was lost, because long episodes are the ones that grow old. Pure: nothing is changed in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from .group import Group


class StalePolicy(StrEnum):
    """What to do with a member that is older than the bound."""

    DROP = "drop"
    """Take it out of the group: it is in neither baseline nor loss."""
    MASK = "mask"
    """Keep its reward in the baseline, take its tokens out of the loss."""
    WAIT = "wait"
    """Keep it whole. The bound is held by not publishing while older work is out (`may_publish`)."""


@dataclass(frozen=True)
class Shipment:
    """A group as it may be trained on, and what the bound did to it. Lengths are sampled tokens."""

    group: Group | None
    """None when fewer than `n_min` valid members are left: issue its task again."""
    kept: tuple[int, ...]
    """Lengths of the valid members that carry loss."""
    lost: tuple[int, ...]
    """Lengths of the valid members that were dropped or masked, or went down with the group."""
    staleness: int
    """The highest staleness among the valid members before the decision."""

    @property
    def mean_kept(self) -> float:
        """Mean length of what carries loss; 0 when nothing does."""
        return sum(self.kept) / len(self.kept) if self.kept else 0.0

    @property
    def mean_lost(self) -> float:
        """Mean length of what the bound took; 0 when it took nothing."""
        return sum(self.lost) / len(self.lost) if self.lost else 0.0


def ship(group: Group, *, version: int, bound: int, policy: StalePolicy, n_min: int = 2) -> Shipment:
    """Decide on a finished group when the trainer, at `version`, asks for it.

    Args:
        group: as it was sampled.
        version: the trainer's version now.
        bound: the highest staleness that may carry loss, in versions.
        policy: what to do with members above it.
        n_min: the fewest valid members a group can be trained with.
    """
    valid = group.valid_members
    highest = max((member.staleness(version) for member in valid), default=0)
    old = [id(member) for member in valid if member.staleness(version) > bound]

    def lengths(stale: bool) -> tuple[int, ...]:
        return tuple(member.sampled_tokens for member in valid if (id(member) in old) is stale)

    members = group.members
    if policy is StalePolicy.DROP:
        members = [member for member in members if id(member) not in old]
    elif policy is StalePolicy.MASK:
        members = [member.masked() if id(member) in old else member for member in members]
    shipped = Group(group.task, group.ordinal, members)
    nothing_left = policy is not StalePolicy.WAIT and len(old) == len(valid)
    if len(shipped.valid_members) < n_min or nothing_left:
        return Shipment(None, (), tuple(member.sampled_tokens for member in valid), highest)
    if policy is StalePolicy.WAIT:
        return Shipment(shipped, lengths(True) + lengths(False), (), highest)
    return Shipment(shipped, lengths(False), lengths(True), highest)


def may_publish(version: int, oldest_versions: Iterable[int], bound: int) -> bool:
    """Whether the trainer may step to `version` with this work still out (the policy `wait`).

    Args:
        version: the version after the step.
        oldest_versions: of each episode in flight or waiting to be shipped; -1 when nothing was sampled.
        bound: the highest staleness that may carry loss, in versions.
    """
    return all(version - oldest <= bound for oldest in oldest_versions if oldest >= 0)
