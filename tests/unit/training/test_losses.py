"""Policy losses, KL estimators, corrections and aggregation against hand-made values."""

from __future__ import annotations

import math

import pytest
import torch

from tiderl.training.aggregation import denominator, token_weight
from tiderl.training.correction import correction_weights
from tiderl.training.kl import kl_penalty, mismatch_kl
from tiderl.training.losses import policy_loss
from tiderl.training.settings import LossSettings


def run(
    ratio: list[float], advantage: list[float], sequence: list[int] | None = None, **settings: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss, d loss / d log-prob, clipped) of tokens with these ratios to pi_old."""
    old = torch.full((len(ratio),), -3.0, dtype=torch.float64)
    logprobs = (old + torch.tensor(ratio, dtype=torch.float64).log()).requires_grad_()
    seq = torch.tensor(sequence or [0] * len(ratio))
    out = policy_loss(
        logprobs,
        old,
        torch.tensor(advantage, dtype=torch.float64),
        seq,
        int(seq.max()) + 1,
        LossSettings(**settings),  # type: ignore[arg-type]
    )
    (grad,) = torch.autograd.grad(out.loss.sum(), logprobs)
    return out.loss.detach(), grad, out.clipped


def test_ppo_clips_high_above_and_low_below() -> None:
    ratio, advantage = [1.0, 1.27, 1.5, 0.5, 1.5, 0.5], [1.0, 1.0, 1.0, 1.0, -1.0, -1.0]
    loss, grad, clipped = run(ratio, advantage, clip_low=0.2, clip_high=0.28)
    torch.testing.assert_close(loss, torch.tensor([-1.0, -1.27, -1.28, -0.5, 1.5, 0.8], dtype=torch.float64))
    torch.testing.assert_close(grad, torch.tensor([-1.0, -1.27, 0.0, -0.5, 1.5, 0.0], dtype=torch.float64))
    assert clipped.tolist() == [False, False, True, False, False, True]


def test_dual_clip_bounds_only_negative_advantages() -> None:
    loss, grad, clipped = run([5.0, 5.0, 2.0], [-1.0, 1.0, -1.0], dual_clip=3.0)
    torch.testing.assert_close(loss, torch.tensor([3.0, -1.28, 2.0], dtype=torch.float64))
    torch.testing.assert_close(grad, torch.tensor([0.0, 0.0, 2.0], dtype=torch.float64))
    assert clipped.tolist() == [True, True, False]


def test_gspo_uses_the_sequence_ratio_and_a_token_gradient() -> None:
    ratio, sequence = [1.1, 0.9, 1.2, 1.0], [0, 0, 1, 1]
    loss, grad, _ = run(ratio, [1.0, 1.0, 2.0, 2.0], sequence, policy="gspo")
    s0, s1 = math.sqrt(1.1 * 0.9), math.sqrt(1.2)
    expected = torch.tensor([-s0, -s0, -2 * s1, -2 * s1], dtype=torch.float64)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grad, expected)
    _, grad, clipped = run([1.5, 1.5], [1.0, 1.0], policy="gspo")
    assert clipped.all()
    assert not grad.any()


def test_cispo_keeps_a_gradient_where_the_ratio_is_clipped() -> None:
    _, grad, clipped = run([1.5, 0.5, 1.1], [1.0, -1.0, 1.0], policy="cispo")
    torch.testing.assert_close(grad, torch.tensor([-1.28, 0.8, -1.1], dtype=torch.float64))
    assert clipped.tolist() == [True, True, False]


def test_an_extreme_ratio_stays_finite() -> None:
    old = torch.tensor([-1e4, 0.0])
    logprobs = torch.tensor([0.0, -1e4], requires_grad=True)
    for policy in ("ppo", "gspo", "cispo"):
        out = policy_loss(
            logprobs,
            old,
            torch.tensor([-1.0, 1.0]),
            torch.tensor([0, 1]),
            2,
            LossSettings(policy=policy),  # type: ignore[arg-type]
        )
        assert torch.isfinite(out.loss).all()


def test_kl_estimators() -> None:
    lp, ref = torch.tensor([-1.0, -2.0], requires_grad=True), torch.tensor([-1.5, -1.0])
    q = (lp - ref).detach()
    torch.testing.assert_close(kl_penalty(lp, ref, "k1").detach(), q)
    torch.testing.assert_close(kl_penalty(lp, ref, "k2").detach(), q * q / 2)
    torch.testing.assert_close(kl_penalty(lp, ref, "k3").detach(), (-q).exp() + q - 1)
    (grad,) = torch.autograd.grad(kl_penalty(lp, ref, "k2").sum(), lp)
    torch.testing.assert_close(grad, q)
    (grad,) = torch.autograd.grad(kl_penalty(lp, ref, "k3").sum(), lp)
    torch.testing.assert_close(grad, 1 - (-q).exp())
    far = kl_penalty(torch.tensor([-100.0]), torch.tensor([0.0]), "k3")
    assert far.item() == 10.0


def test_k1_and_k3_estimate_the_true_kl_without_bias() -> None:
    torch.manual_seed(0)
    logits = 0.5 * torch.randn(2, 5, dtype=torch.float64)  # no value near the clamps
    log_p, log_r = torch.log_softmax(logits, -1)
    true = (log_p.exp() * (log_p - log_r)).sum()
    for kind in ("k1", "k3"):
        mean = (log_p.exp() * kl_penalty(log_p, log_r, kind)).sum()  # type: ignore[arg-type]
        torch.testing.assert_close(mean, true)


def test_mismatch_is_zero_for_equal_policies_and_positive_else() -> None:
    got = mismatch_kl(torch.tensor([0.0, 0.5, -0.5], dtype=torch.float64))
    expected = [0.0, math.exp(0.5) - 1.5, math.exp(-0.5) - 0.5]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


def test_truncated_importance_weights() -> None:
    rollout = torch.zeros(4)
    old = torch.tensor([3.0, 0.5, 2.0, 0.25]).log().requires_grad_()
    sequence = torch.tensor([0, 0, 1, 1])
    token = correction_weights("tis_token", old, rollout, sequence, 2, 2.0)
    whole = correction_weights("tis_sequence", old, rollout, sequence, 2, 2.0)
    assert token is not None
    assert whole is not None
    torch.testing.assert_close(token, torch.tensor([2.0, 0.5, 2.0, 0.25]))
    torch.testing.assert_close(whole, torch.tensor([1.5, 1.5, 0.5, 0.5]))
    assert not token.requires_grad
    assert not whole.requires_grad
    assert correction_weights(None, old, rollout, sequence, 2, 2.0) is None


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token_mean", (1.0 + 2.0 + 3.0 + 10.0) / 4),
        ("seq_mean_token_mean", ((1.0 + 2.0 + 3.0) / 3 + 10.0) / 2),
        ("seq_mean_token_sum", ((1.0 + 2.0 + 3.0) / 8 + 10.0 / 8) / 2),
    ],
)
def test_aggregation(kind: str, expected: float) -> None:
    episodes = [[1.0, 2.0, 3.0], [10.0]]
    total = sum(token_weight(kind, len(e), 8.0) * sum(e) for e in episodes)  # type: ignore[arg-type]
    below = sum(denominator(kind, len(e)) for e in episodes)  # type: ignore[arg-type]
    assert total / below == pytest.approx(expected)
