"""Warm-up, clipping, master weights and the refusal of gradients that are not numbers."""

from __future__ import annotations

import pytest
import torch

from tiderl.errors import ModelError
from tiderl.training.optimizer import Optimizer
from tiderl.training.settings import OptimSettings


def made(dtype: torch.dtype = torch.float32, **settings: object) -> tuple[torch.nn.Parameter, Optimizer]:
    parameter = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    return parameter, Optimizer([parameter], OptimSettings(**settings))  # type: ignore[arg-type]


def step(parameter: torch.nn.Parameter, optimizer: Optimizer, grad: float = 1.0) -> tuple[float, float]:
    parameter.grad = torch.full_like(parameter, grad)
    optimizer.collect()
    return optimizer.step(2.0)


def test_warm_up_is_linear_and_ends() -> None:
    parameter, optimizer = made(learning_rate=1.0, warmup=4)
    rates = [step(parameter, optimizer)[1] for _ in range(6)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_the_norm_is_that_of_the_divided_gradient_and_is_clipped() -> None:
    parameter, optimizer = made(learning_rate=0.1, max_grad_norm=1.0)
    norm, _ = step(parameter, optimizer, 10.0)
    assert norm == pytest.approx(10.0)  # |(5, 5, 5, 5)|
    moment = optimizer.adamw.state[parameter]["exp_avg"]
    torch.testing.assert_close(moment, torch.full((4,), 0.1 * 0.5))


def test_c54_learning_rate_zero_leaves_every_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        parameter, optimizer = made(dtype, learning_rate=0.0, weight_decay=0.1)
        before = parameter.detach().clone()
        for _ in range(20):
            step(parameter, optimizer)
        assert torch.equal(parameter, before)


def test_small_steps_of_low_precision_weights_add_up_in_their_masters() -> None:
    parameter, optimizer = made(torch.bfloat16, learning_rate=1e-4, warmup=0)
    for _ in range(100):
        step(parameter, optimizer)
    assert optimizer.masters[0].dtype == torch.float32
    assert parameter.float().mean().item() == pytest.approx(0.99, abs=4e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_refused_and_changes_nothing(bad: float) -> None:
    parameter, optimizer = made()
    with pytest.raises(ModelError, match="learning_rate"):
        step(parameter, optimizer, bad)
    assert torch.equal(parameter, torch.ones(4))
    assert optimizer.updates == 0
    assert parameter.grad is None
