"""`tide/Waiting-v0`: an environment that takes its time; for measuring schedulers and testing stragglers.

Invariant: how many turns there are, how much each says, how long a reply it asks for and how long it sleeps
follow from task and seed (and, with `variants`, from the first reply) alone; the sleeping is real.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import tiderl
from tiderl.env.tasks import LazyTasks
from tiderl.errors import EnvironmentFault

from . import latency as lat
from .draws import Draws

SIZES = {"train": 4096, "test": 512}
_SYLLABLES = [a + b for a in "bdfgklmn" for b in "aeio"]
FILLER = tuple(a + b for a in _SYLLABLES for b in _SYLLABLES)
"""What observations are padded with: 1024 words."""
LONGEST_REPLY = 256
_ASK = ("Reply", "with", "words:")
LEAST_WORDS = len(_ASK) + 1


@dataclass(frozen=True)
class Turn:
    """What one turn says, asks for and takes."""

    words: int
    """Of the observation before the reply."""
    reply: int
    """Words the reply must have."""
    seconds: float
    """Slept after the reply."""
    image: bool = False


@tiderl.register("tide/Waiting-v0")
class Waiting(tiderl.AgentEnv):
    """Each turn says how many words to reply with, then sleeps for a while drawn from a distribution.

    Reward 1 when every reply had exactly the number of words asked for, else 0. All words of an
    observation are in `vocabulary`.

    Args:
        turns: least and most turns of an episode.
        system_words: words of the system message, the same for all tasks.
        prompt_words: least and most words of the first observation.
        observation_words: least and most words of each later one.
        growth: words that each observation has more than the one before it.
        reply_words: least and most words a reply must have.
        latency: how long the environment sleeps after a reply, for instance `{"kind": "lognormal",
            "median": 0.5, "sigma": 1.0, "longest": 30}`; see `environments/latency.py` for the kinds.
        image_size: pixels of the side of the picture in an observation; 0: no pictures.
        image_every: a picture in every so many observations, from the first.
        variants: in how many ways a task can go on after its first observation; a hash of the first
            reply chooses. With 1, all members of a group go the same way.
        trace: a JSONL file of recorded tasks (`tiderl bench rollout --record`) to play instead of
            drawing; lines of one task are its variants.
        overhead: tokens that the model's chat template adds to an observation of a trace; taken off.
        pace: all sleeps are multiplied by it; 0 sleeps never.
        limits: see `AgentEnv`.
    """

    modality = "text"
    splits = tuple(SIZES)
    vocabulary: tuple[str, ...] = (*FILLER, *_ASK, *(str(n) for n in range(1, LONGEST_REPLY + 1)))
    """Every word that an observation can hold."""
    fillers = FILLER

    def __init__(
        self,
        turns: Sequence[int] = (2, 4),
        system_words: int = 0,
        prompt_words: Sequence[int] = (12, 20),
        observation_words: Sequence[int] = (6, 12),
        growth: int = 0,
        reply_words: Sequence[int] = (2, 6),
        latency: Mapping[str, Any] | None = None,
        image_size: int = 0,
        image_every: int = 1,
        variants: int = 1,
        trace: str | None = None,
        overhead: int = 0,
        pace: float = 1.0,
        **limits: Any,
    ) -> None:
        self.turns = _pair("turns", turns, 1)
        self.prompt_words = _pair("prompt_words", prompt_words, LEAST_WORDS)
        self.observation_words = _pair("observation_words", observation_words, LEAST_WORDS)
        self.reply_words = _pair("reply_words", reply_words, 1, LONGEST_REPLY)
        self.latency = dict(latency) if latency is not None else {"kind": "constant", "seconds": 0.002}
        lat.check(self.latency)
        whole = {"system_words": (system_words, 0), "growth": (growth, 0), "image_size": (image_size, 0)}
        whole |= {"image_every": (image_every, 1), "variants": (variants, 1), "overhead": (overhead, 0)}
        for name, (value, least) in whole.items():
            _check_whole(name, value, least)
        if isinstance(pace, bool) or not isinstance(pace, (int, float)) or not 0 <= pace < float("inf"):
            raise EnvironmentFault(f"pace is {pace!r}", fix="give a number, 0 or more")
        self.growth, self.image_size, self.image_every = growth, image_size, image_every
        self.variants, self.pace = variants, pace
        self.modality = "image" if image_size else "text"
        self.trace = None if trace is None else load_trace(trace, overhead)
        plans = [plan for found in (self.trace or {}).values() for plan in found]
        most = max((len(plan) for plan in plans), default=self.turns[1])
        slowest = max((turn.seconds for plan in plans for turn in plan), default=lat.longest(self.latency))
        longest = max(
            (turn.words for plan in plans for turn in plan),
            default=max(self.prompt_words[1], self.observation_words[1] + growth * most),
        )
        self.max_turns, self.max_images = max(16, most), max(64, most)
        self.step_timeout = 30.0 + 2 * slowest * pace
        self.episode_timeout = 600.0 + most * (slowest * pace + 1.0)
        self.max_observation_chars = 20_000 + 8 * longest
        if system_words:
            self.system = _filler(Draws("waiting/system"), system_words)
        super().__init__(**limits)
        self.plan: tuple[Turn, ...] = ()
        """The turns of this episode (before the first reply: of its first variant)."""
        self.right = 0
        self._key = ""

    def tasks(self, split: str) -> Sequence[Any]:
        ids = range(SIZES[split]) if self.trace is None else range(len(self.trace))
        return LazyTasks(ids, lambda number: {"id": number, "split": split})

    def start(self, task: Any) -> list[Any]:
        seed = int(self.np_random.integers(1 << 31))
        self._key = f"waiting/{task['split']}/{task['id']}/{seed}"
        self.right = 0
        self.plan = self.way(0)
        return self._say(0)

    def reply(self, text: str) -> list[Any] | None:
        """Sleep, then say the next thing."""
        done = self.turn - 1
        if done == 0:
            self.plan = self.way(self._variant(text))
        now = self.plan[done]
        self.right += len(text.split()) == now.reply
        if seconds := now.seconds * self.pace:
            time.sleep(seconds)
        if done + 1 == len(self.plan):
            self.finish(1.0 if self.right == len(self.plan) else 0.0)
            return None
        return self._say(done + 1)

    def oracle(self) -> str:
        return " ".join(["word"] * self.plan[self.turn].reply)

    def _variant(self, text: str) -> int:
        digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
        return int.from_bytes(digest[:8], "big")

    def way(self, variant: int) -> tuple[Turn, ...]:
        """What is planned; the first observation and the first reply's length are those of variant 0."""
        if self.trace is not None:
            found = self.trace[self.task["id"]]
            plan = found[variant % len(found)]
            return (replace(plan[0], words=found[0][0].words, reply=found[0][0].reply), *plan[1:])
        first = Draws(f"{self._key}/first")
        words, reply = first.between(*self.prompt_words), first.between(*self.reply_words)
        way = f"{self._key}/{variant % self.variants}"
        draws, waits = Draws(way), Draws(f"{way}/wait")
        drawn: list[Turn] = []
        for number in range(draws.between(*self.turns)):
            size, asked = draws.between(*self.observation_words), draws.between(*self.reply_words)
            seconds = lat.draw(self.latency, waits)
            image = self.image_size > 0 and number % self.image_every == 0
            drawn.append(Turn(size + self.growth * number, asked, seconds, image))
        drawn[0] = replace(drawn[0], words=words, reply=reply)
        return tuple(drawn)

    def _say(self, number: int) -> list[Any]:
        turn = self.plan[number]
        draws = Draws(f"{self._key}/say/{number}")
        ask = f"{_ASK[0]} {_ASK[1]} {turn.reply} {_ASK[2]}"
        said = _filler(draws, turn.words - LEAST_WORDS)
        text = f"{ask} {said}" if said else ask
        return [text, self._picture(number)] if turn.image and self.image_size else [text]

    def _picture(self, number: int) -> np.ndarray:
        side = self.image_size
        noise = hashlib.shake_256(f"{self._key}/picture/{number}".encode()).digest(side * side * 3)
        return np.frombuffer(noise, np.uint8).reshape(side, side, 3).copy()


def load_trace(path: str | Path, overhead: int = 0) -> dict[int, list[tuple[Turn, ...]]]:
    """Recorded tasks by number, in order of appearance; each with its variants.

    A line is `{"task": ID, "turns": [{"observation": TOKENS, "reply": TOKENS, "seconds": S}, ...]}`; the
    first observation counts the whole first prompt, and `"image": true` marks a turn with a picture.

    Raises:
        EnvironmentFault: the file is missing, empty, or a line is not such an object.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise EnvironmentFault(f"the trace cannot be read: {error}", fix="give an existing file") from error
    found: dict[str, list[tuple[Turn, ...]]] = {}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            plan = tuple(
                Turn(
                    max(LEAST_WORDS, int(turn["observation"]) - overhead),
                    min(LONGEST_REPLY, max(1, int(turn["reply"]))),
                    max(0.0, float(turn["seconds"])),
                    bool(turn.get("image", False)),
                )
                for turn in row["turns"]
            )
            if not plan:
                raise ValueError("it has no turns")
            found.setdefault(str(row["task"]), []).append(plan)
        except (ValueError, KeyError, TypeError) as error:
            raise EnvironmentFault(
                f"line {number} of the trace is not a recorded task: {error!r}",
                where=str(path),
                fix="record it again with `tiderl bench rollout --record`",
            ) from error
    if not found:
        raise EnvironmentFault("the trace holds no task", where=str(path), fix="record it again")
    return dict(enumerate(found.values()))


def _filler(draws: Draws, words: int) -> str:
    """`words` words, six from each digest."""
    out: list[str] = []
    while len(out) < words:
        number = draws.below(1 << 60)
        out += [FILLER[(number >> shift) % len(FILLER)] for shift in (0, 10, 20, 30, 40, 50)]
    return " ".join(out[: max(0, words)])


def _pair(name: str, value: Sequence[int], least: int, most: int = 1_000_000) -> tuple[int, int]:
    """Least and most; a fault when they are not that."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence) or len(value) != 2:
        raise EnvironmentFault(f"{name} is {value!r}", fix="give the least and the most, such as [2, 4]")
    low, high = value
    for one in (low, high):
        _check_whole(name, one, least)
    if low > high or high > most:
        raise EnvironmentFault(f"{name} is {value!r}", fix=f"give least and most within {least} to {most}")
    return int(low), int(high)


def _check_whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise EnvironmentFault(f"{name} is {value!r}", fix=f"give a whole number, {least} or more")
