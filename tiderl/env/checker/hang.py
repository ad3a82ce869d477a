"""An environment that hangs in its step, around any other one; the check of time-outs runs it.

Invariant: the inner environment is really made, reset and stepped before the hang, so that all
processes it starts are there when the worker is killed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from tiderl.env.base import AgentEnv, Observation, Step
from tiderl.env.registry import load_entry, make, register
from tiderl.errors import UnknownEnvironment

ENV_ID = "tiderl-check/Hang-v0"
HANG_SECONDS = 3600.0


def make_known(env_id: str, entry: str | None, **kwargs: Any) -> AgentEnv:
    """Make an environment that another process knew; register it from `entry` where this one does not.

    Args:
        entry: `EnvironmentSpec.entry` of the other process.

    Raises:
        UnknownEnvironment, EnvironmentFault: as `make`.
    """
    try:
        return make(env_id, **kwargs)
    except UnknownEnvironment:
        if entry is None:
            raise
    target = load_entry(entry)
    try:
        return make(env_id, **kwargs)  # its module registers it
    except UnknownEnvironment:
        register(env_id, cls=target)
    return make(env_id, **kwargs)


@register(ENV_ID)
class Hanging(AgentEnv):
    """`target` in all but its step, which never answers; its `step_timeout` is 1.5 s."""

    def __init__(self, target: str, entry: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.inner = make_known(target, entry, **kwargs)
        self.splits = self.inner.splits
        self.reset_timeout = self.inner.reset_timeout
        self.step_timeout = 1.5

    def tasks(self, split: str) -> Sequence[Any]:
        """The target's tasks."""
        return self.inner.tasks(split)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """The target's reset."""
        return self.inner.reset(seed=seed, options=options)

    def step(self, action: Any) -> Step:
        """The target's step, and then nothing for an hour."""
        answer = self.inner.step(action)
        time.sleep(HANG_SECONDS)
        return answer

    def close(self) -> None:
        """Close the target."""
        self.inner.close()
