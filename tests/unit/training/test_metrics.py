"""What an update is measured by, and the alarm about lengths that the trainer never sees."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from tiderl.env.ends import EndReason
from tiderl.training.metrics import LENGTH_BIAS_EPISODES, LengthBias, rollout_metrics
from tiderl.trajectory.group import Group
from tiderl.trajectory.record import TokenRecord
from tiderl.trajectory.staleness import StalePolicy, ship
from tiderl.trajectory.trajectory import Trajectory


def episode(
    tokens: int, *, version: int = 0, reward: float = 0.0, end: EndReason = EndReason.SUCCESS
) -> Trajectory:
    """One turn of `tokens` tokens, sampled by `version`."""
    record = TokenRecord()
    record.append_context([1, 2])
    record.append_sampled([3] * tokens, [-0.1] * tokens, [version] * tokens)
    return Trajectory(
        "e", 0, "g", 0, 0, 0, "env", "train", records=[record], rewards=[reward], end=end, turns=1
    )


def test_lengths_and_staleness_without_a_bound() -> None:
    groups = [
        Group(0, 0, [episode(4, version=3, reward=1.0), episode(8, version=2)]),
        Group(1, 1, [episode(6, version=3), episode(2, version=3, end=EndReason.INFRASTRUCTURE)]),
    ]
    seen = rollout_metrics(groups, 3)
    assert seen["length_generated"] == seen["length_kept"] == 6.0
    assert seen["length_trained"] == 6.0, "the group without a signal teaches nothing"
    assert seen["staleness_histogram"] == {0: 2, 1: 1}
    assert (seen["staleness_max"], seen["episodes_masked"], seen["episodes_stale"]) == (1, 1, 0)
    assert (seen["length_bias"], seen["length_alarm"], seen["length_lost"]) == (None, False, None)


def test_what_the_bound_takes_shows_in_the_lengths() -> None:
    for policy, kept in ((StalePolicy.DROP, 5.0), (StalePolicy.MASK, 5.0), (StalePolicy.WAIT, 8.0)):
        members = [episode(4, version=5, reward=1.0), episode(6, version=5), episode(14, version=1)]
        gone = [episode(20, version=0), episode(30, version=0)]
        groups = [Group(0, 0, members), Group(1, 1, gone)]
        bound = 2
        if policy is StalePolicy.WAIT:
            groups = groups[:1]
        shipments = [ship(g, version=5, bound=bound, policy=policy) for g in groups]
        bias = LengthBias()
        seen = rollout_metrics(groups, 5, shipments=shipments, bias=bias)
        assert seen["length_kept"] == seen["length_trained"] == kept
        assert seen["length_generated"] == sum(m.sampled_tokens for g in groups for m in g.members) / (
            sum(len(g.members) for g in groups)
        )
        if policy is StalePolicy.WAIT:
            assert (seen["episodes_stale"], seen["staleness_max"], seen["length_bias"]) == (0, 4, 0.0)
        else:
            assert (seen["episodes_stale"], seen["length_lost"]) == (3, (14 + 20 + 30) / 3)
            assert seen["staleness_histogram"] == {0: 2}, "what is lost is not trained on"
            assert abs(seen["length_bias"] - (5.0 / 14.8 - 1)) < 1e-12


def test_no_episode_at_all() -> None:
    seen = rollout_metrics([], 1, bias=LengthBias())
    assert seen["success"] is seen["length_bias"] is seen["length_generated"] is None
    assert seen["staleness_histogram"] == {}


def test_the_alarm_needs_enough_episodes() -> None:
    bias = LengthBias()
    bias.add([100] * LENGTH_BIAS_EPISODES, [90] * (LENGTH_BIAS_EPISODES - 1))
    assert bias.value is not None
    assert bias.value < -0.05
    assert not bias.alarm
    bias.add([], [90])
    assert bias.alarm


def test_episodes_that_never_reach_the_trainer_are_noticed() -> None:
    """A scheduler that takes the first half to finish: each update looks fine, the run does not."""
    rng = random.Random(0)
    bias = LengthBias()
    waiting: list[int] = []
    for _ in range(40):
        ended = [rng.randint(10, 200) for _ in range(32)]
        waiting = sorted([*waiting, *ended])
        taken, waiting = waiting[:16], waiting[16:]
        group = Group(0, 0, [episode(n, reward=float(i % 2)) for i, n in enumerate(taken)])
        seen = rollout_metrics([group], 0, bias=bias, generated=ended)
    assert seen["length_alarm"]
    assert seen["length_bias"] < -0.2


def test_random_loss_of_episodes_is_no_bias() -> None:
    rng = random.Random(0)
    bias = LengthBias()
    lengths = [rng.randint(50, 150) for _ in range(4000)]
    bias.add(lengths, [n for n in lengths if rng.random() < 0.5])
    assert not bias.alarm


@given(st.lists(st.tuples(st.lists(st.integers(1, 999)), st.lists(st.integers(1, 999)))), st.data())
def test_a_resumed_run_goes_on_with_the_same_bias(
    updates: list[tuple[list[int], list[int]]], data: st.DataObject
) -> None:
    whole, first, second = LengthBias(), LengthBias(), LengthBias()
    cut = data.draw(st.integers(0, len(updates)))
    for generated, trained in updates:
        whole.add(generated, trained)
    for generated, trained in updates[:cut]:
        first.add(generated, trained)
    second.restore(first.to_json())
    for generated, trained in updates[cut:]:
        second.add(generated, trained)
    assert (second.value, second.alarm, second.to_json()) == (whole.value, whole.alarm, whole.to_json())
    all_generated = [n for g, _ in updates for n in g]
    all_trained = [n for _, t in updates for n in t]
    if all_generated and all_trained:
        expected = (sum(all_trained) / len(all_trained)) / (sum(all_generated) / len(all_generated)) - 1
        assert whole.value is not None
        assert abs(whole.value - expected) < 1e-9
