"""What a hub and a session are, for everybody who drives environments.

Invariant: a session is one environment object that nobody else touches; each of its calls either
returns the environment's own answer or raises a `TideError` within a known time.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from tiderl.env.ends import EndReason

Message = dict[str, Any]
Action = str | Message


@dataclass(frozen=True)
class SessionSpec:
    """What a driver must know about a session's environment, learnt when the session opens.

    Time-outs are in seconds; `tools` are OpenAI tool schemas; `max_total_tokens` counts the tokens of
    the whole episode (None: no such limit).
    """

    env_id: str
    tools: list[dict[str, Any]]
    max_turns: int
    max_total_tokens: int | None
    episode_timeout: float
    reward_range: tuple[float, float]
    splits: tuple[str, ...]
    step_timeout: float = 30.0
    reset_timeout: float = 60.0


class EnvSession(Protocol):
    """One environment, driven from an event loop. Calls of one session must not overlap.

    Every call may raise:
        EnvironmentFault: the environment raised or broke its contract; the remote traceback is a note.
        InfrastructureError: something around the environment failed (`WorkerDied`, `StepTimeout`, a
            lost connection inside the environment).
    After an error of `reset` or `step` the environment is gone and every later call raises.
    """

    @property
    def spec(self) -> SessionSpec: ...

    async def reset(
        self, seed: int | None = None, task: Any = None, split: str = "train", *, timeout: float | None = None
    ) -> tuple[tuple[Message, ...], dict[str, Any]]:
        """Start an episode of `task` (None: the environment draws one from the seed).

        `timeout` (seconds) can only shorten the environment's own `reset_timeout`.
        Returns the first messages and the info dict.
        """
        ...

    async def step(
        self, action: Action, *, timeout: float | None = None
    ) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        """Play one reply; returns (new messages, reward, terminated, truncated, info).

        `timeout` (seconds) can only shorten the environment's own `step_timeout`.
        """
        ...

    async def oracle(self) -> Action:
        """The scripted next action; EnvironmentFault when the environment has none."""
        ...

    async def truncate(self, reason: EndReason) -> tuple[float, dict[str, Any]]:
        """End a running episode for a limit of the driver's (time, tokens, context length).

        Returns the partial credit the environment gives for it, and the final info.
        """
        ...

    async def close(self) -> None:
        """Close the environment and free its place. Idempotent, bounded, never raises TideError."""
        ...


class Hub(Protocol):
    """Where sessions come from."""

    def session(self, env_id: str, /, **env_kwargs: Any) -> AbstractAsyncContextManager[EnvSession]:
        """Open a session; waits in a fair queue for a place.

        Raises:
            UnknownEnvironment: no such id.
            Busy: no place became free in time.
            EnvironmentFault: the environment's module or constructor raised.
            WorkerDied: the worker process ended, with its exit code and the end of its log.
        """
        ...

    async def task_ids(self, env_id: str, split: str = "train", /, **env_kwargs: Any) -> list[Any]:
        """Ids of the tasks of `split`, in the environment's own order."""
        ...
