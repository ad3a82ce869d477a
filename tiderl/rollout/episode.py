"""One episode, from reset to its end, as straight-line code.

Invariants: the trajectory's ids are exactly what the engine saw and sampled; whatever happens, one
`Trajectory` with one `EndReason` comes back, except for cancellation and a dead engine, which pass
through; a failure around the task is never a reward.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tiderl.engine.base import KVSession, Sampling, TurnOutput
from tiderl.env.ends import EndReason
from tiderl.errors import EngineError, EnvironmentFault, InfrastructureError, PromptTooLong
from tiderl.rollout.gate import FreeGate, TurnGate
from tiderl.rollout.tasks import derive_seed
from tiderl.trajectory.record import TokenRecord
from tiderl.trajectory.trajectory import Trajectory

if TYPE_CHECKING:
    from tiderl.agent.chat import ChatAgent, ChatEpisode
    from tiderl.hub.base import EnvSession


@dataclass(frozen=True)
class EpisodeSpec:
    """Which episode: its place in the task stream, its task and its seeds."""

    episode_id: str
    env_id: str
    task: str | int
    split: str
    seed: int
    """Of the environment: the same for all members of a group."""
    sampling_seed: int
    """Of the sampler: another one for each member."""
    ordinal: int = 0
    member: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """Rank in admission and in lockstep."""
        return (self.ordinal, self.member)


@dataclass(frozen=True)
class EpisodeLimits:
    """What an episode may use. Tokens count the prompt; `seconds` also bounds a hung environment."""

    max_turn_tokens: int
    max_episode_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seconds: float | None = None
    """None: the environment's own `episode_timeout`."""
    ignore_eos: bool = False
    """Every turn has exactly `max_turn_tokens` (benchmarks)."""


class SessionSource(Protocol):
    """Where an episode's KV sessions come from: an engine, or a task of the conductor."""

    @property
    def max_model_len(self) -> int:
        """Longest context in tokens."""
        ...

    def session(
        self, reserve_tokens: int, *, session_id: str | None = None, priority: int = 0
    ) -> AbstractAsyncContextManager[KVSession]:
        """See `tiderl.engine.base.Engine.session`."""
        ...


class Deadline:
    """The seconds an episode may take; they stand still while it waits for us and not for its environment."""

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self._timeout = timeout

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Time inside does not count."""
        when = self._timeout.when()
        if when is None:
            yield
            return
        loop = asyncio.get_running_loop()
        left = when - loop.time()
        self._timeout.reschedule(None)
        try:
            yield
        finally:
            if not self._timeout.expired():
                self._timeout.reschedule(loop.time() + left)


def new_trajectory(spec: EpisodeSpec) -> Trajectory:
    """An empty trajectory for `spec`."""
    return Trajectory(
        episode_id=spec.episode_id,
        task=spec.task,
        group=f"{spec.env_id}:{spec.ordinal}",
        ordinal=spec.ordinal,
        member=spec.member,
        seed=spec.seed,
        env_id=spec.env_id,
        split=spec.split,
    )


async def run_episode(
    spec: EpisodeSpec,
    env: EnvSession,
    engine: SessionSource,
    agent: ChatAgent,
    limits: EpisodeLimits,
    *,
    gate: TurnGate | None = None,
    acting: Callable[[str], None] | None = None,
) -> Trajectory:
    """Run `spec` in `env` with the policy in `engine`.

    Args:
        acting: told which tool a reply calls, just before the environment gets it.

    Raises:
        EngineError: the engine is dead; the caller must not go on.
        asyncio.CancelledError: the caller cancelled it; KV and environment are released by their owners.
    """
    trajectory = new_trajectory(spec)
    seconds = limits.seconds or env.spec.episode_timeout
    chat = agent.episode()
    started = time.monotonic()
    try:
        async with asyncio.timeout(seconds) as timeout:
            turns = _Turns(
                trajectory, spec, env, chat, limits, gate or FreeGate(), Deadline(timeout), acting or _nobody
            )
            await turns.drive(engine)
    except TimeoutError:
        await _cut(trajectory, env, EndReason.TIME)
    except PromptTooLong as error:
        trajectory.note = str(error)
        ours = limits.max_episode_tokens < engine.max_model_len
        await _cut(trajectory, env, EndReason.MAX_TOKENS if ours else EndReason.CONTEXT_LENGTH)
    except EngineError:
        raise
    except (InfrastructureError, EnvironmentFault) as error:
        trajectory.end, trajectory.note = EndReason.INFRASTRUCTURE, str(error)
    trajectory.messages = chat.messages
    trajectory.forks = chat.forks
    trajectory.seconds["total"] = time.monotonic() - started
    return trajectory


async def _cut(trajectory: Trajectory, env: EnvSession, reason: EndReason) -> None:
    """End an episode at a limit of ours; the environment is told and may give partial credit (T72)."""
    trajectory.end = reason
    if not trajectory.rewards:
        return
    try:
        credit, _ = await env.truncate(reason)
    except (InfrastructureError, EnvironmentFault) as error:
        # A hung environment is past answering; what it gave so far stands.
        trajectory.note = trajectory.note or str(error)
    else:
        trajectory.rewards[-1] += credit


def _nobody(tool: str) -> None:
    """Nobody wants to know."""


def _tool_of(action: Any) -> str:
    """The first tool an action calls; "" for plain text."""
    calls = action.get("tool_calls") if isinstance(action, dict) else None
    return str(calls[0].get("function", {}).get("name", "")) if calls else ""


@dataclass
class _Turns:
    """An episode under way."""

    trajectory: Trajectory
    spec: EpisodeSpec
    env: EnvSession
    chat: ChatEpisode
    limits: EpisodeLimits
    gate: TurnGate
    deadline: Deadline
    acting: Callable[[str], None]

    async def drive(self, engine: SessionSource) -> None:
        """From reset to the end."""
        spec, trajectory, limits = self.spec, self.trajectory, self.limits
        cap = min(limits.max_episode_tokens, self.env.spec.max_total_tokens or limits.max_episode_tokens)
        async with self.gate.inside(spec.order):
            clock = time.monotonic()
            messages, _ = await self.env.reset(seed=spec.seed, task=spec.task, split=spec.split)
            new = self.chat.start(messages, self.env.spec.tools)
            trajectory.seconds["environment"] = time.monotonic() - clock
            broke = True
            while broke:  # one engine session for each record; a second one only after a fork
                record = TokenRecord()
                trajectory.records.append(record)
                session_id = f"{spec.episode_id}.{len(trajectory.records)}"
                async with engine.session(cap, session_id=session_id) as kv:
                    broke, new = await self._on_record(record, kv, new)

    async def _on_record(self, record: TokenRecord, kv: KVSession, new: list[int]) -> tuple[bool, list[int]]:
        """Turns on one record, until the episode ends (False) or the record forks (True, the new prompt)."""
        trajectory, chat = self.trajectory, self.chat
        while True:
            out = await self._reply(kv, new)
            record.append_context(new, chat.new_image_hashes)
            record.append_sampled(out.ids, out.logprobs, out.versions)
            trajectory.turns += 1
            action = chat.act(out.ids, out.finish)
            self.acting(_tool_of(action))
            clock = time.monotonic()
            messages, reward, terminated, truncated, info = await self.env.step(action)
            trajectory.seconds["environment"] += time.monotonic() - clock
            trajectory.rewards.append(float(reward))
            trajectory.invalid_actions += "invalid_action" in info
            if terminated or truncated:
                chat.finish(messages)
                trajectory.end = EndReason(info["end"])
                trajectory.success = bool(info.get("success", trajectory.end is EndReason.SUCCESS))
                return False, []
            delta = chat.observe(messages)
            if delta.broke:
                return True, list(delta.ids)
            new = list(delta.ids)

    async def _reply(self, kv: KVSession, new: list[int]) -> TurnOutput:
        spec, limits, seconds = self.spec, self.limits, self.trajectory.seconds
        sampling = Sampling(
            max_tokens=limits.max_turn_tokens,
            temperature=limits.temperature,
            top_p=limits.top_p,
            stop_token_ids=self.chat.agent.stop_token_ids,
            seed=derive_seed(spec.sampling_seed, self.trajectory.turns),
            ignore_eos=limits.ignore_eos,
        )
        with self.deadline.stopped():
            clock = time.monotonic()
            await self.gate.turn(spec.order)
            seconds["gate"] = seconds.get("gate", 0.0) + time.monotonic() - clock
            clock = time.monotonic()
            out = await kv.generate(new, sampling, self.chat.new_images)
            seconds["engine"] = seconds.get("engine", 0.0) + time.monotonic() - clock
        return out
