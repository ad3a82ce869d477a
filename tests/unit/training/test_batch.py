"""Which groups, members and tokens enter the loss, and what is counted."""

from __future__ import annotations

import numpy as np
import pytest

from tiderl.env.ends import EndReason
from tiderl.errors import ConfigError
from tiderl.training.batch import build_batch
from tiderl.training.settings import LossSettings
from tiderl.trajectory.group import Group
from tiderl.trajectory.record import TokenRecord
from tiderl.trajectory.trajectory import Trajectory


def member(
    reward: float, end: EndReason = EndReason.SUCCESS, sampled: int = 2, masked: bool = False
) -> Trajectory:
    record = TokenRecord()
    record.append_context([1, 2, 3])
    if sampled:
        record.append_sampled([4] * sampled, [-1.0] * sampled, [0] * sampled)
        record.append_context([5])
        record.append_sampled([6], [-0.5], [1])
    made = Trajectory(
        "e", "t", "g", 0, 0, 0, "env", "train", [record], [reward], end, False, 2 if sampled else 0
    )
    return made.masked() if masked else made


def group(*members: Trajectory, ordinal: int = 0) -> Group:
    return Group(f"t{ordinal}", ordinal, list(members))


def test_loss_tokens_carry_their_turn_version_and_log_prob() -> None:
    batch = build_batch([group(member(1.0), member(0.0))], LossSettings())
    assert (batch.tokens, batch.episodes, batch.denominator) == (6, 2, 6.0)
    first = batch.records[0]
    assert first.item.targets.tolist() == [3, 4, 6]
    assert first.turns.tolist() == [0, 0, 1]
    assert first.versions.tolist() == [0, 0, 1]
    assert first.old.tolist() == [-1.0, -1.0, -0.5]
    assert first.advantage == -batch.records[1].advantage > 0


@pytest.mark.parametrize("end", [EndReason.INFRASTRUCTURE, EndReason.CANCELLED])
def test_c67_invalid_members_are_in_no_mean_no_count_and_no_loss(end: EndReason) -> None:
    clean = build_batch([group(member(1.0), member(0.0))], LossSettings())
    dirty = build_batch([group(member(1.0), member(0.0, end, 5), member(0.0))], LossSettings())
    assert dirty.masked_episodes == 1
    assert (dirty.tokens, dirty.denominator) == (clean.tokens, clean.denominator)
    assert [r.advantage for r in dirty.records] == [r.advantage for r in clean.records]


def test_c70_an_episode_in_which_no_model_was_called_is_masked() -> None:
    batch = build_batch([group(member(1.0), member(0.0), member(0.0, sampled=0))], LossSettings())
    assert batch.masked_episodes == 1
    assert batch.episodes == 2


def test_a_group_with_fewer_than_two_valid_members_is_skipped_and_counted() -> None:
    failed = member(0.0, EndReason.INFRASTRUCTURE)
    batch = build_batch([group(member(1.0), failed), group(failed, failed, ordinal=1)], LossSettings())
    assert batch.skipped_groups == 2
    assert batch.masked_episodes == 3
    assert not batch.records
    assert not batch.denominator


def test_c76_a_group_made_with_one_member_is_an_error() -> None:
    with pytest.raises(ConfigError, match="group size"):
        build_batch([group(member(1.0))], LossSettings())


def test_c78_zero_variance_groups_leave_loss_and_denominator_or_stay_in_both() -> None:
    groups = [group(member(1.0), member(0.0)), group(member(1.0), member(1.0), ordinal=1)]
    dropped = build_batch(groups, LossSettings())
    assert (dropped.dropped_groups, dropped.tokens, dropped.denominator) == (1, 6, 6.0)
    kept = build_batch(groups, LossSettings(zero_variance="keep"))
    assert (kept.dropped_groups, kept.zero_variance_groups) == (0, 1)
    assert (kept.tokens, kept.denominator) == (12, 12.0)
    assert [r.advantage for r in kept.records[2:]] == [0.0, 0.0]


def test_a_masked_member_counts_in_the_baseline_only() -> None:
    batch = build_batch(
        [group(member(1.0), member(0.0, masked=True))], LossSettings(aggregation="seq_mean_token_mean")
    )
    assert batch.episodes == 1
    assert batch.denominator == 1.0
    assert batch.records[0].advantage == pytest.approx(0.7071, abs=1e-3)


def test_c79_nothing_to_learn_is_told() -> None:
    equal = build_batch([group(member(1.0), member(1.0))], LossSettings(zero_variance="keep"))
    assert not equal.informative
    assert build_batch([group(member(1.0), member(0.0))], LossSettings()).informative


def test_the_order_of_groups_is_the_batchs_own() -> None:
    groups = [group(member(float(i % 2)), member(0.5), ordinal=i) for i in range(5)]
    one = build_batch(groups, LossSettings())
    two = build_batch(groups[::-1], LossSettings())
    assert [r.advantage for r in one.records] == [r.advantage for r in two.records]


def test_a_forked_episode_is_one_sequence() -> None:
    forked = member(1.0)
    forked.records.append(member(1.0).records[0])
    batch = build_batch([group(forked, member(0.0))], LossSettings(aggregation="seq_mean_token_mean"))
    assert batch.denominator == 2.0
    assert len(batch.records) == 3
    assert [r.weight for r in batch.records] == pytest.approx([1 / 6, 1 / 6, 1 / 3])


def test_a_record_that_begins_with_a_sampled_token_is_refused() -> None:
    bad = TokenRecord()
    bad.append_sampled([1, 2], [-1.0, -1.0], [0, 0])
    broken = member(1.0)
    broken.records = [bad]
    with pytest.raises(ValueError, match="prompt"):
        build_batch([group(broken, member(0.0))], LossSettings())
    assert np.isfinite(build_batch([group(member(1.0), member(0.0))], LossSettings()).denominator)
