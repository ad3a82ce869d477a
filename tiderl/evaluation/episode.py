"""One episode of a policy that acts turn by turn.

Invariants: every episode comes back with one end; a slow one ends as TIME at its deadline; a failure
around the task, a fault in the policy's own code included, is an infrastructure end and never a reward of
zero; so is an episode in which the policy never replied. Only cancellation passes through.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from ..agent.policy import EndReached, Policy, PolicyState
from ..env.ends import EndReason
from ..env.messages import assistant, copy_message, copy_messages
from ..errors import EnvironmentFault, InfrastructureError, PromptTooLong, TideError
from .plan import PlannedEpisode
from .result import EpisodeResult

if TYPE_CHECKING:
    from ..hub.base import Action, EnvSession, Message, SessionSpec
    from ..trajectory.trajectory import Trajectory

T = TypeVar("T")

LAST_WORD = 10.0
"""Seconds an environment has to say its partial credit after a limit of ours."""


@dataclass
class PlayedEpisode:
    """What was played: the trajectory without tokens, and what only evaluation counts.

    `messages` alternate between the environment's and the policy's. `trajectory` is set by policies that
    keep a token record.
    """

    end: EndReason = EndReason.INFRASTRUCTURE
    success: bool = False
    rewards: list[float] = field(default_factory=list)
    turns: int = 0
    messages: list[dict[str, Any]] = field(default_factory=list)
    model_calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    invalid_actions: int = 0
    forks: int = 0
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    error: str | None = None
    raised: bool = False
    """The environment's own code raised, or broke its contract: running it again will not help."""
    too_long: PromptTooLong | None = None
    """Set when the first prompt did not fit: the model was never asked."""
    trajectory: Trajectory | None = None

    def close(self) -> PlayedEpisode:
        """Apply the rule that an episode without a single reply did not happen; returns itself."""
        if self.model_calls == 0 and self.end.valid:
            if self.end in (EndReason.CONTEXT_LENGTH, EndReason.MAX_TOKENS):
                self.too_long = PromptTooLong(
                    f"the first prompt does not fit the model: {self.error or self.end}",
                    fix="choose a model with a longer context, or raise its limit",
                )
            told = f" ({self.error})" if self.error else ""
            self.error = f"it ended as {self.end} before the policy made one reply{told}"
            self.end = EndReason.INFRASTRUCTURE
        return self

    def record(self, planned: PlannedEpisode, *, process: int, at: float) -> EpisodeResult:
        """The journal's line for it; times to 0.1 ms, so that what is read back is what was written."""
        return EpisodeResult(
            index=planned.index,
            task=planned.task,
            seed=planned.seed,
            end=self.end,
            success=self.success and self.end.valid,
            reward=math.fsum(self.rewards),
            rewards=tuple(self.rewards),
            turns=self.turns,
            model_calls=self.model_calls,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            invalid_actions=self.invalid_actions,
            forks=self.forks,
            seconds=round(self.seconds, 4),
            latencies=tuple(round(x, 4) for x in self.latencies),
            error=self.error,
            raised=self.raised and not self.end.valid,
            process=process,
            at=round(at, 4),
        )


@runtime_checkable
class EpisodePlayer(Protocol):
    """A policy that plays whole episodes itself, such as one in our own engine."""

    name: str

    @property
    def default_concurrency(self) -> int: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def identity(self) -> dict[str, Any]: ...

    async def play(
        self, env: EnvSession, planned: PlannedEpisode, *, timeout: float | None
    ) -> PlayedEpisode: ...


async def play_episode(
    policy: Policy | EpisodePlayer, env: EnvSession, planned: PlannedEpisode, *, timeout: float | None = None
) -> PlayedEpisode:
    """Play one episode; `timeout` is in seconds, `None` the environment's own `episode_timeout`."""
    watched = WatchedSession(env)
    if isinstance(policy, EpisodePlayer):
        played = await policy.play(watched, planned, timeout=timeout)
    else:
        played = await _play(policy, watched, planned, timeout)
    if watched.fault is not None and not played.end.valid:
        played.raised, played.error = True, str(watched.fault).rstrip(".")
    return played.close()


class WatchedSession:
    """A session that remembers the first thing its environment's own code raised.

    A dead worker, a deadline that passed and a lack of places are none of it.
    """

    def __init__(self, env: EnvSession) -> None:
        self._env = env
        self.fault: TideError | None = None

    @property
    def spec(self) -> SessionSpec:
        return self._env.spec

    async def reset(self, *args: Any, **options: Any) -> tuple[tuple[Message, ...], dict[str, Any]]:
        return await self._watch(self._env.reset(*args, **options))

    async def step(self, *args: Any, **options: Any) -> tuple[tuple[Message, ...], float, bool, bool, Any]:
        return await self._watch(self._env.step(*args, **options))

    async def oracle(self) -> Action:
        return await self._watch(self._env.oracle())

    async def truncate(self, reason: EndReason) -> tuple[float, dict[str, Any]]:
        return await self._watch(self._env.truncate(reason))

    async def close(self) -> None:
        await self._env.close()

    async def _watch(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except TideError as error:
            # Kinds of InfrastructureError have a name of their own unless the author's code raised them.
            if self.fault is None and type(error) in (EnvironmentFault, InfrastructureError):
                self.fault = error
            raise


async def _play(
    policy: Policy, env: EnvSession, planned: PlannedEpisode, timeout: float | None
) -> PlayedEpisode:
    seconds = timeout or env.spec.episode_timeout
    played = PlayedEpisode()
    began = time.monotonic()
    state = PolicyState(
        task=planned.task,
        seed=planned.seed,
        split=planned.split,
        rng=random.Random(f"policy/{planned.seed}/{planned.split}/{planned.task!r}"),
        remaining=lambda: began + seconds - time.monotonic(),
        scripted=env.oracle if policy.cheats else None,
    )
    try:
        try:
            async with asyncio.timeout(seconds) as clock:
                await _turns(policy, env, planned, state, played)
        except EndReached as stop:
            played.end, played.error = EndReason(stop.reason), stop.detail or None
            await _tell(env, played)
        except TimeoutError:
            if not clock.expired():
                raise
            played.end, played.error = EndReason.TIME, f"not finished within {seconds:g} s"
            if len(played.latencies) == played.turns:  # the policy was slow: the environment can answer
                await _tell(env, played)
    except Exception as error:  # noqa: BLE001 - one broken episode must not end the other ones
        played.end = EndReason.INFRASTRUCTURE
        played.error = str(error) if isinstance(error, TideError) else f"{type(error).__name__}: {error}"
    played.messages = copy_messages(state.messages)
    played.model_calls = state.model_calls
    played.prompt_tokens, played.completion_tokens = state.prompt_tokens, state.completion_tokens
    played.seconds = time.monotonic() - began
    return played


async def _tell(env: EnvSession, played: PlayedEpisode) -> None:
    """Tell the environment that a limit cut its episode, and take the partial credit it gives."""
    if played.turns == 0:
        return
    async with asyncio.timeout(LAST_WORD):
        credit, info = await env.truncate(played.end)
    if credit:
        played.rewards[-1] += _finite(credit, env)
    played.success = bool(info.get("success", False))


def _finite(reward: Any, env: EnvSession) -> float:
    reward = float(reward)
    if not math.isfinite(reward):
        raise EnvironmentFault(f"the reward is {reward}", where=env.spec.env_id, fix="return a finite number")
    return reward


async def _turns(
    policy: Policy, env: EnvSession, planned: PlannedEpisode, state: PolicyState, played: PlayedEpisode
) -> None:
    messages: Sequence[dict[str, Any]]
    messages, _ = await env.reset(seed=planned.seed, task=planned.task, split=planned.split)
    while True:
        state.messages.extend(messages)
        clock = time.monotonic()
        action = await policy.act(messages, env.spec, state)
        played.latencies.append(time.monotonic() - clock)
        state.model_calls += 1
        state.messages.append(assistant(action) if isinstance(action, str) else copy_message(action))
        messages, reward, terminated, truncated, info = await env.step(action)
        played.rewards.append(_finite(reward, env))
        played.turns += 1
        played.invalid_actions += "invalid_action" in info
        if terminated or truncated:
            state.messages.extend(messages)
            played.end = end_of(info, terminated)
            played.success = bool(info.get("success", played.end is EndReason.SUCCESS))
            return


def end_of(info: Mapping[str, Any], terminated: bool) -> EndReason:
    """The end that the environment named, or what its flags say when it named none."""
    if "end" in info:
        return EndReason(info["end"])
    if terminated:
        return EndReason.SUCCESS if info.get("success") else EndReason.FAILURE
    return EndReason.MAX_TURNS
