"""The schema of a workload: what a rollout benchmark runs, on what, and how it is measured.

Invariant: a workload says everything that a run depends on but the policy and the round; an unknown key is
an error that names the nearest right one.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tiderl.config.schema import Section

Span = tuple[int, int]
"""Least and most."""


class Constant(Section):
    """Always the same."""

    kind: Literal["constant"]
    seconds: float = Field(ge=0)


class Uniform(Section):
    """Equally likely between two bounds."""

    kind: Literal["uniform"]
    low: float = Field(ge=0)
    high: float = Field(ge=0)


class LogNormal(Section):
    """Half of the draws are below `median`; `sigma` 1 and more has a long tail."""

    kind: Literal["lognormal"]
    median: float = Field(ge=0)
    sigma: float = Field(ge=0)
    longest: float = Field(60.0, gt=0, description="cut, in seconds")


class Pareto(Section):
    """A power law: never below `least`; the lower `alpha`, the heavier the tail."""

    kind: Literal["pareto"]
    least: float = Field(ge=0)
    alpha: float = Field(gt=0)
    longest: float = Field(60.0, gt=0, description="cut, in seconds")


Simple = Annotated[Constant | Uniform | LogNormal | Pareto, Field(discriminator="kind")]


class Mixture(Section):
    """Mostly one distribution, with `share` of the draws from another."""

    kind: Literal["mixture"]
    share: float = Field(ge=0, le=1, description="of draws from `long`")
    short: Simple
    long: Simple
    longest: float = Field(60.0, gt=0, description="cut, in seconds")


Latency = Annotated[Constant | Uniform | LogNormal | Pareto | Mixture, Field(discriminator="kind")]


class ModelSpec(Section):
    """A Llama with random weights, or an Idefics3 where there are pictures; or a model of your own."""

    path: str | None = Field(None, description="a model folder or hub name in place of a made one")
    hidden: int = Field(512, ge=64, description="width")
    layers: int = Field(8, ge=1)
    heads: int = Field(8, ge=1)
    kv_heads: int = Field(4, ge=1)
    dtype: Literal["float32", "bfloat16"] = "float32"
    image_size: int = Field(0, ge=0, le=364, description="pixels of a picture's side; 0: a text model")
    patch: int = Field(14, ge=2)
    scale: int = Field(2, ge=1, description="each scale x scale patches are one token")
    vision_hidden: int = Field(192, ge=64)
    vision_layers: int = Field(4, ge=1)

    @model_validator(mode="after")
    def _divisible(self) -> ModelSpec:
        if self.hidden % self.heads or self.heads % self.kv_heads or (self.hidden // self.heads) % 32:
            raise ValueError(
                f"model.hidden {self.hidden}, heads {self.heads} and kv_heads {self.kv_heads} do not divide: "
                "heads must be a multiple of kv_heads, and hidden / heads one of 32"
            )
        if self.image_size % (self.patch * self.scale):
            raise ValueError(
                f"model.image_size {self.image_size} is no multiple of patch x scale "
                f"= {self.patch * self.scale}"
            )
        if self.path is not None and self.image_size:
            raise ValueError("model.path with model.image_size: pictures need the made model")
        return self


class EpisodesSpec(Section):
    """What episodes are like: arguments of `tide/Waiting-v0`. A word is a token of the made model."""

    turns: Span = (6, 14)
    system_words: int = Field(64, ge=0, description="shared by all tasks")
    prompt_words: Span = Field((160, 320), description="of the task, shared by a group")
    observation_words: Span = (16, 48)
    growth: int = Field(0, ge=0, description="words an observation has more than the one before it")
    reply_tokens: Span = Field((8, 32), description="sampled in a turn; a model of your own: always the most")
    latency: Latency = Constant(kind="constant", seconds=0.5)
    image_every: int = Field(1, ge=1, description="a picture in every so many observations")
    variants: int = Field(
        64, ge=1, description="ways a task can go; 1: a group's members all go the same way"
    )
    trace: str | None = Field(None, description="a recorded file to play; replaces all above but pictures")
    tasks: int = Field(4096, ge=1, le=4096)


class LoadSpec(Section):
    """How many tasks want to run, and how many fit."""

    group_size: int = Field(4, ge=1)
    groups_per_update: int = Field(4, ge=1)
    max_staleness: int = Field(2, ge=0)
    concurrency: int = Field(48, ge=1, description="tasks that want to be in flight, on all engines together")
    oversubscription: float = Field(
        1.0, gt=0, description="KV that they want (context in mid-life) / KV that there is"
    )


class EngineSpec(Section):
    """The engines."""

    count: int = Field(1, ge=1, le=16)
    threads: int = Field(1, ge=1)
    block_size: int = Field(32, ge=1)
    max_batched_tokens: int = Field(2048, ge=64)


class TrainerSpec(Section):
    """The simulated trainer: it takes groups, sleeps, and publishes real weights."""

    update_s: float = Field(2.0, ge=0, description="seconds an update takes once its groups are there")
    publish_every_s: float = Field(0.0, ge=0, description="least seconds between two publishes")


class MeasureSpec(Section):
    """When the clock runs."""

    warmup_s: float = Field(10.0, ge=0)
    seconds: float = Field(30.0, gt=0)
    updates: int = Field(
        2, ge=1, description="least updates of a window where rollout and trainer take turns"
    )
    timeout_s: float = Field(600.0, gt=0, description="a policy that takes longer is an error")
    reference_tokens_per_s: float | None = Field(
        None,
        gt=0,
        description="sampled tokens/s of eight episodes without waits on the machine that the seconds are "
        "written for: on another one all seconds (latency, trainer, window) are stretched; null: never",
    )


class Workload(Section):
    """One workload."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._=-]*$")
    about: str = ""
    seed: int = Field(0, ge=0)
    model: ModelSpec = ModelSpec()
    episodes: EpisodesSpec = EpisodesSpec()
    load: LoadSpec = LoadSpec()
    engine: EngineSpec = EngineSpec()
    trainer: TrainerSpec = TrainerSpec()
    measure: MeasureSpec = MeasureSpec()
    policies: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="options of policies, by name"
    )

    @model_validator(mode="after")
    def _spans(self) -> Workload:
        episodes = self.episodes
        for name, least in (("turns", 1), ("prompt_words", 4), ("observation_words", 4), ("reply_tokens", 1)):
            low, high = getattr(episodes, name)
            if not least <= low <= high:
                raise ValueError(f"episodes.{name} is [{low}, {high}], not least and most, from {least} on")
        if episodes.reply_tokens[1] > 256:
            raise ValueError(f"episodes.reply_tokens goes up to {episodes.reply_tokens[1]}, above 256")
        if self.load.concurrency < self.load.group_size:
            raise ValueError(
                f"load.concurrency {self.load.concurrency} is below load.group_size {self.load.group_size}"
            )
        return self

    @property
    def fingerprint(self) -> str:
        """Changes when a measurement of before says nothing about this workload."""
        data = self.model_dump(mode="json", exclude={"about", "policies"})
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]

    def environment(self) -> dict[str, Any]:
        """Arguments of `tide/Waiting-v0`, as another process takes them."""
        episodes = self.episodes
        return {
            "turns": list(episodes.turns),
            "system_words": episodes.system_words,
            "prompt_words": list(episodes.prompt_words),
            "observation_words": list(episodes.observation_words),
            "growth": episodes.growth,
            "reply_words": list(episodes.reply_tokens),
            "latency": episodes.latency.model_dump(),
            "image_size": self.model.image_size,
            "image_every": episodes.image_every,
            "variants": episodes.variants,
            "trace": episodes.trace,
        }


class Grid(Section):
    """Workloads that differ from a base along axes."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    about: str = ""
    base: dict[str, Any]
    axes: dict[str, dict[str, dict[str, Any]]] = Field(
        description="axis -> value's name -> what it sets, by dotted key"
    )
