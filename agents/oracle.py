"""The oracle: plays the environment's own scripted solution.

Invariant: it adds nothing of its own, so an episode it loses is a fault of the environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tiderl.agent.policy import Action, Message, Policy, PolicyOptions, PolicyState
from tiderl.errors import ConfigError, EnvironmentFault

if TYPE_CHECKING:
    from tiderl.hub.base import SessionSpec


class OraclePolicy(Policy):
    """`oracle`: every reply is what `AgentEnv.oracle()` says."""

    name = "oracle"
    cheats = True

    def __init__(self, argument: str = "", options: PolicyOptions | None = None) -> None:
        if argument:
            raise ConfigError(
                f"the policy oracle takes no argument, not {argument!r}", fix="say just `oracle`"
            )
        if options is not None:
            options.only("oracle")

    async def act(self, messages: Sequence[Message], spec: SessionSpec, state: PolicyState) -> Action:
        """Raises EnvironmentFault when the environment has no oracle."""
        if state.scripted is None:
            raise EnvironmentFault("this session offers no scripted action", where=spec.env_id)
        return await state.scripted()
