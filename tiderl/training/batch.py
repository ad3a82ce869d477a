"""Groups of trajectories turned into what the trainer computes: scored records with advantages and weights.

Invariant: invalid members, groups with fewer than two valid members and (by choice) zero-variance groups
carry neither loss nor denominator, and each of them is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tiderl.training.advantages import group_advantages, zero_variance
from tiderl.training.aggregation import denominator, token_weight
from tiderl.training.packing import Item
from tiderl.training.settings import LossSettings

if TYPE_CHECKING:
    from tiderl.trajectory.group import Group
    from tiderl.trajectory.record import TokenRecord


@dataclass(frozen=True)
class Scored:
    """One record with everything the loss needs of it; arrays are over its loss tokens."""

    item: Item
    old: np.ndarray
    """The sampler's log-probs."""
    versions: np.ndarray
    turns: np.ndarray
    """Turn index of each loss token, from 0."""
    advantage: float
    weight: float
    """Aggregation weight of each of its loss tokens."""


@dataclass
class Batch:
    """Scored records of some groups and what was left out."""

    records: list[Scored] = field(default_factory=list)
    denominator: float = 0.0
    tokens: int = 0
    """Loss tokens."""
    episodes: int = 0
    dropped_groups: int = 0
    """Zero-variance groups taken out of the loss."""
    zero_variance_groups: int = 0
    """Zero-variance groups, dropped or kept."""
    skipped_groups: int = 0
    """Groups with fewer than two valid members."""
    masked_episodes: int = 0
    """Invalid members (infrastructure, cancelled, nothing sampled)."""
    informative: bool = False
    """Some advantage is not zero."""


def loss_positions(record: TokenRecord) -> np.ndarray:
    """Positions of the sampled tokens, ascending int64.

    Raises:
        ValueError: the first token is a sampled one, so nothing predicts it.
    """
    positions = np.flatnonzero(np.asarray(record.mask, dtype=np.int64))
    if len(positions) and positions[0] == 0:
        raise ValueError("a record begins with a sampled token: a prompt of at least one token is needed")
    return positions


def score_record(record: TokenRecord, advantage: float = 0.0, weight: float = 1.0) -> Scored | None:
    """The record as the trainer sees it; None when it has no loss token."""
    positions = loss_positions(record)
    if not len(positions):
        return None
    turns = np.zeros(len(record.ids), dtype=np.int64)
    for index, (start, end) in enumerate(record.turns):
        turns[start:end] = index
    return Scored(
        item=Item(np.asarray(record.ids, dtype=np.int64), positions),
        old=np.asarray(record.logprobs, dtype=np.float64)[positions],
        versions=np.asarray(record.versions, dtype=np.int64)[positions],
        turns=turns[positions],
        advantage=advantage,
        weight=weight,
    )


def _order(group: Group) -> tuple[Any, ...]:
    return (group.ordinal, str(group.task))


def build_batch(groups: Sequence[Group], loss: LossSettings) -> Batch:
    """Score `groups`, in an order of their own, so that the caller's order changes nothing.

    Raises:
        ConfigError: a group was made with a single member.
    """
    batch = Batch()
    for group in sorted(groups, key=_order):
        members = list(group.members)
        valid = [bool(m.valid) for m in members]
        rewards = [float(m.reward) for m in members]
        batch.masked_episodes += valid.count(False)
        if len(members) > 1 and sum(valid) < 2:
            batch.skipped_groups += 1
            continue
        advantages = group_advantages(rewards, valid, kind=loss.advantage, std=loss.std)
        if zero_variance(rewards, valid):
            batch.zero_variance_groups += 1
            if loss.zero_variance == "drop":
                batch.dropped_groups += 1
                continue
        for member, ok, advantage in zip(members, valid, advantages, strict=True):
            if not ok:
                continue
            tokens = sum(sum(r.mask) for r in member.records)
            if not tokens:  # masked by choice: in the baseline, not in the loss
                continue
            weight = token_weight(loss.aggregation, tokens, loss.token_norm)
            scored = [score_record(r, float(advantage), weight) for r in member.records]
            batch.records.extend(s for s in scored if s is not None)
            batch.denominator += denominator(loss.aggregation, tokens)
            batch.tokens += tokens
            batch.episodes += 1
            batch.informative |= bool(advantage != 0.0)
    return batch
