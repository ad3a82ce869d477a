"""Updates: what they learn, what they leave alone, what they report."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tiderl.env.ends import EndReason


def parameters(replica: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in replica.model.parameters()]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    "loss",
    [
        {},
        {"policy": "gspo", "aggregation": "seq_mean_token_mean", "clip_low": 0.1, "clip_high": 0.1},
        {"policy": "cispo", "aggregation": "seq_mean_token_sum", "token_norm": 8.0},
        {"old": "recomputed", "correction": "tis_token", "advantage": "rloo", "kl_coef": 0.01},
        {"old": "recomputed", "correction": "tis_sequence", "advantage": "dr_grpo", "dual_clip": 3.0},
    ],
)
def test_updates_make_rewarded_tokens_likelier(
    loss: dict[str, Any], make_replica: Any, make_groups: Any
) -> None:
    replica = make_replica(**loss)
    (group,) = make_groups(1, 4)
    for member in group.members:
        member.rewards = [float(member.member == 0)]
    records = [m.records[0] for m in group.members]
    before = [x.sum() for x in replica.logprobs(records)]
    for version in range(4):
        stats = replica.update([group], version)
        assert not stats.skipped
    after = [x.sum() for x in replica.logprobs(records)]
    gains = [b - a for a, b in zip(before, after, strict=True)]
    assert gains[0] > 0
    assert gains[0] > max(gains[1:])


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
def test_the_split_into_calls_and_micro_batches_changes_nothing(
    aggregation: str, make_replica: Any, make_groups: Any, gradient: Any
) -> None:
    groups = make_groups(5, 4, noise=0.2)
    # a large eps: AdamW's first step is the gradient's sign, which float32 noise turns where it is near 0
    loss = {"aggregation": aggregation, "kl_coef": 0.1, "optim": {"eps": 1.0, "learning_rate": 0.1}}
    whole = make_replica(**loss)
    want = gradient(whole, groups)
    split = make_replica(model={"max_tokens_per_microbatch": 30}, **loss)
    for group in (groups[3], groups[0], groups[4]):
        split.accumulate([group], 0)
    split.accumulate([groups[2], groups[1]], 0)
    masters = split.optimizer.masters
    got = torch.cat([m.grad.double().flatten() for m in masters]) / split.denominator
    # the log-probs of this sharp model carry a few 1e-6 of float32 noise, which the gradient shows
    assert (got - want).norm() <= 5e-6 * want.norm()
    one, two = whole.update(groups, 0), split.step()
    assert one.loss == pytest.approx(two.loss, rel=1e-6, abs=1e-6)  # float32 terms of size 10 cancel
    assert one.grad_norm == pytest.approx(two.grad_norm, rel=1e-6)
    assert one.tokens == two.tokens
    for (name, a), (_, b) in zip(whole.weights(), split.weights(), strict=True):
        assert (a - b).norm() <= 1e-6 * a.norm(), name


def test_the_same_batch_in_any_order_gives_the_same_bits(make_replica: Any, make_groups: Any) -> None:
    groups = make_groups(4, 4, noise=0.2)
    one, two = make_replica(), make_replica()
    a, b = one.update(groups, 0), two.update(groups[::-1], 0)
    assert a.loss == b.loss
    assert equal(parameters(one), parameters(two))


def test_c54_twenty_updates_at_learning_rate_zero_leave_weights_and_gap(
    make_replica: Any, make_groups: Any
) -> None:
    replica = make_replica(optim={"learning_rate": 0.0, "weight_decay": 0.1})
    groups = make_groups()
    before, sent = parameters(replica), {n: t.clone() for n, t in replica.weights()}
    gaps = [replica.update(groups, 0).max_logprob_gap for _ in range(20)]
    assert equal(parameters(replica), before)
    assert all(torch.equal(t, sent[n]) for n, t in replica.weights())
    assert len(set(gaps)) == 1
    assert 0 < gaps[0] <= 1e-4


def test_c56_the_gap_is_over_current_tokens_and_by_turn(make_replica: Any, make_groups: Any) -> None:
    replica = make_replica()
    groups = make_groups(2, 4, version=3)
    record = groups[0].members[1].records[0]
    start, end = record.turns[1]
    record.logprobs[start] -= 0.5  # the sampler disagrees once, in the second turn
    stats = replica.update(groups, 3)
    assert stats.max_logprob_gap == pytest.approx(0.5, abs=1e-4)
    assert [t["turn"] for t in stats.gap_by_turn] == [0, 1]
    assert stats.gap_by_turn[0]["max"] < 1e-4
    assert stats.gap_by_turn[1]["max"] == pytest.approx(0.5, abs=1e-4)
    assert stats.gap_tokens == stats.tokens == sum(t["tokens"] for t in stats.gap_by_turn)
    assert stats.mismatch_kl == pytest.approx((2.718281828**0.5 - 1.5) / stats.tokens, rel=1e-2)
    # older tokens may differ and are left out; the rest of their record saw mixed KV and is told apart
    record.versions[start:end] = [2] * (end - start)
    first, last = record.turns[0]
    record.logprobs[first] -= 0.25
    stats = make_replica().update(groups, 3)
    assert stats.max_logprob_gap < 1e-4
    assert stats.gap_tokens == stats.tokens - record.loss_tokens
    assert stats.mixed_tokens == last - first
    assert stats.max_mixed_gap == pytest.approx(0.25, abs=1e-4)
    stats = make_replica().update(groups, 4)
    assert (stats.gap_tokens, stats.max_logprob_gap) == (0, 0.0)


def test_c67_an_infrastructure_failure_changes_no_bit(make_replica: Any, make_groups: Any) -> None:
    clean, dirty = make_groups(2, 5, noise=0.1), make_groups(2, 5, noise=0.1)
    del clean[0].members[2]
    dirty[0].members[2].end = EndReason.INFRASTRUCTURE
    dirty[0].members[2].rewards = [0.0]
    one, two = make_replica(), make_replica()
    one.update(clean, 0)
    stats = two.update(dirty, 0)
    assert stats.masked_episodes == 1
    assert equal(parameters(one), parameters(two))


@pytest.mark.parametrize("choice", ["drop", "keep"])
def test_c78_a_zero_variance_group_gets_what_the_setting_says(
    choice: str, make_replica: Any, make_groups: Any, gradient: Any
) -> None:
    groups = make_groups(2, 4)
    for member in groups[1].members:
        member.rewards = [1.0]
    alone = make_replica(kl_coef=0.5, zero_variance=choice)
    alone.update(make_groups(seed=3), 0)  # away from the reference, where the KL gradient is 0
    both, first = gradient(alone, groups), gradient(alone, groups[:1])
    second_alone = alone.update(groups[1:], 1)
    if choice == "drop":
        assert torch.equal(both, first)
        assert second_alone.skipped
    else:
        assert not second_alone.skipped
        assert second_alone.grad_norm > 0
        assert (both - first).norm() > 0.01 * first.norm()


def test_c79_a_batch_with_nothing_to_learn_is_skipped_told_and_counted(
    make_replica: Any, make_groups: Any, caplog: pytest.LogCaptureFixture
) -> None:
    replica = make_replica()
    useful, equal_groups = make_groups(), make_groups(2, 4)
    for group in equal_groups:
        for member in group.members:
            member.rewards = [0.0]
    replica.update(useful, 0)  # AdamW has momentum now: a step with zero gradient would move the weights
    before = parameters(replica)
    with caplog.at_level(logging.WARNING):
        told = [replica.update(equal_groups, 1), replica.update([], 1)]
    assert [(s.skipped, s.skipped_in_a_row, s.update) for s in told] == [(True, 1, 1), (True, 2, 1)]
    assert told[0].dropped_groups == 2
    assert "nothing" in caplog.text or "anything" in caplog.text
    assert equal(parameters(replica), before)
    assert replica.update(useful, 1).skipped_in_a_row == 0


def test_without_a_kl_weight_nothing_is_referred_to(make_replica: Any, make_groups: Any) -> None:
    stats = make_replica().update(make_groups(), 0)
    assert "reference" not in stats.seconds
    assert stats.kl == 0.0


@pytest.mark.parametrize("lora", [True, False])
def test_the_reference_stays_the_initial_policy(lora: bool, make_replica: Any, make_groups: Any) -> None:
    replica = make_replica(lora=lora, kl_coef=0.1, kl_kind="k1", optim={"learning_rate": 3e-3})
    groups = make_groups()
    assert replica.update(groups, 0).kl == pytest.approx(0.0, abs=1e-6)
    records = [m.records[0] for g in groups for m in g.members]
    values = torch.cat([torch.from_numpy(x) for x in replica.logprobs(records)])
    first = torch.tensor([x for r in records for x, m in zip(r.logprobs, r.mask, strict=True) if m])
    stats = replica.update(groups, 1)
    assert abs(stats.kl) > 1e-3
    assert stats.kl == pytest.approx(float((values - first).mean()), abs=1e-5)


def test_low_precision_full_weights_learn(make_replica: Any, make_groups: Any) -> None:
    replica = make_replica(lora=False, model={"dtype": "bfloat16"}, optim={"learning_rate": 1e-5})
    groups = make_groups()
    for version in range(3):
        assert replica.update(groups, version).grad_norm > 0
    assert all(m.dtype == torch.float32 for m in replica.optimizer.masters)
