"""What evaluation asks of a policy that acts turn by turn.

Invariants: a policy sees only messages and the session's public specification (the oracle, which may
ask the environment for the scripted action, says so by `cheats`); everything an episode remembers is in
its `PolicyState`, so that one policy object plays many episodes at once.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..hub.base import SessionSpec

Message = dict[str, Any]
Action = str | Message


@dataclass(frozen=True)
class PolicyOptions:
    """What the user asked for beside the policy's name; `None` leaves the choice to the policy.

    `max_tokens` bounds one reply; the bound on a whole episode, prompt included, is the environment's
    `max_total_tokens`. `seed` is the evaluation's.
    """

    temperature: float | None = None
    max_tokens: int | None = None
    seed: int = 0
    format: str | None = None
    """Name of the action format, for policies that turn text into actions."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The `--policy-arg` pairs."""

    def only(self, policy: str, *known: str) -> None:
        """Raises ConfigError where `extra` has a key that `policy` does not know."""
        for key in self.extra:
            if key not in known:
                raise ConfigError(
                    f"the policy {policy} takes no --policy-arg {key!r}",
                    fix=f"use one of {', '.join(known)}" if known else "leave it out",
                )


@dataclass
class PolicyState:
    """One episode as its policy sees it.

    `messages` is the whole history so far, the newest messages included, replies as the policy gave them.
    `rng` is seeded by the episode. `memory` is the policy's own. The counters are what the summary
    adds up: a policy that asks a model raises them itself.
    """

    task: Any
    seed: int
    split: str
    messages: list[Message] = field(default_factory=list)
    rng: random.Random = field(default_factory=random.Random)
    memory: dict[str, Any] = field(default_factory=dict)
    model_calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    remaining: Callable[[], float] = lambda: float("inf")
    """Seconds left until the episode's deadline."""
    scripted: Callable[[], Awaitable[Action]] | None = None
    """The environment's scripted next action; given only to a policy with `cheats`."""


class Policy(ABC):
    """Plays episodes turn by turn. Register a factory in the entry-point group `tiderl.agents`.

    The factory is called as `factory(argument, options)`, where `argument` is what follows the first
    colon of `NAME:ARGUMENT` ("" when nothing does) and `options` a `PolicyOptions`; a class whose
    `__init__` takes those two is a factory.
    """

    name: str = "policy"
    cheats: bool = False
    """True for a policy that may ask the environment for its scripted action."""
    default_concurrency: int = 8
    """Episodes at once when the user names no number."""

    async def start(self) -> None:  # noqa: B027 - most policies have nothing to start
        """Called once, in the event loop of the evaluation, before anything is written.

        Raises:
            TideError: the policy cannot play; nothing has been written yet.
        """

    async def close(self) -> None:  # noqa: B027 - most policies have nothing to close
        """Called once at the end, also after a failure; must be safe when `start` failed."""

    def identity(self) -> dict[str, Any]:
        """What decides how this policy acts, as JSON; a resumed evaluation must find it unchanged."""
        return {"name": self.name}

    @abstractmethod
    async def act(self, messages: Sequence[Message], spec: SessionSpec, state: PolicyState) -> Action:
        """The reply to the new `messages`: a string or an assistant message (`tool_calls` allowed).

        Args:
            messages: what the environment said since the last reply (at first: its opening).
            spec: the session's tools and limits.
            state: the episode, its history and its counters.

        Raises:
            EndReached: the policy cannot go on for a reason that is the task's, such as a full context.
            TideError: anything else; the episode ends as an infrastructure failure and is masked.
        """


class EndReached(Exception):
    """A policy ends its episode with a reason other than infrastructure, such as `context_length`."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}" if detail else reason)


PolicyFactory = Callable[[str, PolicyOptions], Policy]
