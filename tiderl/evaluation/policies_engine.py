"""`hf:` and `run:`: a model folder or a training run as a policy in an engine of its own.

Invariant: both are built by `rollout.setup` from a `RunConfig`; a run's is the run's own, so that its
evaluation is repeated and not imitated.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import RunConfig
from ..config.schema import (
    AgentConfig,
    EngineConfig,
    EnvironmentConfig,
    EvaluationConfig,
    ModelConfig,
    RolloutConfig,
)
from ..errors import ConfigError, ModelError, nearest
from ..rollout.gate import FreeGate, LockstepGate
from ..rollout.setup import build_agent, engine_settings, evaluation_limits, find_model
from .engine_policy import EnginePolicy
from .plan import EvaluationPlan
from .run_folder import find_weights, read_config

if TYPE_CHECKING:
    from ..engine.settings import EngineSettings

LONGEST = 2048
"""Longest context of an `hf:` episode in tokens, unless the model's is shorter or `max_length` is given."""
REPLY = 256
"""Longest reply of an `hf:` policy in tokens, unless --max-tokens is given."""
KV_BYTES = 2 << 30
MOST_SESSIONS = 64
OPTIONS = {
    "max_length": "longest context in tokens",
    "dtype": "float32 or bfloat16",
    "kv_tokens": "size of the KV cache in tokens",
    "max_sessions": "most episodes in the engine",
    "system": "replaces the environment's system message",
    "instructions": "describe the tools in the system message",
    "threads": "CPU threads of the engine",
}


def load_engine_policy(scheme: str, argument: str, plan: EvaluationPlan) -> EnginePolicy:
    """The policy of `hf:ARGUMENT` or `run:ARGUMENT`, its engine not started yet.

    Raises:
        ModelError: no such model, or one that cannot be chatted with.
        ConfigError: no such run, or an unknown option of the policy.
        MissingExtra: the packages of an engine are not installed.
    """
    for key in plan.policy_kwargs:
        if key not in OPTIONS:
            near = nearest(key, OPTIONS, n=1) or list(OPTIONS)
            raise ConfigError(f"the policy {scheme} has no option {key!r}", fix=f"use {', '.join(near)}")
    if scheme == "run":
        run = Path(argument)
        config, weights = read_config(run), find_weights(run)
        name = f"{run.resolve().name}/{weights.name}"
    else:
        model = find_model(argument)
        weights, name = model.folder, model.name
        config = _config_for(weights, plan)
    config = _overridden(config, plan)
    agent = build_agent(config, weights)

    from ..engine.vllm import VLLMEngine

    settings = _with_images(engine_settings(config, weights), plan, agent.placeholder_token_ids)
    engine = VLLMEngine(settings)
    limits = evaluation_limits(config)
    gate = LockstepGate(engine.hold) if config.rollout.deterministic else FreeGate()
    return EnginePolicy(
        engine,
        agent,
        limits,
        gate=gate,
        own=True,
        name=scheme,
        concurrency=max(1, min(settings.max_sessions, settings.kv_tokens // limits.max_episode_tokens)),
        identity={
            "model": name,
            "weights": weights_digest(weights),
            "format": config.agent.format,
            "system": config.agent.system,
            "instructions": config.agent.instructions,
            "dtype": config.model.dtype,
        },
    )


def _overridden(config: RunConfig, plan: EvaluationPlan) -> RunConfig:
    """`config` with what the user asked for on the command line."""
    data = config.model_dump()
    options = plan.policy_kwargs
    wanted = {
        ("agent", "format"): plan.format,
        ("agent", "system"): options.get("system"),
        ("agent", "instructions"): options.get("instructions"),
        ("evaluation", "temperature"): plan.temperature,
        ("rollout", "max_turn_tokens"): plan.max_tokens,
        ("engine", "threads"): options.get("threads"),
        ("engine", "kv_tokens"): options.get("kv_tokens"),
        ("engine", "max_sessions"): options.get("max_sessions"),
        ("model", "dtype"): options.get("dtype"),
        ("model", "max_length"): options.get("max_length"),
        ("rollout", "max_episode_tokens"): options.get("max_length"),
    }
    for (section, key), value in wanted.items():
        if value is not None:
            data[section][key] = value
    from ..config.load import check_config

    return check_config(data, "command line")


def _config_for(folder: Path, plan: EvaluationPlan) -> RunConfig:
    """Settings for a model that no run of ours made."""
    shape = _shape(folder)
    length = int(plan.policy_kwargs.get("max_length") or min(LONGEST, shape["length"]))
    dtype = plan.policy_kwargs.get("dtype") or _default_dtype()
    per_token = shape["kv_values"] * (4 if dtype == "float32" else 2)
    room = KV_BYTES // max(per_token, 1)
    return RunConfig(
        seed=plan.seed,
        model=ModelConfig(path=str(folder), dtype=dtype, max_length=length),
        environment=EnvironmentConfig(id=plan.env_id, kwargs=dict(plan.env_kwargs)),
        agent=AgentConfig(format=plan.format or "hermes"),
        rollout=RolloutConfig(
            max_turn_tokens=min(plan.max_tokens or REPLY, length), max_episode_tokens=length, temperature=1.0
        ),
        engine=EngineConfig(
            kv_tokens=max(length + 64, min(room, length * MOST_SESSIONS)), max_sessions=MOST_SESSIONS
        ),
        evaluation=EvaluationConfig(split=plan.split, temperature=plan.temperature or 0.0),
    )


def _shape(folder: Path) -> dict[str, int]:
    """Longest context, and values of KV a token, as the checkpoint's configuration tells them.

    Raises:
        ModelError: it has no configuration that can be read.
    """
    try:
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"the model's config.json cannot be read: {error}", where=str(folder), fix="restore that file"
        ) from error
    text = data.get("text_config") or data
    heads = int(text.get("num_attention_heads") or 1)
    head = int(text.get("head_dim") or int(text.get("hidden_size") or 0) // heads or 64)
    return {
        "length": int(text.get("max_position_embeddings") or LONGEST),
        "kv_values": 2
        * int(text.get("num_hidden_layers") or 1)
        * int(text.get("num_key_value_heads") or heads)
        * head,
    }


def _default_dtype() -> str:
    import torch

    return "bfloat16" if torch.cuda.is_available() else "float32"


def _with_images(
    settings: EngineSettings, plan: EvaluationPlan, placeholders: tuple[int, ...]
) -> EngineSettings:
    """Let the engine take pictures where the environment shows some; placeholders are never sampled."""
    from ..env import registry

    spec = registry.spec(plan.env_id)
    images = spec.limits.max_images if spec.modality == "image" else 0
    return replace(settings, banned_token_ids=placeholders, max_images=images)


def weights_digest(folder: Path) -> str:
    """A fingerprint of a checkpoint that costs little to read: sizes, and samples of all of each file."""
    digest = hashlib.sha256()
    names = ("*.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "tokenizer_config.json")
    for path in sorted(p for pattern in names for p in folder.glob(pattern)):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with open(path, "rb") as file:
            for place in sorted({*range(0, size, max(1, size // 64)), max(0, size - 4096)}):
                file.seek(place)
                digest.update(file.read(4096))
    return f"sha256 {digest.hexdigest()[:16]}"


def options_help() -> Mapping[str, str]:
    """Options of `hf:` and `run:` policies, with their meaning."""
    return OPTIONS
