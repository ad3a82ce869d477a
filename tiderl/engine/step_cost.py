"""What a step of the engine costs: seconds a step, a sampled token, and a prompt token.

Least squares of relative errors over the steps seen, old ones fading: seconds = step + sampled * decode +
prompt * prefill. A turn's own prefill time says little: its steps are shared with other turns, and every step
has a time of its own.

Invariant: no figure is negative; all are 0.0 until enough steps with a prompt were seen.
"""

from __future__ import annotations

import numpy as np

from tiderl.engine.base import StepCost

FADE = 0.998
"""What a step leaves of the weight of those before it: half of it counts after some 350 steps."""
ENOUGH = 20
"""Steps with a prompt, and steps at all, before anything is said."""
_RIDGE = 1e-4


class StepCosts:
    """Fed with every step; runs in the engine process."""

    def __init__(self) -> None:
        self._normal = np.zeros((3, 3))
        self._target = np.zeros(3)
        self._prompts = 0

    def saw(self, seconds: float, decode: int, prefill: int) -> None:
        """One step took `seconds` for so many sampled and prompt tokens."""
        row = np.array((1.0, decode, prefill)) / max(seconds, 1e-6)
        self._normal = FADE * self._normal + np.outer(row, row)
        self._target = FADE * self._target + row
        self._prompts += prefill > 0

    def cost(self) -> StepCost:
        """By what was seen so far."""
        if self._prompts < ENOUGH:
            return StepCost()
        used = [0, 1, 2]
        found = np.zeros(3)
        while used:  # a figure that comes out negative is noise around 0: fit the others without it
            part = self._normal[np.ix_(used, used)]
            part = part + _RIDGE * np.diag(np.diag(part) + 1e-12)
            found[:] = 0.0
            found[used] = np.linalg.solve(part, self._target[used])
            if (found >= 0.0).all():
                break
            used.remove(int(np.argmin(found)))
        return StepCost(*map(float, found))
