"""What a step costs is found from steps that hold several turns at once."""

from __future__ import annotations

import random

import pytest

from tiderl.engine.base import StepCost
from tiderl.engine.step_cost import ENOUGH, StepCosts


def _steps(step: float, decode: float, prefill: float, count: int = 600, noise: float = 0.1) -> StepCosts:
    rng = random.Random(0)
    costs = StepCosts()
    for _ in range(count):
        sampled = rng.randint(0, 16)
        prompt = rng.choice([0, 0, 0, 40, 200, 900])
        seconds = step + sampled * decode + prompt * prefill
        costs.saw(seconds * rng.uniform(1 - noise, 1 + noise), sampled, prompt)
    return costs


def test_each_part_is_found_through_the_noise() -> None:
    cost = _steps(0.009, 0.001, 0.0006).cost()
    assert cost.step == pytest.approx(0.009, rel=0.15)
    assert cost.decode == pytest.approx(0.001, rel=0.15)
    assert cost.prefill == pytest.approx(0.0006, rel=0.05)


def test_an_engine_that_becomes_faster_is_believed() -> None:
    costs = _steps(0.009, 0.001, 0.0006)
    rng = random.Random(1)
    for _ in range(3000):
        sampled, prompt = rng.randint(0, 16), rng.choice([0, 0, 100])
        costs.saw(0.004 + sampled * 0.0005 + prompt * 0.0003, sampled, prompt)
    assert costs.cost().prefill == pytest.approx(0.0003, rel=0.02)


def test_nothing_is_said_before_enough_was_seen() -> None:
    costs = StepCosts()
    for _ in range(ENOUGH - 1):
        costs.saw(0.1, 1, 100)
    for _ in range(100):
        costs.saw(0.01, 4, 0)
    assert costs.cost() == StepCost()


@pytest.mark.parametrize("sampled", [0, 4])
def test_steps_that_are_all_alike_give_a_figure_all_the_same(sampled: int) -> None:
    costs = StepCosts()
    for _ in range(200):
        costs.saw(0.05, sampled, 100)
    cost = costs.cost()
    assert min(cost.step, cost.decode, cost.prefill) >= 0.0
    assert cost.step + sampled * cost.decode + 100 * cost.prefill == pytest.approx(0.05, rel=0.01)


def test_no_figure_is_negative() -> None:
    costs = StepCosts()
    for number in range(200):
        prompt = 50 * (number % 5)
        costs.saw(prompt * 0.001 - (prompt > 0) * 0.02 + 0.001, number % 3, prompt)  # "step" would be below 0
    cost = costs.cost()
    assert min(cost.step, cost.decode, cost.prefill) >= 0.0
    assert cost.prefill > 0.0
