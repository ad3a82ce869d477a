"""Best actions by value iteration over a transition table, for the oracles of tabular environments.

Invariant: with deterministic transitions the action is the first of a shortest path to a positive
reward. Source: Sutton and Barto, Reinforcement Learning (2nd ed.), section 4.4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

DISCOUNT = 0.99
PRECISION = 1e-9
MAX_SWEEPS = 10_000

Table = Mapping[int, Mapping[int, Sequence[tuple[float, Any, float, bool]]]]


def action_values(table: Table, worth: Callable[[float, bool], float]) -> np.ndarray:
    """Discounted values, states x actions.

    Args:
        table: Gymnasium's `P`: state -> action -> [(probability, next state, reward, terminated)].
        worth: maps an environment's reward and end to the reward that counts.
    """
    states, actions = len(table), len(table[0])
    width = max(len(table[s][a]) for s in range(states) for a in range(actions))
    chance = np.zeros((states, actions, width))
    goes = np.zeros((states, actions, width), np.int64)
    gain = np.zeros((states, actions, width))
    lives = np.zeros((states, actions, width))
    for s in range(states):
        for a in range(actions):
            for k, (p, to, reward, ended) in enumerate(table[s][a]):
                chance[s, a, k], goes[s, a, k] = p, int(to)
                gain[s, a, k], lives[s, a, k] = worth(float(reward), bool(ended)), not ended
    values = np.zeros(states)
    for _ in range(MAX_SWEEPS):
        q = (chance * (gain + DISCOUNT * lives * values[goes])).sum(2)
        change = np.abs(q.max(1) - values).max()
        values = q.max(1)
        if change < PRECISION:
            break
    return q


class Planner:
    """Best actions for one table at a time; the values are worked out once per table."""

    def __init__(self, worth: Callable[[float, bool], float]) -> None:
        self._worth = worth
        self._table: Table | None = None
        self._values = np.zeros((0, 0))

    def best(self, table: Table, state: int) -> int:
        """The first action with the highest value in a state."""
        if table is not self._table:
            self._table, self._values = table, action_values(table, self._worth)
        return int(self._values[state].argmax())
