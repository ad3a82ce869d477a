"""How large a workload's episodes are, and so how large its KV pool must be.

Invariant: figures only follow from the workload and the tokenizer, so every policy and every round of a
workload gets the same engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from tiderl.errors import ConfigError

if TYPE_CHECKING:
    from tiderl.agent.chat import ChatAgent
    from tiderl.bench.rollout.workload import Workload

ENVIRONMENT = "tide/Waiting-v0"
_SAMPLE = 256
"""Episodes looked at for means."""


@dataclass(frozen=True)
class Overhead:
    """Tokens that system message and chat template add."""

    first: int
    """To the first observation's words."""
    later: int
    per_word: float
    """Tokens of a word: 1 with the made models."""


@dataclass(frozen=True)
class Sizes:
    """Means over episodes, in tokens and seconds; a picture counts with all its tokens."""

    turns: float
    first: float
    """The first prompt."""
    observation: float
    """A later observation, with its template tokens."""
    reply: float
    middle: float
    """The context in mid-life, in whole KV blocks: what a task is counted with in `oversubscription`."""
    end: float
    """The whole episode."""
    longest: int
    """No episode is longer."""
    wait: float
    """Seconds the environment takes in one episode, all turns together."""
    kv_tokens: int
    """KV of one engine."""

    def lines(self) -> dict[str, float]:
        """The means, rounded, for the report."""
        return {
            name: round(getattr(self, name), 2)
            for name in ("turns", "first", "observation", "reply", "middle", "end", "longest", "wait")
        } | {"kv_tokens": self.kv_tokens}


def measure_overhead(env: Any, agent: ChatAgent) -> Overhead:
    """Play two turns of an episode (which must not sleep) with `agent` and count."""
    messages, _ = env.reset(seed=0, options={"task": 0, "split": "train"})
    chat = agent.episode()
    tokenizer: Any = agent.bridge.tokenizer
    words = " ".join(env.fillers[:128])
    per_word = len(tokenizer.encode(words, add_special_tokens=False)) / 128
    first = len(chat.start(messages)) - round(per_word * env.plan[0].words)
    reply = tokenizer.encode(" ".join(env.fillers[: env.plan[0].reply]), add_special_tokens=False)
    answer, *_ = env.step(chat.act(reply, "length"))
    if env.end is not None:  # episodes of one turn have no later observation
        return Overhead(first, 0, per_word)
    later = len(chat.observe(answer).ids) - round(per_word * env.plan[1].words)
    return Overhead(max(0, first), max(0, later), per_word)


def measure_sizes(workload: Workload, env: Any, overhead: Overhead, image_tokens: int) -> Sizes:
    """Means over the workload's episodes, and the KV pool that follows.

    Raises:
        ConfigError: the pool would not hold a single episode.
    """
    load, engine = workload.load, workload.engine
    longest_reply = workload.episodes.reply_tokens[1]
    plans = list(_plans(env, workload.seed))
    picture = max(0, image_tokens - 1)  # its placeholder is counted among the overhead's tokens already
    contexts = []
    for plan in plans:
        steps, context = [], 0
        for number, turn in enumerate(plan):
            extra = overhead.first if number == 0 else overhead.later
            context += round(turn.words * overhead.per_word) + extra
            context += picture if turn.image and image_tokens else 0
            context += turn.reply if workload.model.path is None else longest_reply
            steps.append(context)
        contexts.append(steps)
    block = engine.block_size
    middle = fmean(-(-steps[(len(steps) - 1) // 2] // block) * block for steps in contexts)
    longest = _longest(workload, overhead, image_tokens, contexts)
    wanted = load.concurrency * middle / load.oversubscription / engine.count
    kv_tokens = int(-(-wanted // block)) * block
    if kv_tokens < longest + block:
        raise ConfigError(
            f"the KV pool of an engine would have {kv_tokens} tokens, and one episode can have {longest}",
            where=f"workload {workload.name}",
            fix="raise load.concurrency, or lower load.oversubscription or engine.count",
        )
    flat = [turn for plan in plans for turn in plan]
    later = [turn for plan in plans for turn in plan[1:]]
    return Sizes(
        turns=fmean(len(plan) for plan in plans),
        first=fmean(round(p[0].words * overhead.per_word) + overhead.first for p in plans)
        + (picture if image_tokens else 0),
        observation=fmean(
            round(t.words * overhead.per_word) + overhead.later + (picture if t.image else 0) for t in later
        )
        if later
        else 0.0,
        reply=fmean(turn.reply for turn in flat) if workload.model.path is None else float(longest_reply),
        middle=middle,
        end=fmean(steps[-1] for steps in contexts),
        longest=longest,
        wait=fmean(sum(turn.seconds for turn in plan) for plan in plans),
        kv_tokens=kv_tokens,
    )


def _plans(env: Any, seed: int) -> Iterable[tuple[Any, ...]]:
    """Plans of many episodes: other tasks, other seeds, other ways to go on."""
    ids = env.task_lists.ids("train")
    for number in range(_SAMPLE):
        env.reset(seed=seed + number, options={"task": ids[number % len(ids)], "split": "train"})
        yield env.way(number)


def _longest(workload: Workload, overhead: Overhead, image_tokens: int, contexts: list[list[int]]) -> int:
    episodes = workload.episodes
    if episodes.trace is not None:
        return max(steps[-1] for steps in contexts) + 64
    turns = episodes.turns[1]
    words = episodes.prompt_words[1] + (turns - 1) * episodes.observation_words[1]
    words += episodes.growth * turns * (turns - 1) // 2
    tokens = int(words * overhead.per_word * (1.0 if workload.model.path is None else 1.2)) + 1
    tokens += overhead.first + (turns - 1) * overhead.later + turns * episodes.reply_tokens[1]
    return tokens + image_tokens * -(-turns // episodes.image_every) + 16
