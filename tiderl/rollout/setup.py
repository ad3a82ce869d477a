"""From a run's configuration to the parts an episode needs: one place, for training and evaluation.

Invariant: a `run:` policy is built here from the run's own `config.yaml`, exactly as the run was.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tiderl.config import RunConfig
from tiderl.engine.settings import EngineSettings
from tiderl.rollout.episode import EpisodeLimits

if TYPE_CHECKING:
    from tiderl.agent.chat import ChatAgent


@dataclass(frozen=True)
class Model:
    """A model on disk and the name it was asked for by."""

    folder: Path
    name: str


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0))


def find_model(name: str) -> Model:
    """The folder of a model given by folder or hub name; converts and caches where needed."""
    from tiderl.engine.models import resolve_model

    return Model(Path(resolve_model(name).path), name)


def engine_settings(
    config: RunConfig, model: str | Path, *, seed: int | None = None, log_file: Path | None = None
) -> EngineSettings:
    """The engine of a run. `max_model_len` is what an episode may use, so KV is planned for that."""
    engine = config.engine
    return EngineSettings(
        model=str(model),
        dtype=config.model.dtype,
        max_model_len=config.model.max_length,
        kv_tokens=engine.kv_tokens,
        block_size=engine.block_size,
        max_sessions=engine.max_sessions,
        max_batched_tokens=engine.max_batched_tokens,
        threads=engine.threads or max(1, cores() // engine.ranks),
        seed=config.seed if seed is None else seed,
        turn_timeout=engine.turn_timeout,
        log_file=log_file,
    )


def build_agent(config: RunConfig, model: str | Path) -> ChatAgent:
    """The agent of a run, over the tokenizer in `model`. Raises `ModelError` for a folder without one."""
    from tiderl.agent.chat import ChatAgent
    from tiderl.agent.tokenizer import load_tokenizer

    return ChatAgent(
        load_tokenizer(model),
        config.agent.format,
        system=config.agent.system,
        instructions=config.agent.instructions,
    )


def training_limits(config: RunConfig) -> EpisodeLimits:
    """Limits of episodes that are trained on."""
    rollout = config.rollout
    return EpisodeLimits(
        max_turn_tokens=rollout.max_turn_tokens,
        max_episode_tokens=rollout.max_episode_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
    )


def evaluation_limits(config: RunConfig) -> EpisodeLimits:
    """Limits of the run's own evaluation, and of `tiderl eval --policy run:...`."""
    rollout = config.rollout
    return EpisodeLimits(
        max_turn_tokens=rollout.max_turn_tokens,
        max_episode_tokens=rollout.max_episode_tokens,
        temperature=config.evaluation.temperature,
    )
