"""From counters at both ends of a window to the figures of a cell. Pure.

Invariant: a figure of a window is the difference of two counters that only grow; nothing of the warm-up is
in it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiderl.engine.base import EngineStats

_COUNTERS = (
    "preemptions",
    "prefill_tokens",
    "decode_tokens",
    "later_prompt_tokens",
    "later_cached_tokens",
    "reprefilled_tokens",
)


@dataclass
class Count:
    """What has been finished and trained so far. Only grows."""

    groups: int = 0
    episodes: int = 0
    invalid: int = 0
    generated: int = 0
    """Sampled tokens of valid episodes of finished groups."""
    turns: int = 0
    trained: int = 0
    trained_fresh: int = 0
    """Of `trained`, those within the staleness bound."""
    trained_episodes: int = 0
    updates: int = 0
    staleness: dict[int, int] = field(default_factory=dict)
    """Trained episodes by staleness."""
    trainer_s: dict[str, float] = field(default_factory=dict)
    """Seconds the trainer spent waiting, training, publishing."""
    publishes: int = 0


@dataclass(frozen=True)
class Edge:
    """Everything that is counted, at one moment."""

    at: float
    count: Count
    meter: Mapping[str, Any]
    engines: Mapping[str, int]
    """The engines' own counters, summed."""
    cpu_s: Mapping[str, float]
    """CPU seconds of the engines' processes and of this one."""

    @classmethod
    def of(
        cls,
        at: float,
        count: Count,
        meter: Mapping[str, Any],
        stats: Iterable[EngineStats],
        cpu_s: Mapping[str, float],
    ) -> Edge:
        """A copy of the counters as they are now."""
        sums = dict.fromkeys(_COUNTERS, 0)
        for one in stats:
            for name in _COUNTERS:
                sums[name] += getattr(one, name)
        return cls(at, copy.deepcopy(count), copy.deepcopy(dict(meter)), sums, dict(cpu_s))


def figures(first: Edge, last: Edge, *, engines: int, colocated: bool) -> dict[str, Any]:
    """The figures between two edges; rates are per second of wall clock.

    Args:
        engines: how many there are.
        colocated: rollout and trainer take turns on the same hardware.
    """
    seconds = last.at - first.at
    count = _difference(asdict(last.count), asdict(first.count))
    engine = _difference(last.engines, first.engines)
    meter = _difference(last.meter, first.meter)
    tokens, trainer_s = count["generated"], count["trainer_s"]
    waiting = _waiting(meter["waiting_s"], trainer_s, engines, colocated)
    total = sum(waiting.values())
    trainer_wait = 0.0 if colocated else trainer_s.get("waiting", 0.0)
    ages = {int(age): n for age, n in count["staleness"].items() if n}
    trained = sum(ages.values())
    later = engine["later_prompt_tokens"]
    return {
        "seconds": seconds,
        "updates": count["updates"],
        "publishes": count["publishes"],
        "groups": count["groups"],
        "episodes": count["episodes"],
        "invalid_episodes": count["invalid"],
        "turns": count["turns"],
        "loss_tokens": tokens,
        "loss_tokens_per_s": tokens / seconds,
        "sampled_tokens_per_s": meter["sampled_tokens"] / seconds,
        "goodput_tokens_per_s": count["trained_fresh"] / seconds,
        "kv_hit_rate": engine["later_cached_tokens"] / later if later else 1.0,
        "kv_reuse": _reuse(engine),
        "engine_tokens": engine,
        "cpu_s": _difference(last.cpu_s, first.cpu_s),
        "reprefilled_by_cause": meter["reprefilled_by_cause"],
        "waiting_s": waiting,
        "waiting_share": total / (seconds * engines),
        "waiting_s_per_1000_tokens": 1000 * total / tokens if tokens else None,
        "trainer_s": trainer_s,
        "trainer_waiting_share": trainer_wait / seconds,
        "task_s": meter["task_s"],
        "held_idle_token_s": meter["held_idle_token_s"],
        "in_flight": _in_flight(meter, seconds),
        "staleness": {
            "mean": sum(age * n for age, n in ages.items()) / trained if trained else None,
            "max": max(ages, default=None),
            "episodes": {str(age): n for age, n in sorted(ages.items())},
        },
        "length": {
            "generated": tokens / count["episodes"] if count["episodes"] else None,
            "trained": count["trained"] / count["trained_episodes"] if count["trained_episodes"] else None,
        },
    }


def _reuse(engine: Mapping[str, int]) -> float:
    """Of the prompt tokens of turns >= 2 that had been computed before, the share served from KV."""
    known = engine["later_cached_tokens"] + engine["reprefilled_tokens"]
    return engine["later_cached_tokens"] / known if known else 1.0


def _waiting(
    idle: Mapping[str, float], trainer_s: Mapping[str, float], engines: int, colocated: bool
) -> dict[str, float]:
    """Rank-seconds in which an engine had nothing to do, by cause.

    A colocated trainer works on the engines' hardware: while it does, they do not wait.
    """
    waiting = dict(idle)
    if colocated:
        left = max(0.0, waiting.get("barrier", 0.0) - trainer_s.get("training", 0.0) * engines)
        weights = min(left, trainer_s.get("publishing", 0.0) * engines)
        waiting |= {"barrier": left - weights, "weights": waiting.get("weights", 0.0) + weights}
    return waiting


def _in_flight(meter: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """Tasks in each state, on average."""
    return {name: spent / seconds for name, spent in meter["task_s"].items()}


def _difference(now: Any, before: Any) -> Any:
    if isinstance(now, Mapping):
        earlier = before if isinstance(before, Mapping) else {}
        return {key: _difference(value, earlier.get(key)) for key, value in now.items()}
    if isinstance(now, bool) or not isinstance(now, (int, float)):
        return now
    return now - before if isinstance(before, (int, float)) else now
