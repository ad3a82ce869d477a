"""What the items share: the environment's description, its recorded episodes, and the faults seen.

Invariant: a fault is charged to exactly one item. An item that cannot be judged because of another
item's fault is skipped and says which.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tiderl.env.checker.driver import Crash, Driver, author_location, root_cause
from tiderl.env.checker.report import State
from tiderl.env.checker.transcript import Transcript
from tiderl.env.messages import message_problem
from tiderl.errors import EnvironmentFault

POLICIES = ("oracle", "random", "noop")


class Failed(Exception):
    """An item failed: what was seen, and what the author should do."""

    def __init__(self, detail: str, fix: str) -> None:
        super().__init__(detail)
        self.detail, self.fix = detail, fix


class Skipped(Exception):
    """An item does not apply, or cannot be judged."""


@dataclass(frozen=True)
class Item:
    """One check. `run` returns what it saw, or raises `Failed`, `Skipped` or `Crash`.

    `needs` names items that must not have failed for this one to mean anything.
    """

    name: str
    run: Callable[[Context], str]
    needs: tuple[str, ...] = ()


@dataclass
class Context:
    """State of one check.

    Args:
        driver: how to reach the environment.
        env_id: its id, or a name for a class or factory.
        registered: True when `env_id` can be made by other processes.
        per_split: how many tasks of each split are sampled.
        kwargs: constructor arguments.
        entry: `EnvironmentSpec.entry`, from which another process can register the environment.
        pause: seconds between two passes that are compared.
    """

    driver: Driver
    env_id: str
    registered: bool
    per_split: int = 3
    kwargs: dict[str, Any] = field(default_factory=dict)
    entry: str | None = None
    pause: float = 1.1

    splits: dict[str, list[Any]] = field(default_factory=dict)
    has_tasks: bool = True
    """False where the environment brings no task list: what is sampled is seeds."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    reward_range: tuple[float, float] = (0.0, 1.0)
    max_turns: int = 16
    max_images: int = 64
    nondeterministic: bool = False
    oracle_maximum: bool = True
    step_timeout: float = 30.0

    states: dict[str, State] = field(default_factory=dict)
    faults: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    episodes: list[Transcript] = field(default_factory=list)
    bad_messages: list[str] = field(default_factory=list)
    bad_images: list[str] = field(default_factory=list)
    images_seen: int = 0
    recorded: bool = False
    cache: dict[str, Any] = field(default_factory=dict)

    def sample(self, per_split: int | None = None) -> list[tuple[str, Any, int]]:
        """Tasks spread evenly over each split: (split, task id, seed).

        Without a task list, as many seeds: no two splits get the same.
        """
        chosen: list[tuple[str, Any, int]] = []
        wanted = per_split or self.per_split
        for split, ids in self.splits.items():
            if not self.has_tasks:
                first = 11 + len(chosen)
                chosen += [(split, ids[0], seed) for seed in range(first, first + wanted)]
                continue
            count = min(wanted, len(ids))
            for index in range(count):
                position = index * (len(ids) - 1) // max(1, count - 1)
                if valid_id(ids[position]):
                    chosen.append((split, ids[position], 11 + index))
        return chosen

    def blame(self, crash: Crash) -> str:
        """Charge a crash to the item that it is a fault of; returns that item's name."""
        name, fix = classify(crash)
        entry = (str(crash), fix)
        if entry not in self.faults.setdefault(name, []):
            self.faults[name].append(entry)
        return name

    def knows(self, crash: Crash) -> bool:
        """Whether a crash is another item's fault, or one that valid actions have met as well."""
        name, _ = classify(crash)
        seen = self.faults.get("exceptions", [])
        return name != "exceptions" or any(crash.location and crash.location in detail for detail, _ in seen)

    def record(self) -> None:
        """Play every sampled task with every policy, once for the whole check."""
        if self.recorded:
            return
        self.recorded = True
        for policy in POLICIES:
            for split, task, seed in self.sample():
                try:
                    with self.driver.session() as env:
                        self.episodes.append(
                            self.driver.episode(env, policy, task, split, seed, on_turn=self._inspect)
                        )
                except Crash as crash:
                    if self.blame(crash) == "oracle":
                        break  # there is none; it will not appear on the next task

    def played(self, policy: str | None = None) -> list[Transcript]:
        """Recorded episodes, of one policy or of all.

        Raises:
            Skipped: there are none, because the environment raised in each.
        """
        self.record()
        found = [episode for episode in self.episodes if policy in (None, episode.policy)]
        if not found:
            raise Skipped(
                f"not checked: no episode of the {policy or 'check'} policy ran, see {self.blamed()}"
            )
        return found

    def best_policy(self) -> str:
        """The policy that reaches deepest: the oracle where it runs, else random."""
        self.record()
        return "oracle" if any(episode.policy == "oracle" for episode in self.episodes) else "random"

    def blamed(self) -> str:
        """The items that have faults, for "see ..."."""
        return ", ".join(self.faults) or "the other items"

    def _inspect(self, record: Transcript, messages: Any, _info: Any) -> None:
        """Look at raw messages, before anything keeps or changes them."""
        where = f"at turn {len(record.turns)} of {record.label}"
        if not isinstance(messages, tuple):
            self.bad_messages.append(f"the observation is a {type(messages).__name__}, not a tuple, {where}")
            messages = messages if isinstance(messages, list) else ()
        for message in messages:
            content = message.get("content") if isinstance(message, dict) else None
            parts = content if isinstance(content, list) else []
            pictures = [part for part in parts if isinstance(part, dict) and part.get("type") == "image"]
            self.images_seen += len(pictures)
            problem = message_problem(message)
            if problem and problem.startswith("an image"):
                self.bad_images.append(f"{problem}, {where}")
            elif problem:
                self.bad_messages.append(f"{problem}, {where}")


def valid_id(task: Any) -> bool:
    """Whether a task id is one: an int or a str."""
    return isinstance(task, str | int) and not isinstance(task, bool)


_IMAGE_FIX = "return images as NumPy arrays of dtype uint8 and shape (height, width, 3)"
_REWARD_FIX = "give finish() and step() a finite float within reward_range"
_TOOL_FIX = "annotate every parameter of the tool and give it a docstring"
_RAISED = re.compile(r"^[\w' -]+ of \w+ raised ")


def classify(crash: Crash) -> tuple[str, str]:
    """Which item a crash is a fault of, and what to do about it."""
    error = crash.error
    if isinstance(error, EnvironmentFault) and not _RAISED.match(error.what):
        fix, text = error.fix or "", error.what.lower()
        if "image" in text or "picture" in text:
            return "images", fix or _IMAGE_FIX
        if "reward" in text:
            return "rewards", f"{fix}; also where nothing was earned (0.0)" if fix else _REWARD_FIX
        if "oracle" in text:
            return "oracle", fix
        if "message" in text or "content" in text or "observation" in text:
            return "messages", fix or "build messages with tiderl.messages"
        if "tool" in text or "type hint" in text:
            return "tools", fix or _TOOL_FIX
        if " task" in text or "split" in text or " id" in text:
            return "tasks", fix
        return (
            "start" if crash.call == "the constructor" else "exceptions"
        ), fix or "see AgentEnv's docstring"
    # The usual way to leave a method for later; where in the author's code it was raised helps nobody.
    if isinstance(root_cause(error), NotImplementedError) and crash.call.startswith("oracle()"):
        return "oracle", "write oracle(): the next action of a scripted player that reaches the maximum"
    place = author_location(error) or "the environment's code"
    return "exceptions", f"mend {place}; answer what a model does wrong with a text instead of raising"
