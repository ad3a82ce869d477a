"""Rewards, validity and staleness of trajectories and groups."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.env import messages as m
from tiderl.env.ends import EndReason
from tiderl.trajectory.group import Group
from tiderl.trajectory.staleness import StalePolicy, may_publish, ship
from tiderl.trajectory.trajectory import Trajectory


def test_t74_reward_is_the_sum_of_all_turns(make_trajectory):
    assert make_trajectory(rewards=(0.2, 0.0, 0.8)).reward == 1.0
    assert make_trajectory(rewards=(0.1,) * 10).reward == 1.0


@pytest.mark.parametrize("end", list(EndReason))
def test_c67_t58_only_infrastructure_and_cancellation_are_invalid(end, make_trajectory):
    expected = end not in (EndReason.INFRASTRUCTURE, EndReason.CANCELLED)
    assert make_trajectory(end=end).valid is expected


def test_c70_episode_without_a_model_call_is_not_valid(make_trajectory):
    assert not make_trajectory(end=EndReason.FAILURE, tokens=0).valid
    empty = Trajectory("e", "t", "g", 0, 0, 0, "demo/Safe-v0", "test", end=EndReason.FAILURE)
    assert not empty.valid
    empty.turns = 2  # a policy that keeps no tokens
    assert empty.valid


def test_trajectory_is_not_valid_before_it_has_ended():
    assert not Trajectory("e", "t", "g", 0, 0, 0, "demo/Safe-v0", "test", turns=3).valid


def test_c32_staleness_counts_from_the_oldest_token_at_the_moment_it_is_asked(make_trajectory):
    member = make_trajectory(rewards=(0.0, 0.0, 1.0), version=3)
    assert [member.staleness(version) for version in (3, 5, 9)] == [0, 2, 6]
    assert make_trajectory(tokens=0).staleness(9) == 0


def test_c51_images_are_kept_once_by_content(make_trajectory):
    black, white = np.zeros((2, 3, 3), np.uint8), np.full((2, 3, 3), 255, np.uint8)
    member = make_trajectory(messages=[m.user("a", black, white), m.tool("c", "look", black.copy())])
    assert len(member.images) == 2
    assert [int(image.max()) for image in member.images.values()] == [0, 255]


outcomes = st.lists(
    st.tuples(
        st.floats(-5, 5), st.sampled_from([EndReason.SUCCESS, EndReason.TIME, EndReason.INFRASTRUCTURE])
    ),
    max_size=8,
)


@given(made=outcomes)
def test_c67_invalid_members_are_in_no_mean_deviation_count_or_loss(made, make_trajectory):
    group = Group("t", 0, [make_trajectory(rewards=(reward,), end=end) for reward, end in made])
    rewards = [reward for reward, end in made if end is not EndReason.INFRASTRUCTURE]
    assert group.rewards == rewards
    assert group.loss_tokens == 3 * len(rewards)
    if not rewards:
        assert math.isnan(group.mean)
    else:
        assert group.mean == pytest.approx(np.mean(rewards))
    if len(rewards) < 2:
        assert math.isnan(group.std)
    else:
        assert group.std == pytest.approx(np.std(rewards, ddof=1), abs=1e-12)
    assert group.zero_variance is (len(set(rewards)) <= 1 or max(rewards) - min(rewards) <= 1e-12)


def test_group_is_as_old_as_its_oldest_valid_member(make_trajectory):
    members = [
        make_trajectory(version=5),
        make_trajectory(version=2, end=EndReason.INFRASTRUCTURE),
        make_trajectory(version=4),
    ]
    group = Group("t", 0, members)
    assert (group.oldest_version, group.staleness(6)) == (4, 2)
    assert Group("t", 0).oldest_version == -1
    assert Group("t", 0).staleness(6) == 0


@pytest.fixture(scope="module")
def mixed(make_trajectory):
    """Three members of which the longest is the oldest."""
    return Group(
        "t",
        4,
        [
            make_trajectory(version=9, tokens=2, rewards=(1.0,)),
            make_trajectory(version=8, tokens=3, rewards=(0.0,)),
            make_trajectory(version=5, tokens=40, rewards=(1.0,)),
            make_trajectory(version=9, end=EndReason.INFRASTRUCTURE),
        ],
    )


def test_c33_drop_takes_only_the_stale_member_and_reports_lengths(mixed):
    shipment = ship(mixed, version=9, bound=1, policy=StalePolicy.DROP)
    assert [member.reward for member in shipment.group.valid_members] == [1.0, 0.0]
    assert len(shipment.group.members) == 3
    assert (shipment.kept, shipment.lost, shipment.staleness) == ((2, 3), (40,), 4)
    assert (shipment.mean_kept, shipment.mean_lost) == (2.5, 40.0)


def test_c33_mask_keeps_the_baseline_and_takes_the_loss(mixed):
    shipment = ship(mixed, version=9, bound=1, policy=StalePolicy.MASK)
    assert shipment.group.rewards == mixed.rewards
    assert [member.loss_tokens for member in shipment.group.valid_members] == [2, 3, 0]
    assert mixed.loss_tokens == 45
    assert (shipment.kept, shipment.lost) == ((2, 3), (40,))


def test_c33_wait_keeps_everything_and_holds_the_bound_by_not_publishing(mixed):
    shipment = ship(mixed, version=9, bound=1, policy=StalePolicy.WAIT)
    assert sorted(shipment.kept) == [2, 3, 40]
    assert shipment.lost == ()
    assert may_publish(6, [5, 9, -1], bound=1)
    assert not may_publish(7, [5, 9, -1], bound=1)


@pytest.mark.parametrize("policy", list(StalePolicy))
def test_group_within_the_bound_ships_whole(policy, mixed):
    shipment = ship(mixed, version=9, bound=4, policy=policy)
    assert shipment.group.rewards == mixed.rewards
    assert shipment.group.loss_tokens == 45
    assert shipment.lost == ()


@pytest.mark.parametrize("policy", [StalePolicy.DROP, StalePolicy.MASK])
def test_group_with_nothing_left_is_issued_again(policy, mixed):
    shipment = ship(mixed, version=20, bound=1, policy=policy)
    assert shipment.group is None
    assert (shipment.kept, shipment.lost) == ((), (2, 3, 40))
    assert ship(mixed, version=9, bound=0, policy=StalePolicy.DROP).group is None  # one member is no group
