"""Comparable records of what an environment said.

Invariant: two values have the same `canonical` form if and only if they are equal bit by bit: types of
numbers, image dtype, shape and bytes included. Tuples and lists count as the same, since a wire turns
one into the other. A canonical form shares no object with the environment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Exact:
    """Stands for a value of a type that plain equality would blur (`True == 1 == 1.0`)."""

    kind: str
    text: str

    def __str__(self) -> str:
        return (
            f"{self.kind} {float.fromhex(self.text)!r}"
            if self.kind == "float"
            else f"{self.kind} {self.text}"
        )


@dataclass(frozen=True)
class Pixels:
    """Stands for an array: sha256 of its bytes, with dtype and shape."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str

    def __str__(self) -> str:
        return f"{self.dtype} array {'x'.join(map(str, self.shape))} sha256 {self.sha256[:12]}"


def canonical(value: Any) -> Any:
    """`value` with arrays replaced by `Pixels`, floats by their exact hex form, and all else copied.

    Values of types that are no message or info content become `Exact` by their `repr`.
    """
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value)
        digest = hashlib.sha256(data.tobytes()).hexdigest()
        return Pixels(str(data.dtype), tuple(data.shape), digest)
    if isinstance(value, Mapping):
        return {str(key): canonical(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [canonical(item) for item in value]
    if value is None or type(value) in (bool, int, str, bytes):
        return value
    if type(value) is float:
        return Exact("float", value.hex())
    if isinstance(value, np.generic):
        return Exact(type(value).__name__, str(value.item()))
    if isinstance(value, str):  # StrEnum: its text is what a reader and a wire see
        return str(value)
    return Exact(type(value).__name__, repr(value))


def first_difference(a: Any, b: Any, path: str = "") -> str | None:
    """Where two canonical forms first differ, as `path: a against b`; None when they are equal."""
    here = path or "value"
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            where = f"{path}[{key!r}]"
            if key not in a or key not in b:
                return f"{where} is present in one run only"
            if found := first_difference(a[key], b[key], where):
                return found
        return None
    if isinstance(a, list) and isinstance(b, list):
        for index, (left, right) in enumerate(zip(a, b, strict=False)):
            if found := first_difference(left, right, f"{path}[{index}]"):
                return found
        return None if len(a) == len(b) else f"{here} has {len(a)} items against {len(b)}"
    return None if type(a) is type(b) and a == b else f"{here} is {_short(a)} against {_short(b)}"


def _short(value: Any, limit: int = 80) -> str:
    text = str(value) if isinstance(value, Pixels | Exact) else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


@dataclass
class Turn:
    """One answer of the environment: canonical messages and info, reward as it came, both flags."""

    messages: Any
    reward: Any
    terminated: Any
    truncated: Any
    info: Any


@dataclass
class Transcript:
    """One episode. `turns[0]` is the answer to `reset` (reward 0.0, flags False)."""

    task: Any
    split: str
    seed: int
    policy: str
    turns: list[Turn] = field(default_factory=list)
    actions: list[Any] = field(default_factory=list)

    @property
    def label(self) -> str:
        """For details: which episode this is."""
        return f"task {self.task!r} of split {self.split!r}, seed {self.seed}"

    @property
    def total(self) -> float:
        """The episode's return: the sum of its rewards; NaN when one of them is no number."""
        try:
            return float(sum(float(turn.reward) for turn in self.turns[1:]))
        except (TypeError, ValueError):
            return float("nan")

    @property
    def ended(self) -> bool:
        """True when the environment said that the episode is over."""
        return len(self.turns) > 1 and bool(self.turns[-1].terminated or self.turns[-1].truncated)

    def difference(self, other: Transcript, *, info: bool) -> str | None:
        """Where the two episodes first differ: in `info` only, or in all but `info`."""
        for number, (mine, theirs) in enumerate(zip(self.turns, other.turns, strict=False)):
            parts = (
                {"info": (mine.info, theirs.info)}
                if info
                else {
                    "messages": (mine.messages, theirs.messages),
                    "reward": (canonical(mine.reward), canonical(theirs.reward)),
                    "terminated": (canonical(mine.terminated), canonical(theirs.terminated)),
                    "truncated": (canonical(mine.truncated), canonical(theirs.truncated)),
                }
            )
            for name, (left, right) in parts.items():
                if found := first_difference(left, right, name):
                    return f"{found}, at turn {number} of {self.label}"
        if not info and len(self.turns) != len(other.turns):
            return f"{len(self.turns) - 1} turns against {len(other.turns) - 1}, in {self.label}"
        return None
