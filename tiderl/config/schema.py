"""The schema of a training run's YAML.

Invariant: every key a run can be given stands here with its type, default and meaning; an unknown key
is an error. All models are frozen once built.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no silent type conversion of strings."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, protected_namespaces=())


class LoraConfig(Section):
    """Low-rank adapters (peft) on every linear layer but the output head."""

    rank: int = Field(16, ge=1, description="rank of each adapter")
    alpha: float = Field(32.0, gt=0, description="scale is alpha / rank")


class ModelConfig(Section):
    """The policy model."""

    path: str = Field(description="a model folder, or a name on the model hub")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of engine and trainer alike")
    max_length: int = Field(1024, ge=16, description="longest context in tokens")
    lora: LoraConfig | None = Field(None, description="adapters to train; null trains all weights")


class EnvironmentConfig(Section):
    """What is trained on."""

    id: str = Field(description="an id of `tiderl env list`")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="passed to the environment's class")
    split: str = Field("train", description="tasks to train on")
    workers: int = Field(1, ge=1, le=256, description="processes that hold environments")


class AgentConfig(Section):
    """How messages become prompts and text becomes actions."""

    format: str = Field("hermes", description="action format: hermes, lines, text, or a plug-in's")
    instructions: bool = Field(True, description="describe the tools in the system message")
    system: str | None = Field(None, description="replaces the environment's system message")


class RolloutConfig(Section):
    """How episodes are sampled."""

    groups_per_update: int = Field(6, ge=1, description="tasks an update")
    group_size: int = Field(8, ge=1, description="episodes of one task")
    min_group_size: int = Field(2, ge=1, description="a group with fewer valid episodes is not trained on")
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    max_turn_tokens: int = Field(64, ge=1, description="longest reply of one turn")
    max_episode_tokens: int = Field(512, ge=16, description="longest episode, prompt included")
    policy: str = Field(
        "ctb",
        description="who runs when and whose KV is kept: ctb, sync, async, ... (docs/scheduling.md); "
        "sync where deterministic",
    )
    policy_options: dict[str, Any] = Field(default_factory=dict, description="options of that policy")
    update_mode: Literal["keep", "recompute", "wait"] = Field(
        "keep", description="what becomes of KV in flight when weights change"
    )
    concurrency: int | None = Field(None, ge=1, description="most episodes in flight; null: no limit")
    max_staleness: int = Field(
        1,
        ge=0,
        description="versions a trajectory may be behind; 0 is strictly on-policy; 0 where deterministic",
    )
    stale: Literal["drop", "mask", "wait"] = Field(
        "mask", description="what to do with what grew older than that all the same"
    )
    deterministic: bool = Field(
        False, description="submit turns in lockstep, so that the same seed gives the same bits"
    )
    retries: int = Field(1, ge=0, description="second tries of an episode that infrastructure failed")
    max_failures: int = Field(
        16, ge=1, description="consecutive infrastructure failures after which the run stops"
    )

    @model_validator(mode="before")
    @classmethod
    def _lockstep_defaults(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("deterministic") is True:
            return {"policy": "sync", "max_staleness": 0} | data
        return data


class EngineConfig(Section):
    """The inference engines (vLLM)."""

    ranks: int = Field(1, ge=1, le=64, description="engines; each has its own KV cache and threads")
    kv_tokens: int = Field(32768, ge=64, description="size of the KV cache in tokens")
    block_size: int = Field(32, ge=1)
    max_sessions: int = Field(64, ge=1, description="sessions that hold KV at one time")
    max_batched_tokens: int = Field(2048, ge=64, description="tokens of one engine step")
    threads: int | None = Field(None, ge=1, description="CPU threads of a rank; null: all cores shared out")
    respawn: int = Field(3, ge=0, description="how many dead engines are replaced before the run gives up")
    turn_timeout: float = Field(300.0, gt=0, description="seconds one turn may take")


class AdvantageConfig(Section):
    """Advantages of a group."""

    kind: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    std: bool = Field(True, description="divide by the group's standard deviation (grpo)")
    zero_variance: Literal["drop", "keep"] = Field("drop", description="groups whose rewards are all equal")


class LossConfig(Section):
    """The policy loss. Formulas: docs/train.md."""

    kind: Literal["ppo", "gspo", "cispo"] = "ppo"
    clip_low: float = Field(0.2, ge=0, lt=1)
    clip_high: float = Field(0.28, ge=0)
    dual_clip: float | None = Field(None, gt=1, description="c of dual clip, for negative advantages")
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"] = "token_mean"
    token_norm: float = Field(1.0, gt=0, description="constant divisor of seq_mean_token_sum (Dr. GRPO)")
    kl_coef: float = Field(0.0, ge=0, description="0 skips the reference pass")
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    old: Literal["rollout", "recomputed"] = Field(
        "rollout", description="log-probs in the ratio's denominator: the sampler's or a proximal pass'"
    )
    correction: Literal["tis_token", "tis_sequence"] | None = Field(
        None, description="truncated importance weights between sampler and trainer (old: recomputed)"
    )
    correction_cap: float = Field(2.0, gt=0)


class StopConfig(Section):
    """Ends training early once the policy is good enough."""

    success: float = Field(gt=0, le=1, description="mean success of the last `window` updates' episodes")
    window: int = Field(3, ge=1)
    min_updates: int = Field(1, ge=1)


class TrainingConfig(Section):
    """The optimizer and how long it runs."""

    updates: int = Field(40, ge=0, description="optimizer steps at most")
    learning_rate: float = Field(1e-5, ge=0)
    warmup: int = Field(0, ge=0, description="updates of linear warm-up")
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = Field(1.0, gt=0)
    microbatch_tokens: int = Field(4096, ge=64, description="tokens of one forward pass")
    threads: int | None = Field(None, ge=1, description="CPU threads; null: all cores")
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    stop: StopConfig | None = None
    max_wall_s: float | None = Field(None, gt=0, description="seconds after which no further update starts")


class EvaluationConfig(Section):
    """The evaluation before and after training, and the one `run:` repeats."""

    split: str = "test"
    episodes: int = Field(128, ge=0, description="0 skips the evaluation")
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    every: int = Field(0, ge=0, description="also after every so many updates; 0: only at the ends")


class CheckpointConfig(Section):
    """What is kept on disk."""

    every: int = Field(10, ge=0, description="updates between resumable checkpoints; 0: only at the end")
    keep: int = Field(2, ge=1, description="how many of them are kept")
    tokens: bool = Field(False, description="also store token ids and log-probs of each episode")


class RunConfig(Section):
    """One training run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    runs_dir: str = "runs"
    seed: int = Field(0, ge=0)
    model: ModelConfig
    environment: EnvironmentConfig
    agent: AgentConfig = AgentConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if self.rollout.max_episode_tokens > self.model.max_length:
            raise ValueError(
                f"rollout.max_episode_tokens is {self.rollout.max_episode_tokens}, above "
                f"model.max_length {self.model.max_length}"
            )
        if self.rollout.max_episode_tokens > self.engine.kv_tokens:
            raise ValueError(
                f"engine.kv_tokens is {self.engine.kv_tokens}, less than one episode of "
                f"rollout.max_episode_tokens {self.rollout.max_episode_tokens}"
            )
        if self.rollout.deterministic and (self.rollout.policy != "sync" or self.rollout.max_staleness):
            raise ValueError(
                f"rollout.deterministic needs rollout.policy=sync and rollout.max_staleness=0, here "
                f"{self.rollout.policy} and {self.rollout.max_staleness}: updates that overlap with rollouts "
                "depend on timing"
            )
        if self.rollout.group_size < 2:
            raise ValueError("rollout.group_size is 1, but group advantages need at least 2 episodes a task")
        if self.rollout.min_group_size > self.rollout.group_size:
            raise ValueError(
                f"rollout.min_group_size is {self.rollout.min_group_size}, above "
                f"rollout.group_size {self.rollout.group_size}"
            )
        if self.training.loss.correction and self.training.loss.old != "recomputed":
            raise ValueError(
                "training.loss.correction needs training.loss.old=recomputed: with old=rollout the ratio "
                "itself already corrects for the sampler"
            )
        return self
