"""The stream of tasks a run trains on.

Invariant: item `ordinal` is a pure function of (task ids, seed, ordinal): a resumed run can re-issue
exactly the ordinals that were not trained (C-1), and a finished epoch goes on with the next one (C-6).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tiderl.errors import ConfigError


@dataclass(frozen=True)
class TaskItem:
    """One group's task: its place in the stream, the task's id and the seed of its environments."""

    ordinal: int
    task: str | int
    seed: int


def derive_seed(*parts: str | int) -> int:
    """A seed in [0, 2**31) that depends on every part; the same on every machine."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class TaskStream:
    """Epoch after epoch over the task ids, each epoch in its own shuffled order."""

    def __init__(self, task_ids: Sequence[str | int], seed: int) -> None:
        """Raises `ConfigError` when there is no task at all."""
        if not task_ids:
            raise ConfigError("the split holds no tasks", fix="choose another environment.split")
        self.task_ids, self.seed = list(task_ids), seed
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def fingerprint(self) -> str:
        """Changes when the task set does, so that a resume on other data is refused (C-12)."""
        text = "\n".join(map(str, self.task_ids)) + f"\n{self.seed}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def item(self, ordinal: int) -> TaskItem:
        """The `ordinal`-th task of the stream, from 0."""
        epoch, place = divmod(ordinal, len(self.task_ids))
        if self._order is None or self._order[0] != epoch:
            rng = np.random.default_rng([self.seed, epoch])
            self._order = (epoch, rng.permutation(len(self.task_ids)))
        task = self.task_ids[int(self._order[1][place])]
        return TaskItem(ordinal, task, derive_seed(self.seed, "environment", ordinal))
