"""The parts of a run, opened in an order that fails early and closed in reverse.

Invariant: everything that can be wrong about the user's input is found before the run's folder exists.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiderl.config import RunConfig
from tiderl.config.check import check_splits, scheduling_policy
from tiderl.errors import PromptTooLong
from tiderl.evaluation.engine_policy import EnginePolicy
from tiderl.evaluation.plan import EvaluationPlan
from tiderl.evaluation.runner import evaluate
from tiderl.hub.local import LocalHub
from tiderl.rollout.conductor import Conductor
from tiderl.rollout.driver import Rollout, RolloutSettings
from tiderl.rollout.engines import Engines
from tiderl.rollout.gate import FreeGate, LockstepGate
from tiderl.rollout.setup import (
    build_agent,
    cores,
    engine_settings,
    evaluation_limits,
    find_model,
    training_limits,
)
from tiderl.rollout.tasks import TaskStream
from tiderl.telemetry.decisions import DecisionLog
from tiderl.telemetry.rollout_meter import RolloutMeter
from tiderl.training.settings import LoraSettings, LossSettings, ModelSettings, OptimSettings
from tiderl.trajectory.store import EpisodeStore

if TYPE_CHECKING:
    from tiderl.agent.chat import ChatAgent
    from tiderl.evaluation.result import EvaluationResult
    from tiderl.training.replica import Replica
    from tiderl.training.run import TrainingRun


@dataclass
class Parts:
    """What a run works with."""

    config: RunConfig
    engines: Engines
    hub: LocalHub
    replica: Replica
    conductor: Conductor
    rollout: Rollout
    meter: RolloutMeter
    policy: EnginePolicy

    async def evaluate(self) -> EvaluationResult:
        """The run's own evaluation: the same tasks, seeds and sampling each time. Rollouts stand still."""
        async with self.conductor.quiet():
            engine = self.engines.first()  # not always the one of last time: that may have died
            self.policy.engine = engine
            self.policy.gate = LockstepGate(engine.hold) if self.config.rollout.deterministic else FreeGate()
            return await evaluate(evaluation_plan(self.config), hub=self.hub, policy=self.policy)


def evaluation_plan(config: RunConfig) -> EvaluationPlan:
    """The evaluation a run does before and after training."""
    return EvaluationPlan(
        env_id=config.environment.id,
        episodes=config.evaluation.episodes,
        split=config.evaluation.split,
        seed=config.seed,
        temperature=config.evaluation.temperature,
        env_kwargs=config.environment.kwargs,
    )


@asynccontextmanager
async def open_parts(run: TrainingRun, resume: int | None) -> AsyncIterator[Parts]:
    """Check everything, then open engine, environments and trainer."""
    config, folder, say = run.config, run.folder, run.progress.status
    check_splits(config)
    say("finding the model")
    model = find_model(config.model.path)
    agent = build_agent(config, model.folder)
    size = sum(f.stat().st_size for f in model.folder.glob("*.safetensors"))
    wide = 2 if config.model.dtype == "float32" else 1
    folder.need_free(size * wide * (config.checkpoint.keep + 2) + 200_000_000)
    say("trying the environment")
    ids = await _try_environment(config, agent)

    policy = scheduling_policy(config)
    folder.open(resume)
    store = EpisodeStore(folder.path / "episodes", tokens=config.checkpoint.tokens)
    say("starting the engine" if config.engine.ranks == 1 else f"starting {config.engine.ranks} engines")
    async with AsyncExitStack() as stack:
        stack.callback(store.close)
        settings = engine_settings(config, model.folder, log_file=folder.path / "engine.log")
        settings = replace(settings, banned_token_ids=agent.placeholder_token_ids)
        engines = Engines(settings, config.engine.ranks, respawn=config.engine.respawn)
        stack.push_async_callback(engines.close)
        await engines.start()
        hub = await stack.enter_async_context(LocalHub(workers=config.environment.workers))
        replica = await run.in_trainer(_load_replica, config, model.folder)
        ids = await hub.task_ids(config.environment.id, config.environment.split, **config.environment.kwargs)
        meter = RolloutMeter()
        conductor = Conductor(
            policy,
            engines.pool,
            concurrency=config.rollout.concurrency or 1 << 30,
            lockstep=config.rollout.deterministic,
            decisions=DecisionLog(
                folder.path / "decisions.jsonl", keep_until=None if resume is None else math.inf
            ),
            meter=meter,
            spawn=engines.spawn,
        )
        stack.push_async_callback(conductor.close)
        rollout = Rollout(
            _rollout_settings(config),
            conductor=conductor,
            hub=hub,
            agent=agent,
            tasks=TaskStream(ids, config.seed),
            limits=training_limits(config),
            on_episode=run.note_episode(store),
        )
        stack.push_async_callback(rollout.close)
        # One for all evaluations: it never names two sessions alike, which would count as computed again.
        evaluator = EnginePolicy(engines.first(), agent, evaluation_limits(config))
        yield Parts(config, engines, hub, replica, conductor, rollout, meter, evaluator)


async def _try_environment(config: RunConfig, agent: ChatAgent) -> list[Any]:
    """Task ids of the training split, once its first prompt is known to leave room for a reply.

    Raises:
        PromptTooLong: it does not.
    """
    environment, limit = config.environment, config.rollout.max_episode_tokens
    async with LocalHub(workers=1) as hub:
        ids = await hub.task_ids(environment.id, environment.split, **environment.kwargs)
        item = TaskStream(ids, config.seed).item(0)
        async with hub.session(environment.id, **environment.kwargs) as env:
            messages, _ = await env.reset(seed=item.seed, task=item.task, split=environment.split)
            prompt = agent.episode().start(messages, env.spec.tools)
    if len(prompt) >= limit:
        raise PromptTooLong(
            f"the first prompt of {environment.id} has {len(prompt)} tokens, and an episode may have {limit}",
            where=f"task {item.task!r}",
            fix="raise rollout.max_episode_tokens (and model.max_length)",
        )
    return ids


def _rollout_settings(config: RunConfig) -> RolloutSettings:
    rollout = config.rollout
    return RolloutSettings(
        env_id=config.environment.id,
        split=config.environment.split,
        seed=config.seed,
        group_size=rollout.group_size,
        groups_per_update=rollout.groups_per_update,
        max_staleness=rollout.max_staleness,
        min_valid=rollout.min_group_size,
        retries=rollout.retries,
        max_failures=rollout.max_failures,
        env_kwargs=dict(config.environment.kwargs),
    )


def _load_replica(config: RunConfig, model: Path) -> Replica:
    import torch

    from tiderl.training.replica import Replica

    lora = config.model.lora
    training = config.training
    replica = Replica(
        ModelSettings(
            path=str(model),
            dtype=config.model.dtype,
            lora=LoraSettings(rank=lora.rank, alpha=lora.alpha) if lora else None,
            threads=training.threads or cores(),
            device="cuda" if torch.cuda.is_available() else "cpu",
            max_tokens_per_microbatch=training.microbatch_tokens,
        ),
        OptimSettings(
            learning_rate=training.learning_rate,
            warmup=training.warmup,
            weight_decay=training.weight_decay,
            betas=training.betas,
            max_grad_norm=training.max_grad_norm,
        ),
        loss_settings(config),
        seed=config.seed,
    )
    replica.load()
    return replica


def loss_settings(config: RunConfig) -> LossSettings:
    """The loss section in the trainer's own words."""
    loss, advantage = config.training.loss, config.training.advantage
    return LossSettings(
        policy=loss.kind,
        advantage=advantage.kind,
        std=advantage.std,
        zero_variance=advantage.zero_variance,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip=loss.dual_clip,
        aggregation=loss.aggregation,
        token_norm=loss.token_norm,
        kl_coef=loss.kl_coef,
        kl_kind=loss.kl_kind,
        old=loss.old,
        correction=loss.correction,
        cap=loss.correction_cap,
    )
