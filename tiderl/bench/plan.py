"""What both sides of `tiderl bench train` do: one configuration, told to each side in its own words.

Invariant: tasks, seeds, prompts, batch, limits, adapter, optimizer and loss of the two sides are the same;
a configuration that TRL cannot run in the same way is refused with the key that stands in the way.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

from tiderl.config import RunConfig
from tiderl.config.load import check_config
from tiderl.errors import ConfigError

LOSS_TYPES = {"token_mean": "dapo", "seq_mean_token_mean": "grpo", "seq_mean_token_sum": "dr_grpo"}
"""Our aggregations and what GRPOConfig calls them."""

PACKAGES = ("tiderl", "tiderl.environments", "tiderl.agents")
"""What TRL's side takes from TideRL: environment and agent, so that both sides see the same tokens."""


def bench_config(config: RunConfig, *, runs_dir: Path, model: Path, updates: int, seed: int) -> RunConfig:
    """`config` as TideRL's side runs it: `updates` updates and nothing else."""
    data = config.model_dump(mode="json")
    data |= {"name": "run", "runs_dir": str(runs_dir), "seed": seed}
    data["model"]["path"] = str(model)
    data["training"] |= {"updates": updates, "stop": None, "max_wall_s": None}
    data["evaluation"] |= {"episodes": 0, "every": 0}
    data["checkpoint"] |= {"every": 0}
    return check_config(data, "the benchmark's configuration")


def check_comparable(config: RunConfig) -> None:
    """Raises `ConfigError` for what TRL would do in another way, or not at all."""
    from tiderl.env.registry import spec

    known = spec(config.environment.id)
    loss, advantage = config.training.loss, config.training.advantage
    for key, value, wanted in (
        ("training.loss.kind", loss.kind, "ppo"),
        ("training.loss.old", loss.old, "rollout"),
        ("training.advantage.kind", advantage.kind, "grpo"),
        ("rollout.max_staleness", config.rollout.max_staleness, 0),
        ("environment.id's package", known.package, "tiderl"),
    ):
        if value != wanted:
            raise ConfigError(
                f"{key} is {value!r}, which the comparison with TRL does not cover",
                fix=f"use a configuration in which it is {wanted!r}",
            )


def trl_plan(config: RunConfig, *, folder: Path) -> dict[str, Any]:
    """The plan of TRL's side: plain JSON. `config` comes from `bench_config`.

    Raises:
        ConfigError, ModelError, EnvironmentFault: as for a run.
    """
    from tiderl.agent.formats import get_format
    from tiderl.rollout.setup import cores

    rollout, training = config.rollout, config.training
    loss = training.loss
    form = type(get_format(config.agent.format))
    lora = config.model.lora
    return {
        "folder": str(folder),
        "packages": {name: str(package_folder(name)) for name in PACKAGES},
        "model": config.model.path,
        "dtype": config.model.dtype,
        "lora": {"rank": lora.rank, "alpha": lora.alpha} if lora else None,
        "threads": training.threads or cores(),
        "seed": config.seed,
        "updates": training.updates,
        "groups": rollout.groups_per_update,
        "group_size": rollout.group_size,
        "env_id": config.environment.id,
        "env_kwargs": config.environment.kwargs,
        "split": config.environment.split,
        "format": f"{form.__module__}:{form.__qualname__}",
        "system": config.agent.system,
        "instructions": config.agent.instructions,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "max_turn_tokens": rollout.max_turn_tokens,
        "max_episode_tokens": rollout.max_episode_tokens,
        "learning_rate": training.learning_rate,
        "warmup": training.warmup,
        "weight_decay": training.weight_decay,
        "betas": list(training.betas),
        "max_grad_norm": training.max_grad_norm,
        "loss": {
            "beta": loss.kl_coef,
            "epsilon": loss.clip_low,
            "epsilon_high": loss.clip_high,
            "delta": loss.dual_clip,
            "scale_rewards": "group" if training.advantage.std else "none",
            "loss_type": LOSS_TYPES[loss.aggregation],
        },
        "tasks": tasks(config),
    }


def tasks(config: RunConfig) -> list[dict[str, Any]]:
    """Every task of the run in its order, with the environment's seed and the prompt's token ids."""
    from tiderl.env.registry import make
    from tiderl.rollout.setup import build_agent
    from tiderl.rollout.tasks import TaskStream

    agent = build_agent(config, config.model.path)
    env = make(config.environment.id, **config.environment.kwargs)
    try:
        split = config.environment.split
        stream = TaskStream(env.task_lists.ids(split), config.seed)
        found = []
        for ordinal in range(config.training.updates * config.rollout.groups_per_update):
            item = stream.item(ordinal)
            messages, _ = env.reset(seed=item.seed, options={"task": item.task, "split": split})
            chat = agent.episode()
            ids = chat.start(messages, env.tools)
            if chat.new_images:
                raise ConfigError(
                    f"{config.environment.id} shows images, which TRL's rollout_func does not take",
                    fix="use an environment of text",
                )
            found.append({"id": item.task, "seed": item.seed, "prompt_ids": ids})
        return found
    finally:
        env.close()


def package_folder(name: str) -> Path:
    """Where an installed package's files are."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise ConfigError(f"the package {name} is not installed", fix="pip install tiderl")
    return Path(found.origin).parent


def core_requirements() -> list[str]:
    """What TideRL itself needs without extras, as it was installed."""
    from importlib.metadata import requires

    return [need for need in requires("tiderl") or [] if not re.search(r"\bextra\s*==", need)]
