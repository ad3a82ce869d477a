"""What holds for environments that write `reset` and `step` themselves.

Invariant: a class's own `step` is held to the same contract as ours: turns are counted, `max_turns`
truncates, rewards are finite, observations are valid, `info` names the task, the turn and the end.
Nothing an author returns is repaired or copied.
"""

from __future__ import annotations

import functools
import os
import sysconfig
import traceback
from pathlib import Path
from typing import Any

from tiderl.env.ends import EndReason
from tiderl.env.messages import validate_message
from tiderl.errors import EnvironmentFault

_CORE = tuple(
    str(Path(__file__).resolve().parents[1] / part) + os.sep for part in ("env", "hub", "evaluation", "cli")
)
_LIBRARIES = tuple({sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")})


def place_of(error: BaseException) -> str | None:
    """`file:line in function` of the author's frame in which an exception arose; None where there is none.

    It is the innermost frame that is neither ours nor a library's. Where the environment itself is an
    installed package, it is its innermost frame outside Gymnasium and the standard library.
    """
    if isinstance(error, SyntaxError) and error.filename and not error.filename.startswith("<"):
        return f"{error.filename}:{error.lineno}"
    frames = list(traceback.extract_tb(error.__traceback__))
    outer = [frame for frame in frames if not frame.filename.startswith((*_CORE, "<frozen "))]
    own = [frame for frame in outer if not frame.filename.startswith(_LIBRARIES)]
    third = [
        frame for frame in outer if "gymnasium" not in frame.filename and "site-packages" in frame.filename
    ]
    chosen = own or third or outer
    return f"{chosen[-1].filename}:{chosen[-1].lineno} in {chosen[-1].name}" if chosen else None


def guard(cls: Any) -> None:
    """Wrap `reset` and `step` where the class itself defines them; outermost call only."""
    if "reset" in vars(cls):
        cls.reset = _guarded_reset(vars(cls)["reset"])
    if "step" in vars(cls):
        cls.step = _guarded_step(vars(cls)["step"])


def _guarded_reset(inner: Any) -> Any:
    @functools.wraps(inner)
    def reset(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._depth:
            return inner(self, *args, **kwargs)
        self._begin()
        self._depth += 1
        try:
            with self._author("reset"):
                observation, info = _pair(inner(self, *args, **kwargs), 2, "reset", self)
        finally:
            self._depth -= 1
        _check(observation, self, "reset")
        self._started = True
        return observation, self._info() | info

    return reset


def _guarded_step(inner: Any) -> Any:
    @functools.wraps(inner)
    def step(self: Any, action: Any) -> Any:
        if self._depth:
            return inner(self, action)
        self._check_running()
        self.turn += 1
        self._depth, self._counted, self._gained, self._acting = 1, True, 0.0, True
        before = self._return
        try:
            with self._author("step"):
                result = _pair(inner(self, action), 5, "step", self)
        finally:
            self._depth, self._counted, self._acting = 0, False, False
        observation, reward, terminated, truncated, info = result
        _check(observation, self, "step")
        reward = self._number(reward)
        self._gained, self._return = 0.0, before + reward
        if terminated:
            self._end = self._end if self._end and self._end.terminal else self._verdict()
        elif truncated:
            self._end = EndReason(info.get("end", self._end or EndReason.MAX_TURNS))
        elif self.turn >= self.max_turns:
            self._acting = True
            try:
                self._cut_short(EndReason.MAX_TURNS)
            finally:
                self._acting = False
            reward, truncated = reward + self._gained, True
            self._return, self._gained = before + reward, 0.0
        return observation, reward, terminated, truncated, self._info() | info

    return step


def _pair(result: Any, size: int, what: str, env: Any) -> Any:
    if not isinstance(result, tuple) or len(result) != size or not isinstance(result[-1], dict):
        names = "(observation, info)" if size == 2 else "(observation, reward, terminated, truncated, info)"
        raise EnvironmentFault(
            f"{what} of {type(env).__name__} did not return {names}", fix="return a tuple, info a dict"
        )
    return result


def _check(observation: Any, env: Any, what: str) -> None:
    where = f"{what} of {type(env).__name__}"
    if not isinstance(observation, tuple):
        raise EnvironmentFault(
            f"an observation is a {type(observation).__name__}, not a tuple of messages",
            where=where,
            fix="return a tuple of the new messages",
        )
    for message in observation:
        validate_message(message, where=where)
