"""What a training replica is told: model, optimizer and loss.

Invariant: a constructed settings object is valid. Every wrong value raises `ConfigError` naming the
field, the value and the values that are allowed; nothing is checked later in the middle of a run.
No torch is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from tiderl.errors import ConfigError

Dtype = Literal["float32", "bfloat16"]
AdvantageKind = Literal["grpo", "dr_grpo", "rloo"]
PolicyLoss = Literal["ppo", "gspo", "cispo"]
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]
KlKind = Literal["k1", "k2", "k3"]
Correction = Literal["tis_token", "tis_sequence"]
OldLogprobs = Literal["rollout", "recomputed"]
ZeroVariance = Literal["drop", "keep"]
SharePrefix = Literal["auto", "off"]


def _choice(where: str, name: str, value: Any, kind: Any) -> None:
    if value not in get_args(kind):
        raise ConfigError(
            f"{name} is {value!r}", where=where, fix=f"use one of {', '.join(map(repr, get_args(kind)))}"
        )


def _require(ok: bool, where: str, name: str, value: Any, must: str) -> None:
    if not ok:
        raise ConfigError(f"{name} is {value!r}", where=where, fix=f"it must be {must}")


@dataclass(frozen=True)
class LoraSettings:
    """A low-rank adapter: W + (alpha / rank) B A, fp32 A and B, no dropout (it would break exactness)."""

    rank: int = 16
    alpha: float = 32.0
    targets: str | tuple[str, ...] = "all-linear"
    """"all-linear" (every linear layer but the output head) or names of linear layers."""

    def __post_init__(self) -> None:
        _require(self.rank >= 1, "lora", "rank", self.rank, ">= 1")
        _require(self.alpha > 0, "lora", "alpha", self.alpha, "> 0")
        _require(bool(self.targets), "lora", "targets", self.targets, "'all-linear' or layer names")


@dataclass(frozen=True)
class ModelSettings:
    """The trained model: a checkpoint folder and how it is computed."""

    path: str | Path
    dtype: Dtype = "float32"
    lora: LoraSettings | None = field(default_factory=LoraSettings)
    """None trains all weights."""
    backward_dtype: Dtype | None = None
    """Precision of the large products of the backward pass; None means `dtype`. With dtype float32 and an
    adapter, "bfloat16" leaves every log-prob exact, rounds the gradient's direction by about 0.3 %, and makes
    the backward pass about 4 times cheaper on processors with bfloat16 instructions."""
    threads: int = 0
    """CPU threads of torch in this process; 0 leaves torch's own choice."""
    device: str = "cpu"
    share_prefix: SharePrefix = "auto"
    """"auto" computes equal prefixes once where that is exact for the model, "off" never."""
    max_tokens_per_microbatch: int = 2048
    """Distinct tokens (after sharing) in one forward and backward pass; bounds the activations."""

    def __post_init__(self) -> None:
        _choice("model", "dtype", self.dtype, Dtype)
        if self.backward_dtype is not None:
            _choice("model", "backward_dtype", self.backward_dtype, Dtype)
            if self.backward_dtype != self.dtype and (self.lora is None or self.dtype != "float32"):
                raise ConfigError(
                    f"backward_dtype is {self.backward_dtype!r} with dtype {self.dtype!r}"
                    f" and {'an' if self.lora else 'no'} adapter",
                    where="model",
                    fix="set it to null, or train a LoRA adapter over float32",
                )
        _choice("model", "share_prefix", self.share_prefix, SharePrefix)
        _require(self.threads >= 0, "model", "threads", self.threads, ">= 0")
        _require(
            self.max_tokens_per_microbatch >= 1,
            "model",
            "max_tokens_per_microbatch",
            self.max_tokens_per_microbatch,
            ">= 1",
        )


@dataclass(frozen=True)
class OptimSettings:
    """AdamW with linear warm-up: update u (from 1) uses learning_rate x min(1, u / warmup)."""

    learning_rate: float = 3e-4
    warmup: int = 3
    """Updates until the full learning rate; 0 and 1 mean none."""
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    """Global L2 norm to which the gradient is clipped; 0 turns clipping off."""

    def __post_init__(self) -> None:
        _require(self.learning_rate >= 0, "optim", "learning_rate", self.learning_rate, ">= 0")
        _require(self.warmup >= 0, "optim", "warmup", self.warmup, ">= 0")
        _require(self.weight_decay >= 0, "optim", "weight_decay", self.weight_decay, ">= 0")
        _require(
            len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas),
            "optim",
            "betas",
            self.betas,
            "two numbers in [0, 1)",
        )
        _require(self.eps > 0, "optim", "eps", self.eps, "> 0")
        _require(self.max_grad_norm >= 0, "optim", "max_grad_norm", self.max_grad_norm, ">= 0")


@dataclass(frozen=True)
class LossSettings:
    """The objective: advantage, policy loss, aggregation, KL and off-policy correction."""

    policy: PolicyLoss = "ppo"
    advantage: AdvantageKind = "grpo"
    std: bool = True
    """GRPO only: divide by the group's standard deviation."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    """For negative advantages the loss is at most -A x dual_clip; None turns it off (3.0 is usual)."""
    aggregation: Aggregation = "token_mean"
    token_norm: float = 1.0
    """Dr. GRPO's constant divisor for seq_mean_token_sum (for example the token limit of an episode)."""
    kl_coef: float = 0.0
    kl_kind: KlKind = "k3"
    old: OldLogprobs = "rollout"
    """The denominator of the ratio: the sampler's log-probs, or the trainer's own before the step.

    "rollout": ratio = pi / mu, which is the off-policy correction itself, so `correction` must be None.
    "recomputed": ratio = pi / pi_old, and `correction` weighs by kappa = pi_old / mu.
    """
    correction: Correction | None = None
    cap: float = 2.0
    """Truncation of kappa."""
    zero_variance: ZeroVariance = "drop"
    """Groups whose valid rewards are all equal: "drop" takes them out of loss and denominator;
    "keep" leaves them in both, so they carry the KL gradient and dilute the mean."""

    def __post_init__(self) -> None:
        _choice("loss", "policy", self.policy, PolicyLoss)
        _choice("loss", "advantage", self.advantage, AdvantageKind)
        _choice("loss", "aggregation", self.aggregation, Aggregation)
        _choice("loss", "kl_kind", self.kl_kind, KlKind)
        _choice("loss", "old", self.old, OldLogprobs)
        _choice("loss", "zero_variance", self.zero_variance, ZeroVariance)
        if self.correction is not None:
            _choice("loss", "correction", self.correction, Correction)
            if self.old == "rollout":
                raise ConfigError(
                    f"correction is {self.correction!r} while old is 'rollout', whose ratio already divides"
                    " by the sampler's probability",
                    where="loss",
                    fix="set correction to null, or old to 'recomputed'",
                )
        _require(0 <= self.clip_low < 1, "loss", "clip_low", self.clip_low, "in [0, 1)")
        _require(self.clip_high >= 0, "loss", "clip_high", self.clip_high, ">= 0")
        _require(
            self.dual_clip is None or self.dual_clip > 1, "loss", "dual_clip", self.dual_clip, "null or > 1"
        )
        _require(self.token_norm > 0, "loss", "token_norm", self.token_norm, "> 0")
        _require(self.kl_coef >= 0, "loss", "kl_coef", self.kl_coef, ">= 0")
        _require(self.cap > 0, "loss", "cap", self.cap, "> 0")
