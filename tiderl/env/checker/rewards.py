"""Items about rewards: their type, their range, and who reaches the maximum.

Invariant: the maximum is the upper end of the declared `reward_range`, for the episode's return.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

from tiderl.env.checker.context import Context, Failed, Skipped
from tiderl.env.checker.transcript import Transcript

TOLERANCE = 1e-9
CHANCE_TASKS = 64
"""Tasks of each split that are played where chance has a part in the reward."""


def reward_problem(reward: Any) -> str | None:
    """Why a reward is not a finite Python float, or None."""
    if type(reward) is not float:
        kind = (
            "numpy." + type(reward).__name__ if type(reward).__module__ == "numpy" else type(reward).__name__
        )
        return f"reward is {reward!r} of type {kind}, not a float"
    if not math.isfinite(reward):
        return f"reward is {reward!r}, which is not finite"
    return None


def rewards(ctx: Context) -> str:
    """Every reward is a finite float, and every return lies within `reward_range`."""
    low, high = ctx.reward_range
    for label, value in ctx.driver.given_rewards:
        if not isinstance(value, int | float) or isinstance(value, bool) or type(value).__module__ == "numpy":
            raise Failed(
                f"{reward_problem(value)}, in {label}", "give a plain Python number, for instance float(x)"
            )
    for episode in ctx.played():
        for number, turn in enumerate(episode.turns[1:], 1):
            if problem := reward_problem(turn.reward):
                raise Failed(
                    f"{problem}, at turn {number} of {episode.label} ({episode.policy} policy)",
                    "return a finite float, for instance float(x), also where nothing was earned (0.0)",
                )
        if not low - TOLERANCE <= episode.total <= high + TOLERANCE:
            raise Failed(
                f"the return {episode.total:g} of {episode.label} ({episode.policy} policy) is outside "
                f"reward_range ({low:g}, {high:g})",
                "set reward_range to the lowest and highest return that an episode can have",
            )
    totals = [episode.total for episode in ctx.played()]
    return f"returns from {min(totals):g} to {max(totals):g}, range {low:g} to {high:g}"


def oracle(ctx: Context) -> str:
    """The oracle reaches the maximum on every sampled task."""
    _, high = ctx.reward_range
    played = ctx.played("oracle")
    if not ctx.oracle_maximum:
        return _better_than_random(ctx)
    for episode in played:
        if not _reaches(episode, high):
            last = episode.turns[-1].info
            end = last.get("end") if isinstance(last, dict) else None
            raise Failed(
                f"the oracle earned {episode.total:g} of {high:g} in {len(episode.turns) - 1} turns "
                f"(end: {end or 'none'}), in {episode.label}",
                "mend oracle() or the task, or set the upper end of reward_range to what can be earned",
            )
        if episode.turns[-1].info.get("success") is False:
            raise Failed(
                f"the oracle reached {high:g} and info['success'] is False, in {episode.label}",
                "let info['success'] be True where the maximum is reached",
            )
    return f"{len(played)} tasks solved, return {high:g} each"


def _better_than_random(ctx: Context) -> str:
    """Where chance can keep the oracle from the maximum, it must at least beat a random player."""
    means = {}
    for policy in ("oracle", "random"):
        totals = []
        for split, task, seed in ctx.sample(CHANCE_TASKS):
            with ctx.driver.session() as env:
                totals.append(ctx.driver.episode(env, policy, task, split, seed).total)
        means[policy] = fmean(totals)
    seen = f"mean return {means['oracle']:g}, random {means['random']:g}, on {len(totals)} tasks"
    if not means["oracle"] > means["random"]:
        raise Failed(
            f"the oracle is no better than chance: {seen}", "mend oracle(): it must be the better player"
        )
    return f"{seen} (chance may prevent the maximum: oracle_maximum is False)"


def floor(ctx: Context) -> str:
    """A player that does nothing, and one that acts at random, stay below the maximum."""
    _, high = ctx.reward_range
    idle, blind = ctx.played("noop"), ctx.played("random")
    for episode in idle:
        if _reaches(episode, high):
            raise Failed(
                f"an empty reply earns the maximum {high:g}, in {episode.label}",
                "pay only for what the agent did; a task must not be solved at its start",
            )
    if all(_reaches(episode, high) for episode in blind):
        raise Failed(
            f"random actions earn the maximum {high:g} on all {len(blind)} sampled tasks",
            "make the reward depend on the right action",
        )
    means = fmean(episode.total for episode in idle), fmean(episode.total for episode in blind)
    return f"mean return: nothing done {means[0]:g}, random {means[1]:g}, maximum {high:g}"


def _reaches(episode: Transcript, high: float) -> bool:
    total = episode.total
    if math.isnan(total):
        raise Skipped("not checked: a reward is no number, see rewards")
    return total >= high - TOLERANCE
