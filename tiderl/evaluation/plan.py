"""What an evaluation runs: its settings and its list of episodes.

Invariants: the list is a pure function of (task ids, split, seed), so two evaluations with equal ones
meet the same tasks with the same seeds; the list of n episodes is a prefix of the list of n + k.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError, EnvironmentFault


@dataclass(frozen=True)
class EvaluationPlan:
    """One evaluation.

    `concurrency`, `temperature`, `max_tokens` (of one reply) and `episode_timeout` (seconds): `None`
    leaves the choice to the policy or to the environment. `out=None` writes no files. `resume=False`
    drops what an earlier evaluation left in `out`.
    """

    env_id: str
    policy: str = "policy"
    episodes: int = 100
    split: str = "test"
    seed: int = 0
    concurrency: int | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    episode_timeout: float | None = None
    format: str | None = None
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    policy_kwargs: Mapping[str, Any] = field(default_factory=dict)
    workers: int = 2
    """Environment worker processes, when the evaluation starts its own hub."""
    out: Path | None = None
    resume: bool = True

    def __post_init__(self) -> None:
        def need(ok: bool, what: str, fix: str) -> None:
            if not ok:
                raise ConfigError(what, fix=fix)

        need(self.episodes > 0, f"episodes is {self.episodes}", "give a number of at least 1")
        need(self.seed >= 0, f"seed is {self.seed}", "give a number of at least 0")
        need(self.workers > 0, f"workers is {self.workers}", "give a number of at least 1")
        for name in ("concurrency", "max_tokens", "episode_timeout"):
            value = getattr(self, name)
            need(value is None or value > 0, f"{name} is {value}", "give a number above 0, or leave it out")
        temperature = self.temperature
        need(
            temperature is None or 0 <= temperature <= 5,
            f"temperature is {temperature}",
            "give a number from 0 (greedy) to 5",
        )


@dataclass(frozen=True)
class PlannedEpisode:
    """Episode `index` of an evaluation: a task (None: drawn by the seed) and the seed of its reset."""

    index: int
    task: Any
    seed: int
    split: str


def _digest(*parts: Any) -> bytes:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def plan_episodes(task_ids: Sequence[Any], *, split: str, seed: int, episodes: int) -> list[PlannedEpisode]:
    """The first `episodes` of the endless list that (task ids, split, seed) define.

    Tasks come in an order drawn by the seed, so a short evaluation is a fair sample of the split; when
    they run out they come again with other seeds. Task ids are JSON scalars. An environment without a
    list of tasks (`task_ids` empty) gets `task=None` and a new seed each time.

    Raises:
        EnvironmentFault: two tasks have the same id.
    """
    unique = {json.dumps(t): t for t in task_ids}
    if len(unique) != len(task_ids):
        twice = next(t for i, t in enumerate(task_ids) if t in task_ids[:i])
        raise EnvironmentFault(
            f"two tasks of split {split!r} have the id {twice!r}", fix="give every task an id of its own"
        )
    order = sorted(unique, key=lambda key: (_digest("order", seed, split, key), key))
    planned = []
    for index in range(episodes):
        round_, place = divmod(index, len(order)) if order else (index, 0)
        key = order[place] if order else None
        episode_seed = int.from_bytes(_digest("seed", seed, split, key, round_)[:4], "big") >> 1
        planned.append(PlannedEpisode(index, unique[key] if key is not None else None, episode_seed, split))
    return planned


def task_set_digest(task_ids: Sequence[Any]) -> str:
    """A fingerprint of a split's task ids, whatever their order; changes when the split changes."""
    keys = sorted(json.dumps(t) for t in task_ids)
    return f"{len(keys)} tasks, sha256 {hashlib.sha256(chr(10).join(keys).encode()).hexdigest()[:16]}"


def default_out(env_id: str, policy: str, root: Path | str = "evals") -> Path:
    """`evals/<env>-<policy>`, with nothing in the name that a path or a secret could hide in."""
    scheme, _, rest = policy.partition(":")
    if scheme == "openai":
        rest = rest.rpartition("#")[2]
    elif scheme in ("hf", "run"):
        rest = "/".join(Path(rest).parts[-2:]) if scheme == "hf" else Path(rest).name
    words = [env_id, scheme] + ([rest] if rest else [])
    return Path(root) / "-".join(re.sub(r"[^A-Za-z0-9._]+", "-", w).strip("-.") for w in words)
