"""Items that compare runs: seeds, global generators, info, concurrent sessions.

Invariant: two runs that are compared differ in exactly one thing. Runs of the first pass
and of the others are `pause` seconds apart, so that a clock with whole seconds shows too.
"""

from __future__ import annotations

import os
import random
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tiderl.env.checker.context import Context, Failed, Skipped
from tiderl.env.checker.driver import Abandoned, Crash
from tiderl.env.checker.transcript import Exact, Transcript

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.IGNORECASE)
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]{6,}")


@dataclass
class Runs:
    """Transcripts of the same sampled tasks under several conditions, and what touched global state."""

    first: list[Transcript] = field(default_factory=list)
    again: list[list[Transcript]] = field(default_factory=list)
    disturbed: list[list[Transcript]] = field(default_factory=list)
    consumed: list[str] = field(default_factory=list)


def runs(ctx: Context) -> Runs:
    """Play all passes once for the whole check."""
    found = ctx.cache.get("runs")
    if found is None:
        found = ctx.cache["runs"] = _play_passes(ctx)
    if not found.first:
        raise Skipped(f"not checked: no episode ran, see {ctx.blamed()}")
    return found


def _play_passes(ctx: Context) -> Runs:
    result = Runs()
    began = time.monotonic()
    result.first = _pass(ctx, 1, result.consumed)
    time.sleep(max(0.0, ctx.pause - (time.monotonic() - began)))
    result.again = [_pass(ctx, 1, result.consumed) for _ in range(2)]
    result.disturbed = [_pass(ctx, number, result.consumed) for number in (2, 3)]
    return result


def _pass(ctx: Context, global_seed: int, consumed: list[str]) -> list[Transcript]:
    """One episode of every sampled task, each in a new environment."""
    policy = ctx.best_policy()
    played = []
    for split, task, seed in ctx.sample():
        with _global_generators(ctx, global_seed, consumed):
            try:
                with ctx.driver.session() as env:
                    played.append(ctx.driver.episode(env, policy, task, split, seed))
            except Crash as crash:
                ctx.blame(crash)
                played.append(Transcript(task, split, seed, policy))
    return played


@contextmanager
def _global_generators(ctx: Context, seed: int, consumed: list[str]) -> Iterator[None]:
    """Seed the global generators, note every call that moves them, put them back at the end."""
    kept = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    before = _fingerprint()

    def compare(label: str) -> None:
        nonlocal before
        now = _fingerprint()
        moved = [
            name for name, old, new in zip(("random", "numpy.random"), before, now, strict=True) if old != new
        ]
        if moved:
            consumed.append(f"{label} used or seeded the global generator of {' and '.join(moved)}")
        before = now

    ctx.driver.between = compare
    try:
        yield
    finally:
        ctx.driver.between = None
        random.setstate(kept[0])
        np.random.set_state(kept[1])


def _fingerprint() -> tuple[Any, Any]:
    state: Any = np.random.get_state(legacy=False)
    return random.getstate(), (state["state"]["pos"], state["state"]["key"].tobytes(), state["gauss"])


def _must_be_deterministic(ctx: Context) -> None:
    if ctx.nondeterministic:
        raise Skipped("the environment declares itself nondeterministic")


def seeds(ctx: Context) -> str:
    """The same seed and task give the same episode."""
    _must_be_deterministic(ctx)
    found = runs(ctx)
    for again in found.again:
        for one, two in zip(found.first, again, strict=True):
            if difference := one.difference(two, info=False):
                raise Failed(
                    f"two runs differ: {difference}",
                    "draw all random numbers from self.np_random, and use no clock, uuid, id() or hash order",
                )
    return f"{len(found.first)} tasks gave the same episode three times"


def global_rng(ctx: Context) -> str:
    """The global generators of `random` and `numpy` are neither read nor moved."""
    found = runs(ctx)
    fix = "draw from self.np_random instead of random.* and numpy.random.*, and never seed those"
    if found.consumed:
        raise Failed(found.consumed[0], fix)
    if not ctx.nondeterministic and ctx.states.get("seeds") == "pass":
        for disturbed in found.disturbed:
            for one, two in zip(found.first, disturbed, strict=True):
                if difference := one.difference(two, info=False):
                    raise Failed(f"another global seed changed the episode: {difference}", fix)
    return "global generators disturbed, nothing changed; their state was left alone"


def info(ctx: Context) -> str:
    """`info` is the same in two runs and names no time, path, UUID or address."""
    found = runs(ctx)
    fix = "keep clocks, paths, ports and UUIDs out of info; self.timings takes what must be measured"
    if not ctx.nondeterministic:
        for again in found.again + (found.disturbed if ctx.states.get("global_rng") == "pass" else []):
            for one, two in zip(found.first, again, strict=True):
                if difference := one.difference(two, info=True):
                    raise Failed(f"info differs between two runs of one seed: {difference}", fix)
    for episode in found.first:
        for number, turn in enumerate(episode.turns):
            for path, value in _leaves(turn.info, "info"):
                if word := _suspicious(value):
                    raise Failed(f"{path} holds {word} at turn {number} of {episode.label}: {value}", fix)
    return "info was the same in all runs and holds no time, path, UUID or address"


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}[{key!r}]")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def _suspicious(value: Any) -> str | None:
    """What kind of run-dependent value this is, if it is one."""
    number = float.fromhex(value.text) if isinstance(value, Exact) and value.kind == "float" else value
    if isinstance(number, int | float) and not isinstance(number, bool):
        now = time.time()
        if any(abs(number - scale * now) < scale * 86_400 for scale in (1, 1_000, 1_000_000, 1_000_000_000)):
            return "the time of day"
        return None
    text = value.text if isinstance(value, Exact) else value
    if not isinstance(text, str):
        return None
    if _UUID.search(text):
        return "a UUID"
    if tempfile.gettempdir() + "/" in text:
        return "a temporary path"
    if any(f"{place}{os.sep}" in text for place in (os.getcwd(), str(Path.home())) if len(place) > 1):
        return "a path of this machine"
    if _ADDRESS.search(text):
        return "a memory address"
    if time.strftime("%Y-%m-%d") in text:
        return "today's date"
    return None


def sessions(ctx: Context) -> str:
    """Sessions that run at the same time do not influence each other."""
    _must_be_deterministic(ctx)
    found = runs(ctx)
    baselines = [one for one in found.first if one.turns]
    if len(baselines) < 2:
        baselines = baselines * 2
    pairs = list(zip(baselines, baselines[1:] + baselines[:1], strict=True))[:4]
    fix = "keep all state of an episode in the instance (self), never in the class or module"
    for pair in pairs:
        for one, two in zip(pair, _interleaved(ctx, pair), strict=True):
            if difference := _changed(ctx, one, two):
                raise Failed(f"a session that took turns with another one changed: {difference}", fix)
    together = _threads(ctx, baselines)
    for one, two in zip(baselines, together, strict=True):
        if difference := _changed(ctx, one, two):
            raise Failed(
                f"a session in a thread beside {len(baselines) - 1} others changed: {difference}", fix
            )
    return f"{len(pairs)} pairs of sessions taking turns and {len(baselines)} in threads were independent"


def _changed(ctx: Context, one: Transcript, two: Transcript) -> str | None:
    """The first difference; of info only where info is known to be the same in two runs alone."""
    found = one.difference(two, info=False)
    return found if found or ctx.states.get("info") != "pass" else one.difference(two, info=True)


def _interleaved(ctx: Context, pair: tuple[Transcript, Transcript]) -> list[Transcript]:
    """Two episodes, turn by turn in alternation."""
    with ctx.driver.session() as a, ctx.driver.session() as b:
        played = [
            ctx.driver.play(env, one.policy, one.task, one.split, one.seed)
            for env, one in zip((a, b), pair, strict=True)
        ]
        last: list[Transcript] = [Transcript(one.task, one.split, one.seed, one.policy) for one in pair]
        running = [True, True]
        while any(running):
            for index, episode in enumerate(played):
                record = next(episode, None)
                running[index] = record is not None
                last[index] = record or last[index]
    return last


def _threads(ctx: Context, baselines: list[Transcript]) -> list[Transcript]:
    """All episodes at once, a thread and an environment for each."""
    results: list[Transcript | Crash] = [
        Transcript(one.task, one.split, one.seed, one.policy) for one in baselines
    ]

    def play(index: int, one: Transcript) -> None:
        try:
            with ctx.driver.session() as env:
                results[index] = ctx.driver.episode(env, one.policy, one.task, one.split, one.seed)
        except Crash as crash:
            results[index] = crash
        except Abandoned:
            return

    threads = [
        threading.Thread(target=play, args=(index, one), daemon=True) for index, one in enumerate(baselines)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done = []
    for result in results:
        if isinstance(result, Crash):
            raise Failed(f"beside other sessions, {result}", "let each session work in a thread of its own")
        done.append(result)
    return done
