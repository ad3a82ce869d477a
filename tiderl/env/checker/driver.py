"""Calls an environment on behalf of the checks.

Invariant: every call into the author's code is announced to the monitor with a deadline, and every
exception out of it becomes a `Crash` that names the call and the author's own file and line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from tiderl.env.base import AgentEnv
from tiderl.env.checker.policies import NOOP, random_action
from tiderl.env.checker.transcript import Transcript, Turn, canonical
from tiderl.env.plain import place_of


class Monitor(Protocol):
    """Who watches the deadlines."""

    def begin(self, label: str, seconds: float, *, own: bool = True) -> None:
        """A call begins and should take at most `seconds`; `own`: it is one call of the author's code."""

    def end(self) -> None:
        """That call has returned or raised."""


class Abandoned(BaseException):
    """Nobody waits for the check any more; it must stop at the next call."""


class Crash(Exception):
    """The author's code raised, or returned something that is no answer.

    Args:
        call: which call it was, with task, seed and turn.
        error: the exception.
        location: `file:line` of the author's frame in which it arose, or "" when there is none.
    """

    def __init__(self, call: str, error: BaseException, location: str) -> None:
        self.call, self.error, self.location = call, error, location
        super().__init__(str(self))

    def __str__(self) -> str:
        root = root_cause(self.error)
        where = f" at {self.location}" if self.location else ""
        return f"{self.call} raised {type(root).__name__}: {root}{where}"


def root_cause(error: BaseException) -> BaseException:
    """The exception at the bottom of a chain of `raise ... from ...`."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def author_location(error: BaseException) -> str:
    """Where in the author's code the cause of an exception arose (see `place_of`); "" when nowhere."""
    return place_of(root_cause(error)) or ""


class Driver:
    """Makes, resets, steps and closes environments under the monitor's eyes.

    Args:
        factory: makes one environment; called once per independent session.
        monitor: learns of every call.
        call_timeout: seconds for one call; None means the environment's own `reset_timeout` and
            `step_timeout`.
    """

    def __init__(
        self, factory: Callable[[], Any], monitor: Monitor, call_timeout: float | None = None
    ) -> None:
        self.factory, self.monitor, self.call_timeout = factory, monitor, call_timeout
        self.between: Callable[[str], None] | None = None
        self.given_rewards: list[tuple[str, Any]] = []
        """(call, reward) of rewards that authors gave as something else than an int or a float."""
        self.call = ""

    @contextmanager
    def guard(self, label: str, seconds: float) -> Iterator[None]:
        """Announce a call; turn what it raises into a `Crash`."""
        self.call = label
        self.monitor.begin(label, self.call_timeout or seconds)
        try:
            yield
        except (Exception, SystemExit) as error:
            raise Crash(label, error, author_location(error)) from error
        finally:
            self.monitor.end()
        if self.between is not None:
            self.between(label)

    def make(self) -> Any:
        """A new environment, without wrappers."""
        with self.guard("the constructor", 60.0):
            env = self.factory().unwrapped
        if isinstance(env, AgentEnv):
            self._listen(env)
        return env

    def _listen(self, env: AgentEnv) -> None:
        """Note every reward as the author gave it, before `AgentEnv` makes a float of it."""
        convert = env._number

        def number(reward: Any) -> float:
            if type(reward) not in (int, float) and len(self.given_rewards) < 100:
                self.given_rewards.append((self.call, reward))
            return convert(reward)

        env._number = number  # type: ignore[method-assign]

    def reset(
        self, env: Any, task: Any, split: str, seed: int | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Reset to one task; checks the shape of the answer only."""
        label = f"reset(seed={seed}, task={task!r}, split={split!r})"
        with self.guard(label, limit(env, "reset_timeout", 60.0)):
            answer = env.reset(seed=seed, options={"task": task, "split": split})
            if not isinstance(answer, tuple) or len(answer) != 2:
                raise TypeError(f"reset returned {shape(answer)} instead of (observation, info)")
        return answer

    def step(self, env: Any, action: Any, label: str) -> tuple[Any, Any, Any, Any, Any]:
        """One step; checks the shape of the answer only."""
        with self.guard(label, limit(env, "step_timeout", 30.0)):
            answer = env.step(action)
            if not isinstance(answer, tuple) or len(answer) != 5:
                names = "(observation, reward, terminated, truncated, info)"
                raise TypeError(f"step returned {shape(answer)} instead of {names}")
        return answer

    def oracle(self, env: Any, label: str) -> Any:
        """The environment's own next action."""
        with self.guard(f"oracle() {label}", limit(env, "step_timeout", 30.0)):
            return env.oracle()

    def close(self, env: Any) -> None:
        """Close; a second call must be harmless."""
        with self.guard("close()", 30.0):
            env.close()

    def play(
        self,
        env: Any,
        policy: str,
        task: Any,
        split: str,
        seed: int,
        *,
        on_turn: Callable[[Transcript, Any, Any], None] | None = None,
        max_turns: int | None = None,
    ) -> Iterator[Transcript]:
        """Play one episode; yields the growing transcript after every answer.

        A generator, so that two sessions can be interleaved turn by turn. `policy` is `oracle`,
        `random` or `noop`; `on_turn` sees the raw messages and info before anything else can touch them.
        """
        record = Transcript(task, split, seed, policy)
        rng = np.random.default_rng([seed, len(str(task))])
        messages, info = self.reset(env, task, split, seed)
        if on_turn is not None:
            on_turn(record, messages, info)
        record.turns.append(Turn(canonical(messages), 0.0, False, False, canonical(info)))
        yield record
        limit_turns = max_turns or int(getattr(env, "max_turns", 16)) + 1
        while not record.ended and len(record.turns) <= limit_turns:
            label = f"at turn {len(record.turns)} of {record.label}"
            if policy == "oracle":
                action = self.oracle(env, label)
            else:
                action = NOOP if policy == "noop" else random_action(rng, env.tools)
            record.actions.append(action)
            answer = self.step(env, action, f"step({brief(action)}) {label}")
            messages, reward, terminated, truncated, info = answer
            if on_turn is not None:
                on_turn(record, messages, info)
            record.turns.append(Turn(canonical(messages), reward, terminated, truncated, canonical(info)))
            yield record

    def episode(self, env: Any, policy: str, task: Any, split: str, seed: int, **options: Any) -> Transcript:
        """Play one episode to its end (at most one turn more than the environment's `max_turns`)."""
        *_, record = self.play(env, policy, task, split, seed, **options)
        return record

    @contextmanager
    def session(self) -> Iterator[Any]:
        """An environment that is closed at the end."""
        env = self.make()
        try:
            yield env
        finally:
            if sys.exc_info()[0] is None:
                self.close(env)
            else:
                try:
                    self.close(env)
                except Crash:
                    pass  # the first fault is the one to report


def limit(env: Any, name: str, default: float) -> float:
    """A time limit that an environment declares, in seconds."""
    value = getattr(env, name, default)
    return float(value) if isinstance(value, int | float) and value > 0 else default


def shape(value: Any) -> str:
    """A short description of what a method returned."""
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__


def brief(action: Any, size: int = 60) -> str:
    """A short text for an action: `compare(n=5)` or the quoted text."""
    if (
        isinstance(action, dict)
        and isinstance(action.get("tool_calls"), list | tuple)
        and action["tool_calls"]
    ):
        first = action["tool_calls"][0]
        function = first.get("function") if isinstance(first, dict) else None
        if isinstance(function, dict):
            text = f"{function.get('name')} {function.get('arguments')}"
            return text if len(text) <= size else text[: size - 3] + "..."
    text = repr(action if not isinstance(action, dict) else action.get("content"))
    return text if len(text) <= size else text[: size - 3] + "..."
