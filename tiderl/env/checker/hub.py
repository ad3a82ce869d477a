"""Items that run the environment in a worker process: the same bits as here, and ends that are ends.

Invariant: the hub is only known by name (`HUB`), as a plug-in is: this package lies below it.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiderl.env.checker.context import Context, Failed, Skipped
from tiderl.env.checker.determinism import runs
from tiderl.env.checker.driver import brief
from tiderl.env.checker.process import command_of
from tiderl.env.checker.transcript import Transcript, Turn, canonical, first_difference
from tiderl.errors import EnvironmentFault, StepTimeout, TideError
from tiderl.processes import is_running

HUB = "tiderl.hub.local:LocalHub"
HANG = "tiderl.env.checker.hang"
MARK = "TIDERL_CHECK_MARK"
GRACE = 5.0
"""Seconds that killed processes get to disappear."""


def remote(ctx: Context) -> str:
    """The same episodes in a worker process give the same bits; images are compared by sha256."""
    hub_class = _hub(ctx)
    if ctx.nondeterministic:
        raise Skipped("the environment declares itself nondeterministic")
    episodes = [episode for episode in runs(ctx).first if episode.turns]
    fix = (
        "keep messages and info to text, numbers, lists, dicts and uint8 images, and let nothing depend on "
        "the process (hash order, working folder, environment variables)"
    )
    there = _in_loop(ctx, "the same episodes in a worker process", _replay(ctx, hub_class, episodes), 60.0)
    for here, far in zip(episodes, there, strict=True):
        for turn in here.turns:
            turn.reward = float(turn.reward) if isinstance(turn.reward, int | float) else turn.reward
        difference = here.difference(far, info=False) or here.difference(far, info=True)
        if difference or (
            difference := first_difference(canonical(here.actions), canonical(far.actions), "oracle")
        ):
            raise Failed(f"the worker's episode differs from the local one: {difference}", fix)
    turns = sum(len(episode.turns) for episode in episodes)
    return f"{len(episodes)} episodes ({turns} observations) were the same bit by bit in a worker process"


def timeouts(ctx: Context) -> str:
    """A step that hangs is cut off at its time-out, with every process that the environment started."""
    hub_class = _hub(ctx)
    sample = ctx.sample()
    if not sample:
        raise Skipped("not checked: there are no tasks")
    mark = secrets.token_hex(8)
    seconds = _in_loop(
        ctx, "a hanging step in a worker process", _hang(ctx, hub_class, sample[0], mark), 60.0
    )
    deadline = time.monotonic() + GRACE
    while (left := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left:
        names = ", ".join(f"{pid} {command_of(pid)}" for pid in sorted(left))
        raise Failed(
            f"{len(left)} processes lived on after the worker was killed: {names}",
            "start processes as children, without daemonising them or clearing their environment variables",
        )
    return f"a hanging step was cut off after {seconds:.1f} s and no process of it was left"


def _hub(ctx: Context) -> Callable[..., Any]:
    if not ctx.registered:
        raise Skipped("only for environments that are registered by an importable module")
    module, _, name = HUB.partition(":")
    return getattr(importlib.import_module(module), name)


def _in_loop(ctx: Context, label: str, work: Any, seconds: float) -> Any:
    """Run a coroutine with a deadline, announced to the monitor with some more."""
    ctx.driver.monitor.begin(label, seconds + 15.0, own=False)
    try:
        return asyncio.run(asyncio.wait_for(work, seconds))
    except EnvironmentFault as error:
        raise Failed(
            f"{label}: the worker answered: {error}",
            "let the environment be importable and constructible in a process of its own",
        ) from error
    except (TideError, TimeoutError) as error:
        raise Failed(f"{label} failed: {type(error).__name__}: {error}", "see the text") from error
    finally:
        ctx.driver.monitor.end()


async def _replay(
    ctx: Context, hub_class: Callable[..., Any], episodes: list[Transcript]
) -> list[Transcript]:
    played = []
    async with hub_class(workers=1) as hub:
        for here in episodes:
            far = Transcript(here.task, here.split, here.seed, here.policy)
            async with hub.session(ctx.env_id, **ctx.kwargs) as session:
                messages, info = await session.reset(here.seed, here.task, here.split)
                far.turns.append(Turn(canonical(messages), 0.0, False, False, canonical(info)))
                for action in here.actions:
                    far.actions.append(await session.oracle() if here.policy == "oracle" else action)
                    messages, reward, terminated, truncated, info = await session.step(action)
                    far.turns.append(
                        Turn(canonical(messages), reward, terminated, truncated, canonical(info))
                    )
                    if terminated or truncated:
                        break
            played.append(far)
    return played


async def _hang(
    ctx: Context, hub_class: Callable[..., Any], sample: tuple[str, Any, int], mark: str
) -> float:
    """Hang in a step; returns the seconds until it was cut off."""
    split, task, seed = sample
    hang = importlib.import_module(HANG)
    action = next((e.actions[0] for e in ctx.episodes if e.actions and e.policy == ctx.best_policy()), "")
    async with hub_class(workers=1, environ={MARK: mark}) as hub:
        async with hub.session(hang.ENV_ID, target=ctx.env_id, entry=ctx.entry, **ctx.kwargs) as session:
            await session.reset(seed, task, split)
            began = time.monotonic()
            try:
                await session.step(action)
            except StepTimeout:
                return time.monotonic() - began
    raise Failed(f"a step that hangs was answered ({brief(action)})", "do not catch what ends a step")


def marked_processes(mark: str) -> set[int]:
    """Processes whose environment variables carry the mark; daemonised ones too."""
    found = set()
    needle = f"{MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if needle in entry.read_bytes().split(b"\0"):
                found.add(int(entry.parent.name))
        except OSError:
            continue  # it ended, or is another user's
    return {pid for pid in found if pid != os.getpid() and is_running(pid)}
