"""Selected log-probs against plain autograd through the whole logits."""

from __future__ import annotations

import pytest
import torch

from tiderl.training import head

ROWS = torch.tensor([0, 0, 1, 2, 2, 2, 3, 4])
TARGETS = torch.tensor([3, 9, 0, 1, 2, 8, 5, 5])


def dense(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = torch.log_softmax((hidden @ weight.t()).float(), -1)
    return log_p[ROWS, TARGETS], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("chunk", [1, 2 * 4 * 11, 1 << 20])
@pytest.mark.parametrize("trained_head", [False, True])
def test_values_and_gradients(chunk: int, trained_head: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK_BYTES", chunk)
    torch.manual_seed(0)
    hidden = torch.randn(5, 6, requires_grad=True)
    weight = torch.randn(11, 6, requires_grad=trained_head)
    up = torch.randn(8)
    got, entropy = head.selected_logprobs(hidden, weight, ROWS, TARGETS)
    want, want_entropy = dense(hidden, weight)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy, want_entropy, rtol=1e-5, atol=1e-6)
    assert not entropy.requires_grad
    inputs = (hidden, weight) if trained_head else (hidden,)
    for g, w in zip(torch.autograd.grad(got, inputs, up), torch.autograd.grad(want, inputs, up), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_a_near_certain_token_does_not_drown() -> None:
    torch.manual_seed(0)
    weight = torch.randn(50, 8).bfloat16()
    hidden = 0.7 * weight[7]
    precise = hidden.double().requires_grad_()
    log_p = torch.log_softmax(precise @ weight.double().t(), -1)[7]
    (want,) = torch.autograd.grad(log_p, precise)
    rough = hidden[None].clone().requires_grad_()
    got, _ = head.selected_logprobs(rough, weight, torch.tensor([0]), torch.tensor([7]))
    (grad,) = torch.autograd.grad(got.sum(), rough)
    assert 1e-6 < -log_p < 1e-2
    assert (grad[0].double() - want).norm() <= 0.1 * want.norm()


def test_no_graph_without_gradient() -> None:
    hidden, weight = torch.randn(5, 6, requires_grad=True), torch.randn(11, 6)
    with torch.no_grad():
        got, _ = head.selected_logprobs(hidden, weight, ROWS, TARGETS)
    assert not got.requires_grad
