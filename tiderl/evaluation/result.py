"""What an evaluation found: one record an episode, and the summary over them.

Invariants: an episode that infrastructure ended is never a zero: it is counted as invalid and is in no
mean and no interval; the summary is a pure function of the records, so a resumed evaluation reports what
an uninterrupted one would.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ..env.ends import EndReason
from .statistics import bootstrap_mean, mean, percentile, wilson


@dataclass(frozen=True)
class EpisodeResult:
    """One line of the journal.

    `index` is the place in the plan; a later record of the same index replaces an earlier one. `turns`
    counts replies the environment answered; `latencies` are seconds, one per reply of the policy.
    `raised`: the environment's own code ended it. `process` and `at` say when it was written: in the n-th
    process that worked on this folder, and how many seconds after that process began.
    """

    index: int
    task: Any
    seed: int
    end: EndReason
    success: bool
    reward: float
    rewards: tuple[float, ...] = ()
    turns: int = 0
    model_calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    invalid_actions: int = 0
    forks: int = 0
    seconds: float = 0.0
    latencies: tuple[float, ...] = ()
    error: str | None = None
    raised: bool = False
    process: int = 1
    at: float = 0.0

    @property
    def valid(self) -> bool:
        """True when the episode may be counted: no infrastructure failure, at least one reply."""
        return self.end.valid and self.model_calls > 0

    @property
    def truncated(self) -> bool:
        """One flag an episode: it ended by a limit and not by the task's own rules."""
        return not self.end.terminal

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `truncated` and `valid` are in it for readers and are ignored on the way back."""
        data = asdict(self)
        data["end"] = self.end.value
        data["truncated"], data["valid"] = self.truncated, self.valid
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EpisodeResult:
        """Raises KeyError, TypeError or ValueError when `data` is not such an object."""
        known = {f.name for f in fields(cls)}
        values = {k: v for k, v in data.items() if k in known}
        values["end"] = EndReason(data["end"])
        for name in ("rewards", "latencies"):
            values[name] = tuple(float(x) for x in values.get(name, ()))
        return cls(**values)


@dataclass(frozen=True)
class EvaluationResult:
    """The figures of an evaluation. Means and intervals are over valid episodes only.

    `ci95` is Wilson's interval of `success`; `reward_ci95` a bootstrap over tasks (over
    episodes where there is one task only). Figures are None when
    no episode was valid. `seconds` holds `wall` (over all processes that worked on it, work that was lost
    left out), `latency_p50`, `latency_p95` (one reply of the policy), `episode_p50`, `episode_p95`.
    """

    env_id: str
    policy: str
    split: str
    seed: int
    requested: int
    valid: int
    invalid: int
    successes: int
    success: float | None
    ci95: tuple[float, float]
    reward_mean: float | None
    reward_ci95: tuple[float, float] | None
    ends: dict[str, int]
    truncated: int
    turns: float | None
    tokens: dict[str, int]
    model_calls: int
    invalid_actions: int
    forks: int
    seconds: dict[str, float | None]
    errors: dict[str, int]
    tasks: int
    configuration: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    out: str | None = None
    episodes: tuple[EpisodeResult, ...] = ()

    @property
    def complete(self) -> bool:
        """True when every requested episode has a valid record."""
        return self.valid == self.requested

    @property
    def raised(self) -> int:
        """How many of the invalid episodes the environment's own code ended."""
        return sum(r.raised for r in self.episodes if not r.valid)

    @property
    def hopeless(self) -> bool:
        """True when the environment's own code ended every episode: there is nothing to repeat."""
        return self.raised > 0 and self.raised == len(self.episodes)

    def to_json(self) -> dict[str, Any]:
        """The content of summary.json, without the episodes."""
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "episodes"}
        data["complete"] = self.complete
        data["wall_s"] = self.seconds["wall"]
        data["excluded"] = (
            f"{self.invalid} of {self.valid + self.invalid} episodes: ended by infrastructure, in no mean"
            if self.invalid
            else "none"
        )
        return data

    def line(self) -> str:
        """The one line a person reads at the end."""
        if self.success is None:
            text = f"success n/a (0 valid of {self.requested})"
        else:
            low, high = self.ci95
            text = f"success {self.success:.3f} [{low:.3f}, {high:.3f}] ({self.successes}/{self.valid})"
            text += f" · reward {self.reward_mean:.3f}"
        if self.turns is not None:
            text += f" · {self.turns:.1f} turns"
        tokens = self.tokens["completion"]
        if tokens and self.valid:
            text += f" · {tokens / self.valid:.0f} tokens an episode"
        if self.truncated:
            text += f" · {self.truncated} cut off"
        if self.invalid:
            text += f" · {self.invalid} invalid, not counted"
        wall = self.seconds["wall"] or 0.0
        return text + f" · {wall:.1f} s"


def summarize(
    records: Iterable[EpisodeResult],
    *,
    env_id: str,
    policy: str,
    split: str,
    seed: int,
    requested: int,
    configuration: Mapping[str, Any] | None = None,
    versions: Mapping[str, str] | None = None,
    out: str | None = None,
) -> EvaluationResult:
    """Add up the records (one an index). Pure."""
    episodes = tuple(sorted(records, key=lambda r: r.index))
    valid = [r for r in episodes if r.valid]
    invalid = [r for r in episodes if not r.valid]
    successes = sum(r.success for r in valid)
    tasks = {_key(r.task, r.index) for r in valid}
    # A single task, or an environment without a task list: then an episode is what is drawn.
    reward_ci = bootstrap_mean(
        ((_key(r.task, r.index) if len(tasks) > 1 else r.index, r.reward) for r in valid), seed=seed
    )
    latencies = [x for r in valid for x in r.latencies]
    lengths = [r.seconds for r in valid]
    wall: dict[int, float] = {}
    for r in episodes:
        wall[r.process] = max(wall.get(r.process, 0.0), r.at)
    return EvaluationResult(
        env_id=env_id,
        policy=policy,
        split=split,
        seed=seed,
        requested=requested,
        valid=len(valid),
        invalid=len(invalid),
        successes=successes,
        success=successes / len(valid) if valid else None,
        ci95=wilson(successes, len(valid)),
        reward_mean=mean([r.reward for r in valid]),
        reward_ci95=None if math.isnan(reward_ci[0]) else reward_ci,
        ends=dict(sorted(Counter(r.end.value for r in episodes).items())),
        truncated=sum(r.truncated for r in valid),
        turns=mean([float(r.turns) for r in valid]),
        tokens={
            "prompt": sum(r.prompt_tokens for r in valid),
            "completion": sum(r.completion_tokens for r in valid),
        },
        model_calls=sum(r.model_calls for r in valid),
        invalid_actions=sum(r.invalid_actions for r in valid),
        forks=sum(r.forks for r in valid),
        seconds={
            "wall": round(math.fsum(wall.values()), 3),
            "latency_p50": percentile(latencies, 50),
            "latency_p95": percentile(latencies, 95),
            "episode_p50": percentile(lengths, 50),
            "episode_p95": percentile(lengths, 95),
        },
        errors=_errors(invalid),
        tasks=len(tasks),
        configuration=dict(configuration or {}),
        versions=dict(versions or {}),
        out=out,
        episodes=episodes,
    )


def _key(task: Any, index: int) -> Any:
    # Without a task list every seed is a task of its own.
    return f"seed of episode {index}" if task is None else f"{type(task).__name__}:{task}"


def _errors(invalid: Sequence[EpisodeResult], most: int = 10) -> dict[str, int]:
    counts = Counter((r.error or r.end.value)[:300] for r in invalid)
    return dict(counts.most_common(most))
