"""`tide/Safe-v0`: open a safe by trying codes; the smallest complete environment.

Invariant: the picture shows the safe and never the code.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import tiderl

LOWEST, HIGHEST = 10, 70


def picture_of(task: Any) -> np.ndarray:
    """A 28x28 safe with a dial; every task's picture is the same."""
    y, x = np.mgrid[0:28, 0:28]
    picture = np.full((28, 28, 3), (70, 74, 82), np.uint8)
    picture[(x - 13.5) ** 2 + (y - 13.5) ** 2 <= 64] = (200, 200, 205)
    picture[(x - 13.5) ** 2 + (y - 13.5) ** 2 <= 4] = (40, 40, 45)
    return picture


@tiderl.register("tide/Safe-v0")
class Safe(tiderl.AgentEnv):
    """Find a number between 10 and 70 by trying; each try says "too low" or "too high"."""

    max_turns = 8
    modality = "image"

    def tasks(self, split):
        return [{"id": i, "code": {"train": 10, "test": 13}[split] + 7 * i} for i in range(8)]

    def start(self, task):
        self.low, self.high = LOWEST, HIGHEST
        return ["Open the safe. The code is between 10 and 70.", picture_of(task)]

    @tiderl.tool
    def try_code(self, n: int):
        """Try one code."""
        if n == self.task["code"]:
            self.finish(1.0)
            return "open"
        if n < self.task["code"]:
            self.low = max(self.low, n + 1)
            return "too low"
        self.high = min(self.high, n - 1)
        return "too high"

    def oracle(self):
        """Halve what is left: at most six tries."""
        call = tiderl.messages.tool_call("try_code", n=(self.low + self.high) // 2)
        return tiderl.messages.assistant(None, [call])
