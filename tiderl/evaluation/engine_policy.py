"""A model in our own engine as a policy: whole episodes, tokens in, tokens out.

Invariant: an episode is played by `rollout.episode.run_episode`, exactly as in training; only limits and
sampling differ. An engine that is passed in started belongs to the caller.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ..engine.base import Sampling, TurnOutput
from ..env.ends import EndReason
from ..errors import PromptTooLong
from ..rollout.episode import EpisodeLimits, EpisodeSpec, run_episode
from ..rollout.gate import TurnGate
from ..rollout.tasks import derive_seed
from .episode import PlayedEpisode
from .plan import PlannedEpisode

if TYPE_CHECKING:
    import numpy as np

    from ..agent.chat import ChatAgent
    from ..engine.base import Engine, KVSession
    from ..hub.base import EnvSession


class EnginePolicy:
    """Plays with the weights that `engine` holds.

    Args:
        engine: started, unless `own`.
        agent: chat template and action format.
        limits: of an episode; the evaluation's own deadline replaces `seconds`.
        gate: when a turn may be sent; None: at once.
        own: start the engine in `start` and end it in `close`.
        identity: what decides how it acts, for a resumed evaluation to compare.
    """

    def __init__(
        self,
        engine: Engine,
        agent: ChatAgent,
        limits: EpisodeLimits,
        *,
        gate: TurnGate | None = None,
        own: bool = False,
        name: str = "engine",
        identity: Mapping[str, Any] | None = None,
        concurrency: int | None = None,
    ) -> None:
        self.engine, self.agent, self.limits, self.gate = engine, agent, limits, gate
        self.own, self.name = own, name
        self._identity = dict(identity or {})
        self._concurrency = concurrency
        self._plays: Counter[int] = Counter()

    @property
    def default_concurrency(self) -> int:
        """As many episodes as the engine can hold at once."""
        if self._concurrency is not None:
            return self._concurrency
        room = self.engine.capacity_tokens // self.limits.max_episode_tokens
        return max(1, min(self.engine.max_sessions, room))

    async def start(self) -> None:
        """Start the engine, if it is ours. Raises EngineError."""
        if self.own:
            await self.engine.start()

    async def close(self) -> None:
        """End the engine, if it is ours."""
        if self.own:
            await self.engine.close()

    def identity(self) -> dict[str, Any]:
        """Model, format and limits, as JSON."""
        limits = {k: v for k, v in asdict(self.limits).items() if k != "seconds"}
        return {"name": self.name, "limits": limits, **self._identity}

    async def play(self, env: EnvSession, planned: PlannedEpisode, *, timeout: float | None) -> PlayedEpisode:
        """Play one episode.

        Raises:
            EngineError: the engine is dead.
            PromptTooLong: the very first prompt does not fit, so the model was never asked.
        """
        self._plays[planned.index] += 1
        # A name of its own each time: under an old name the engine would count tokens as computed again.
        spec = EpisodeSpec(
            episode_id=f"episode-{planned.index:06d}.{self._plays[planned.index]}",
            env_id=env.spec.env_id,
            task=planned.task,
            split=planned.split,
            seed=planned.seed,
            sampling_seed=derive_seed("evaluation", planned.seed, planned.index),
            ordinal=planned.index,
        )
        watched = _Watched(self.engine)
        trajectory = await run_episode(
            spec, env, watched, self.agent, replace(self.limits, seconds=timeout), gate=self.gate
        )
        if not watched.outputs and trajectory.end in (EndReason.CONTEXT_LENGTH, EndReason.MAX_TOKENS):
            raise PromptTooLong(trajectory.note or "the first prompt does not fit the model's limit")
        return PlayedEpisode(
            end=trajectory.end,
            success=trajectory.success,
            rewards=list(trajectory.rewards),
            turns=len(trajectory.rewards),
            messages=trajectory.messages,
            model_calls=len(watched.outputs),
            prompt_tokens=sum(prompt for prompt, _ in watched.outputs),
            completion_tokens=sum(sampled for _, sampled in watched.outputs),
            invalid_actions=trajectory.invalid_actions,
            forks=trajectory.forks,
            seconds=trajectory.seconds.get("total", 0.0),
            latencies=watched.latencies,
            error=trajectory.note or None,
            trajectory=trajectory,
        )


class _Watched:
    """An engine as one episode sees it, with the time and the tokens of each turn written down."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.latencies: list[float] = []
        self.outputs: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @asynccontextmanager
    async def session(self, reserve_tokens: int, **options: Any) -> AsyncIterator[_WatchedSession]:
        async with self._engine.session(reserve_tokens, **options) as kv:
            yield _WatchedSession(kv, self)


class _WatchedSession:
    def __init__(self, kv: KVSession, watched: _Watched) -> None:
        self._kv, self._watched = kv, watched

    @property
    def length(self) -> int:
        return self._kv.length

    async def generate(
        self, new_ids: Sequence[int], sampling: Sampling, images: Sequence[np.ndarray] = ()
    ) -> TurnOutput:
        began = time.monotonic()
        output = await self._kv.generate(new_ids, sampling, images)
        self._watched.latencies.append(time.monotonic() - began)
        self._watched.outputs.append((output.prompt_tokens, len(output.ids)))
        return output
