"""Each broken environment is reported with its fault named, and with no other one.

Gymnasium's own checker may see some of the faults too; its item is then the only other one to fail.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiderl
from tiderl.env.checker import CheckReport, check_environment


class Guess(tiderl.AgentEnv):
    """Guess a number between 1 and 8; the good environment that the others break."""

    max_turns = 6

    def tasks(self, split: str) -> list[dict[str, Any]]:
        return [{"id": f"{split}-{n}", "number": n} for n in range(1, 9) if (n % 2 == 0) == (split == "test")]

    def start(self, task: dict[str, Any]) -> Any:
        self.low, self.high = 1, 8
        picture = np.full((4, 6, 3), self.np_random.integers(256), np.uint8)
        return ["Guess a number between 1 and 8.", picture]

    @tiderl.tool
    def guess(self, n: int) -> Any:
        """Guess the number."""
        number = self.task["number"]
        if n == number:
            self.finish(1.0)
            return "right"
        if n < number:
            self.low = max(self.low, n + 1)
        else:
            self.high = min(self.high, n - 1)
        return "too low" if n < number else "too high"

    def oracle(self) -> Any:
        call = tiderl.messages.tool_call("guess", n=(self.low + self.high) // 2)
        return tiderl.messages.assistant("", [call])


class Plain(tiderl.AgentEnv):
    """A dialogue with `reset` and `step` of its own; good as it stands."""

    max_turns = 4

    def tasks(self, split: str) -> list[dict[str, Any]]:
        words = {"train": ("yes", "no", "maybe"), "test": ("left", "right")}
        return [{"id": f"{split}-{word}", "word": word} for word in words[split]]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed, options=options)
        return (tiderl.messages.user(f"Say {self.task['word']}, then stop."),), {}

    def step(self, action: Any) -> Any:
        text = action if isinstance(action, str) else tiderl.messages.text_of(action)
        self.right = text == self.task["word"]
        return (tiderl.messages.user("noted"),), 1.0 if self.right else 0.0, self.right, False, {}

    def oracle(self) -> str:
        return self.task["word"]


class NoTasksPlain(tiderl.AgentEnv):
    """The seed alone makes the episode; `reset` and `step` of its own."""

    max_turns = 4

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed, options=options)
        self.digit = str(self.np_random.integers(10))
        return (tiderl.messages.user(f"Say {self.digit}."),), {}

    def step(self, action: Any) -> Any:
        text = action if isinstance(action, str) else tiderl.messages.text_of(action)
        right = text == self.digit
        return (tiderl.messages.user("noted"),), float(right), right, False, {}

    def oracle(self) -> str:
        return self.digit


class NoTasksPlainAlone(NoTasksPlain):
    """Does not call `super().reset`, so `info["task"]` is None."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            self.np_random = np.random.default_rng(seed)
        self.digit = str(self.np_random.integers(10))
        return (tiderl.messages.user(f"Say {self.digit}."),), {}


class NoTasksOneSplit(NoTasksPlain):
    splits = ("train",)


class NoTasksScored(tiderl.AgentEnv):
    """One reply."""

    max_turns = 1

    def start(self, task: Any) -> str:
        self.digit = str(self.np_random.integers(10))
        return f"Say {self.digit}."

    def score(self, text: str) -> float:
        return float(text == self.digit)

    def oracle(self) -> str:
        return self.digit


class NoTasksDialogue(NoTasksScored):
    """A dialogue in three splits."""

    max_turns = 3
    splits = ("train", "test", "hard")
    score = tiderl.AgentEnv.score

    def reply(self, text: str) -> str:
        if text == self.digit:
            self.finish(1.0)
        return "noted"


class NoTasksTools(NoTasksScored):
    """Tools."""

    max_turns = 3
    score = tiderl.AgentEnv.score

    @tiderl.tool
    def say(self, digit: int) -> str:
        """Say a digit."""
        self.finish(float(str(digit) == self.digit))
        return "noted"

    def oracle(self) -> Any:
        return tiderl.messages.assistant("", [tiderl.messages.tool_call("say", digit=int(self.digit))])


NO_TASKS = [
    NoTasksPlain,
    NoTasksPlainAlone,
    NoTasksOneSplit,
    NoTasksScored,
    NoTasksDialogue,
    NoTasksTools,
]


class NoTasksUnseeded(NoTasksScored):
    """Same for the first seed of each split, not for the ones after it."""

    def start(self, task: Any) -> str:
        said = super().start(task)
        kept = self.np_random_seed in (11, 13)
        return said if kept else f"{said} Noise: {np.random.default_rng().integers(1_000_000)}"


class SameTaskInThreeSplits(Guess):
    """Two of three splits are apart."""

    splits = ("train", "test", "hard")

    def tasks(self, split: str) -> list[dict[str, Any]]:
        return super().tasks("test" if split == "hard" else split)


class UnseededRandomness(Guess):
    def start(self, task: Any) -> Any:
        return [*super().start(task), f"Noise: {np.random.default_rng().integers(1_000_000)}"]


class GlobalGenerator(Guess):
    def start(self, task: Any) -> Any:
        return [*super().start(task), f"Noise: {random.randrange(1_000_000)}"]


class GlobalNumpyInTool(Guess):
    @tiderl.tool
    def guess(self, n: int) -> Any:
        """Guess the number."""
        return f"{super().guess(n)} {np.random.rand()}"


class SeedsGlobalGenerator(Guess):
    def start(self, task: Any) -> Any:
        random.seed(7)
        return super().start(task)


class RewardNone(Plain):
    def step(self, action: Any) -> Any:
        messages, reward, terminated, truncated, info = super().step(action)
        return messages, reward if terminated else None, terminated, truncated, info


class RewardNoneFromFinish(Guess):
    @tiderl.tool
    def guess(self, n: int) -> Any:
        """Guess the number."""
        self.finish(1.0 if n == self.task["number"] else None)  # type: ignore[arg-type]
        return "done"

    def oracle(self) -> Any:
        return tiderl.messages.assistant("", [tiderl.messages.tool_call("guess", n=self.task["number"])])


class RewardNaN(Plain):
    def step(self, action: Any) -> Any:
        messages, reward, terminated, truncated, info = super().step(action)
        return messages, reward if terminated else float("nan"), terminated, truncated, info


class RewardBool(Guess):
    @tiderl.tool
    def guess(self, n: int) -> Any:
        """Guess the number."""
        self.finish(n == self.task["number"])
        return "done"

    oracle = RewardNoneFromFinish.oracle


class RewardNumpy(Plain):
    def step(self, action: Any) -> Any:
        messages, reward, terminated, truncated, info = super().step(action)
        return messages, np.float32(reward), terminated, truncated, info


class RewardOutOfRange(Plain):
    def step(self, action: Any) -> Any:
        messages, reward, terminated, truncated, info = super().step(action)
        return messages, reward - 0.25 * (not terminated), terminated, truncated, info


class FloatImage(Guess):
    def start(self, task: Any) -> Any:
        text, picture = super().start(task)
        return [text, picture / 255.0]


class FloatImageInStep(Plain):
    def step(self, action: Any) -> Any:
        messages, *rest = super().step(action)
        part = {"type": "image", "image": np.zeros((4, 4, 3), np.float32)}
        return ({"role": "user", "content": [part]}, *messages), *rest


class SharedMessage(Plain):
    notice = {"role": "user", "content": "noted"}

    def step(self, action: Any) -> Any:
        _, *rest = super().step(action)
        return (self.notice,), *rest


class SharedHistory(Plain):
    """Every observation is the growing history: the same dicts again and again."""

    def reset(self, **kwargs: Any) -> Any:
        messages, info = super().reset(**kwargs)
        self.history = list(messages)
        return tuple(self.history), info

    def step(self, action: Any) -> Any:
        messages, *rest = super().step(action)
        self.history += messages
        return tuple(self.history), *rest


class ClockInInfo(Plain):
    def step(self, action: Any) -> Any:
        *rest, info = super().step(action)
        return *rest, {**info, "at": time.time()}


class WholeSecondsInInfo(Plain):
    def step(self, action: Any) -> Any:
        *rest, info = super().step(action)
        return *rest, {**info, "minute": int(time.time()) % 60}


class UuidInInfo(Plain):
    def step(self, action: Any) -> Any:
        *rest, info = super().step(action)
        return *rest, {**info, "run": str(uuid.uuid4())}


def tool_without_types() -> tiderl.AgentEnv:
    class Untyped(Guess):
        @tiderl.tool
        def guess(self, n) -> Any:  # type: ignore[no-untyped-def]
            """Guess the number."""
            return "no"

    return Untyped()


class UndescribedTool(Guess):
    @tiderl.tool
    def shout(self, what: str) -> str:
        return what.upper()


class ExceptionInTool(Guess):
    @tiderl.tool
    def guess(self, n: int) -> Any:
        """Guess the number."""
        return {}["missing"] if n < 3 else super().guess(n)


class NoOracle(Guess):
    oracle = tiderl.AgentEnv.oracle


class OracleForLater(Guess):
    def oracle(self) -> Any:
        raise NotImplementedError


class OracleBelowMaximum(Guess):
    reward_range = (0.0, 2.0)


class FreeReward(Guess):
    on_no_tool = "finish"

    def finish(self, reward: float, reason: Any = None) -> None:
        super().finish(1.0, reason)


class TruncatedFirstStep(Plain):
    def step(self, action: Any) -> Any:
        messages, reward, terminated, _, info = super().step(action)
        return messages, reward, terminated, not terminated, info


class SharedState(Guess):
    """Bounds in a class-level list: two sessions write to the same one."""

    bounds = [1, 8]

    def start(self, task: Any) -> Any:
        type(self).bounds[:] = [1, 8]
        return super().start(task)

    @tiderl.tool
    def guess(self, n: int) -> Any:
        """Guess the number."""
        answer = super().guess(n)
        type(self).bounds[:] = [self.low, self.high]
        return answer

    def oracle(self) -> Any:
        self.low, self.high = type(self).bounds
        return super().oracle()


class SameTaskInBothSplits(Guess):
    def tasks(self, split: str) -> list[dict[str, Any]]:
        return [{"id": n, "number": n} for n in range(1, 5)]


class EmptySplit(Guess):
    def tasks(self, split: str) -> list[dict[str, Any]]:
        return super().tasks(split) if split == "train" else []


class AnswersOnlyTheFirstCall(Guess):
    def step(self, action: Any) -> Any:
        if isinstance(action, dict) and isinstance(action.get("tool_calls"), list):
            action = {**action, "tool_calls": action["tool_calls"][:1]}
        return super().step(action)


class PathInInfo(Plain):
    def step(self, action: Any) -> Any:
        *rest, info = super().step(action)
        return *rest, {**info, "log": str(Path.home() / "log.txt")}


class RaisesOnMalformed(Plain):
    def step(self, action: Any) -> Any:
        if isinstance(action, dict) and not isinstance(action.get("content"), str):
            raise ValueError("a reply needs text")
        return super().step(action)


FAULTS: list[tuple[Callable[[], Any], str, str]] = [
    (UnseededRandomness, "seeds", "Noise"),
    (GlobalGenerator, "global_rng", "random"),
    (GlobalNumpyInTool, "global_rng", "numpy.random"),
    (SeedsGlobalGenerator, "global_rng", "reset"),
    (RewardNone, "rewards", "None"),
    (RewardNoneFromFinish, "rewards", "None"),
    (RewardNaN, "rewards", "nan"),
    (RewardBool, "rewards", "bool"),
    (RewardNumpy, "rewards", "numpy.float32"),
    (RewardOutOfRange, "rewards", "outside reward_range"),
    (FloatImage, "images", "float64"),
    (FloatImageInStep, "images", "float32"),
    (SharedMessage, "sharing", "noted"),
    (SharedHistory, "sharing", "share"),
    (ClockInInfo, "info", "info['at']"),
    (WholeSecondsInInfo, "info", "info['minute']"),
    (UuidInInfo, "info", "info['run']"),
    (tool_without_types, "tools", "'n' of tool 'guess' has no type hint"),
    (UndescribedTool, "tools", "'shout' has no description"),
    (ExceptionInTool, "exceptions", "KeyError: 'missing' at"),
    (NoOracle, "oracle", "has no oracle"),
    (OracleForLater, "oracle", "NotImplementedError"),
    (OracleBelowMaximum, "oracle", "earned 1 of 2"),
    (FreeReward, "floor", "an empty reply earns the maximum"),
    (TruncatedFirstStep, "first_step", "first step"),
    (SharedState, "sessions", "took turns"),
    (SameTaskInBothSplits, "tasks", "share 4 tasks"),
    (SameTaskInThreeSplits, "tasks", "'test' and 'hard' share 4 tasks"),
    (NoTasksUnseeded, "seeds", "Noise"),
    (EmptySplit, "tasks", "'test' is advertised and has no task"),
    (AnswersOnlyTheFirstCall, "answers", "were answered as"),
    (PathInInfo, "info", "a path of this machine"),
    (RaisesOnMalformed, "malformed", "ValueError: a reply needs text"),
]
NEEDS_PAUSE = (WholeSecondsInInfo,)


def checked(env: Callable[[], Any]) -> CheckReport:
    return check_environment(env, tasks=2, pause=1.1 if env in NEEDS_PAUSE else 0.0)


@pytest.mark.parametrize("good", [Guess, Plain])
def test_a_good_environment_passes_every_item(good: type[Any]) -> None:
    report = checked(good)
    assert report.ok, str(report)
    assert set(report.names("skip")) <= {"answers", "remote", "timeouts"}


@pytest.mark.parametrize("good", NO_TASKS)
def test_an_environment_without_a_task_list_passes_and_is_tried_with_several_seeds(good: type[Any]) -> None:
    report = checked(good)
    assert report.ok, str(report)
    assert report["tasks"].detail == "no task list: every seed is an episode of its own"
    assert report["start"].detail.startswith("made and reset; tasks: none")
    assert report["oracle"].detail.startswith(f"{2 * len(good.splits)} tasks solved")


@pytest.mark.parametrize(("env", "item", "seen"), FAULTS, ids=[env.__name__ for env, _, _ in FAULTS])
def test_the_fault_is_named_and_nothing_else(env: Callable[[], Any], item: str, seen: str) -> None:
    report = checked(env)
    failed = set(report.names("fail"))
    assert item in failed, str(report)
    assert failed <= {item, "gymnasium"}, str(report)
    assert seen in report[item].detail
    assert report[item].fix
    assert not report.ok


def test_an_exception_is_named_with_its_file_and_line() -> None:
    detail = checked(ExceptionInTool)["exceptions"].detail
    line = ExceptionInTool.guess.__code__.co_firstlineno + 3
    assert f"{__file__}:{line}" in detail
    assert "task 't" in detail
    assert "seed" in detail


def test_a_detail_names_task_seed_and_turn() -> None:
    detail = checked(UnseededRandomness)["seeds"].detail
    assert "turn 0" in detail
    assert "task 'train-1' of split 'train'" in detail
    assert "seed 11" in detail
