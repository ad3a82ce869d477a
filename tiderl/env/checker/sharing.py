"""The item that finds objects shared between observations.

Invariant: identity is compared while all observations are alive, so that no address is reused.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np

from tiderl.env.checker.context import Context, Failed, Skipped
from tiderl.env.checker.transcript import first_difference

_FIX = "build new messages for each observation, or return copies (tiderl.messages.copy_messages)"


def sharing(ctx: Context) -> str:
    """No two observations or infos share a mutable object, and none is the environment's own."""
    sample = ctx.sample()
    if not sample:
        raise Skipped("not checked: there are no tasks")
    split, task, seed = sample[0]
    policy = ctx.best_policy()
    kept: list[tuple[str, Any]] = []
    with ctx.driver.session() as env:
        for episode in (1, 2):
            for number, raw in enumerate(_raw_turns(ctx, env, policy, sample[0])):
                kept.append((f"turn {number} of episode {episode}", raw))
    for (left, a), (right, b) in combinations(kept, 2):
        if found := shared(a, b):
            raise Failed(
                f"{left} and {right} share {found}, in task {task!r} of {split!r}, seed {seed}", _FIX
            )
    clean = _messages(ctx, policy, sample[0], spoil=False)
    spoiled = _messages(ctx, policy, sample[0], spoil=True)
    if found := first_difference(clean, spoiled, "turns"):
        raise Failed(
            f"an observation changed when its reader changed earlier ones: {found}, "
            f"in task {task!r} of {split!r}, seed {seed}",
            _FIX,
        )
    return f"{len(kept)} observations share nothing, and changing one changes no later one"


def _raw_turns(ctx: Context, env: Any, policy: str, sample: tuple[str, Any, int]) -> list[Any]:
    """Raw (messages, info) of the first turns of one episode."""
    split, task, seed = sample
    raws: list[Any] = []
    for record in ctx.driver.play(env, policy, task, split, seed, on_turn=lambda _, *raw: raws.append(raw)):
        if len(record.turns) > 4:
            break
    return raws


def _messages(ctx: Context, policy: str, sample: tuple[str, Any, int], *, spoil: bool) -> list[Any]:
    """Canonical messages of two episodes in one session; `spoil` changes each after it was recorded."""
    split, task, seed = sample
    seen: list[Any] = []
    with ctx.driver.session() as env:
        for _ in range(2):
            raws: list[Any] = []
            for record in ctx.driver.play(
                env, policy, task, split, seed, on_turn=lambda _, *raw, keep=raws: keep.append(raw)
            ):
                seen.append(record.turns[-1].messages)
                if spoil:
                    _spoil(raws[-1])
    return seen


def _spoil(value: Any) -> None:
    """Change every mutable thing in an observation or info in place."""
    if isinstance(value, tuple):
        for item in value:
            _spoil(item)
    elif isinstance(value, np.ndarray):
        if value.flags.writeable:
            value[...] = 0
    elif isinstance(value, list):
        for item in value:
            _spoil(item)
        value.clear()
    elif isinstance(value, dict):
        for item in value.values():
            _spoil(item)
        value.clear()


def shared(a: Any, b: Any) -> str | None:
    """A word for a mutable object that both values hold, or None."""
    left, right = dict(_mutables(a)), dict(_mutables(b))
    for key in left.keys() & right.keys():
        return f"one {type(left[key]).__name__} ({_outline(left[key])})"
    arrays = [value for value in right.values() if isinstance(value, np.ndarray)]
    for value in left.values():
        if isinstance(value, np.ndarray) and any(np.shares_memory(value, other) for other in arrays):
            return f"the memory of an array ({_outline(value)})"
    return None


def _mutables(value: Any) -> Any:
    """(id, object) of every mutable container or array inside a value."""
    if isinstance(value, tuple):
        for item in value:
            yield from _mutables(item)
    elif isinstance(value, np.ndarray):
        yield id(value), value
    elif isinstance(value, list | dict):
        yield id(value), value
        for item in value.values() if isinstance(value, dict) else value:
            yield from _mutables(item)


def _outline(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {'x'.join(map(str, value.shape))}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
