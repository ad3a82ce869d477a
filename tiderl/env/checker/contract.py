"""Items about the contract of `AgentEnv`: tasks, tools, messages, images, ends, malformed calls.

Invariant: none of these items compares two runs; what needs two runs is in `determinism`.
"""

from __future__ import annotations

import json
import math
from itertools import combinations
from typing import Any

import numpy as np

from tiderl.env.checker.context import Context, Failed, Skipped, valid_id
from tiderl.env.checker.driver import Crash, brief, limit
from tiderl.env.checker.policies import malformed_actions, random_action
from tiderl.env.checker.transcript import canonical
from tiderl.env.ends import EndReason
from tiderl.env.tasks import LazyTasks


def start(ctx: Context) -> str:
    """Make the environment, read its description, reset it to its first task."""
    env = ctx.driver.make()
    try:
        with ctx.driver.guard("reading splits, limits and tools", 60.0):
            low, high = (float(bound) for bound in env.reward_range)
            ctx.max_turns = int(env.max_turns)
            ctx.max_images = int(getattr(env, "max_images", 64))
            ctx.step_timeout = limit(env, "step_timeout", 30.0)
            spec = getattr(env, "spec", None)
            ctx.oracle_maximum = bool(getattr(env, "oracle_maximum", True))
            ctx.nondeterministic = bool(getattr(spec, "nondeterministic", False))
            splits = list(env.splits)
            ctx.has_tasks = bool(getattr(env, "has_tasks", True))
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise Failed(
                f"reward_range is {env.reward_range!r}", "set reward_range to two finite floats, lowest first"
            )
        if ctx.max_turns < 1:
            raise Failed(f"max_turns is {ctx.max_turns}", "set max_turns to 1 or more")
        ctx.reward_range = (low, high)
        for split in splits:
            with ctx.driver.guard(f"tasks({split!r})", 60.0):
                ctx.splits[str(split)] = task_ids(env.tasks(split))
        with ctx.driver.guard("the tools property", 10.0):
            ctx.tools = list(env.tools)
        for split, task, seed in ctx.sample()[:1]:
            ctx.driver.reset(env, task, split, seed)
    finally:
        ctx.driver.close(env)
    count = sum(map(len, ctx.splits.values())) if ctx.has_tasks else "none"
    return f"made and reset; tasks: {count}, tools: {len(ctx.tools)}, turns: at most {ctx.max_turns}"


COMPARED = 5_000
"""About how many tasks of a split are compared with those of another."""


def task_ids(tasks: Any) -> list[Any]:
    """The ids of a task list; None where a task has none. Lazy lists are not expanded."""
    if isinstance(tasks, LazyTasks):
        return list(tasks.ids)
    return [task.get("id") if isinstance(task, dict) else None for task in tasks]


def tasks(ctx: Context) -> str:
    """Splits are not empty and do not overlap; ids are unique and are what `reset` takes."""
    if not ctx.splits:
        raise Failed(
            "no split is advertised", "let tasks('train') return the tasks, each a dict with an 'id'"
        )
    if not ctx.has_tasks:
        return "no task list: every seed is an episode of its own"
    for split, ids in ctx.splits.items():
        if not ids:
            raise Failed(
                f"split {split!r} is advertised and has no task", "fill it, or leave it out of `splits`"
            )
        for position, task in enumerate(ids):
            if not valid_id(task):
                raise Failed(
                    f"task {position} of split {split!r} has the id {task!r}, which is no str or int",
                    "make each task a dict with an 'id' that is a str or an int",
                )
        if len(set(ids)) != len(ids):
            twice = next(task for task in ids if ids.count(task) > 1)
            raise Failed(
                f"task id {twice!r} occurs twice in split {split!r}", "give each task an id of its own"
            )
    _disjoint(ctx)
    with ctx.driver.session() as env, ctx.driver.session() as other:
        for split, ids in ctx.splits.items():
            for one in (env, other):
                with ctx.driver.guard(f"tasks({split!r})", 60.0):
                    again = task_ids(one.tasks(split))
                if again != ids:
                    raise Failed(
                        f"tasks({split!r}) returned other ids when it was called again",
                        "let the task list depend on nothing but the split",
                    )
        for split, task, seed in ctx.sample():
            _, info = ctx.driver.reset(env, task, split, seed)
            if info.get("task") != task:
                raise Failed(
                    f"reset to task {task!r} of split {split!r} ran task {info.get('task')!r}",
                    "obey options['task'] in reset",
                )
    sizes = ", ".join(f"{split} {len(ids)}" for split, ids in ctx.splits.items())
    return f"{sizes}; ids unique, splits disjoint, reset obeys the id"


def _disjoint(ctx: Context) -> None:
    """No task, whatever its id, is in two splits: what counts is the rest of its content."""
    found: dict[str, dict[str, Any]] = {}
    with ctx.driver.session() as env:
        for split in ctx.splits:
            with ctx.driver.guard(f"the tasks of split {split!r}", 60.0):
                all_tasks = env.tasks(split)
                positions = range(0, len(all_tasks), max(1, len(all_tasks) // COMPARED))
                found[split] = {
                    content_of(all_tasks[position]): all_tasks[position] for position in positions
                }
    for (a, left), (b, right) in combinations(found.items(), 2):
        if common := left.keys() & right.keys():
            first = min(common)
            raise Failed(
                f"splits {a!r} and {b!r} share {len(common)} tasks, for instance task "
                f"{left[first]['id']!r} of {a!r} is task {right[first]['id']!r} of {b!r}",
                "divide the tasks so that no split holds another's",
            )


def content_of(task: Any) -> str:
    """A text that two tasks share when they are the same but for their id."""
    content = {key: value for key, value in task.items() if key != "id"}
    return repr(canonical(content or task["id"]))


def tools(ctx: Context) -> str:
    """Every tool has a name, a description and a typed schema that JSON can carry."""
    if not ctx.tools:
        return "the environment has no tools"
    for tool in ctx.tools:
        function = tool.get("function", {}) if isinstance(tool, dict) else {}
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise Failed(f"a tool has no name: {brief(tool)}", "declare tools with @tiderl.tool")
        if not function.get("description"):
            raise Failed(f"tool {name!r} has no description", "give the method a docstring")
        schema = function.get("parameters", {})
        for key, value in schema.get("properties", {}).items():
            if not any(word in value for word in ("type", "enum", "const", "anyOf", "oneOf", "$ref")):
                raise Failed(
                    f"parameter {key!r} of tool {name!r} has no type",
                    f"annotate it, for instance `{key}: int`",
                )
        try:
            json.dumps(tool)
        except (TypeError, ValueError) as error:
            raise Failed(
                f"the schema of {name!r} is no JSON: {error}", "use plain values as defaults"
            ) from error
    names = [tool["function"]["name"] for tool in ctx.tools]
    if len(set(names)) != len(names):
        raise Failed(f"two tools have the same name: {names}", "rename one")
    return f"{', '.join(names)}: typed and described"


def messages(ctx: Context) -> str:
    """Observations are tuples of valid messages."""
    count = sum(len(turn.messages) for episode in ctx.played() for turn in episode.turns)
    if ctx.bad_messages:
        raise Failed(ctx.bad_messages[0], "return a tuple of messages; tiderl.messages builds them")
    silent = [episode for episode in ctx.played() if not episode.turns[0].messages]
    if silent:
        raise Failed(
            f"reset returned no message, in {silent[0].label}", "let start() return the first message"
        )
    return f"{count} messages in {len(ctx.played())} episodes are valid"


def images(ctx: Context) -> str:
    """Images are uint8 arrays of height x width x 3, as many as allowed."""
    ctx.played()
    fix = "return images as NumPy arrays of dtype uint8 and shape (height, width, 3)"
    if ctx.bad_images:
        raise Failed(ctx.bad_images[0], fix)
    return f"{ctx.images_seen} images seen, all valid" if ctx.images_seen else "no images seen"


def first_step(ctx: Context) -> str:
    """No episode is truncated by its first step."""
    for episode in ctx.played():
        if (
            len(episode.turns) > 1
            and episode.turns[1].truncated
            and "invalid_action" not in episode.turns[1].info
        ):
            raise Failed(
                f"the first step ({episode.policy} policy) was truncated, in {episode.label}",
                "return terminated=True where the task is over; truncated is for limits reached later",
            )
    return "no first step was truncated"


def ends(ctx: Context) -> str:
    """Every episode ends within `max_turns`, with one reason that agrees with the flags."""
    fix = "leave ends to finish() and max_turns, or set info['end'] to an EndReason at the end"
    for episode in ctx.played():
        for number, turn in enumerate(episode.turns[1:], 1):
            where = f"at turn {number} of {episode.label} ({episode.policy} policy)"
            if type(turn.terminated) is not bool or type(turn.truncated) is not bool:
                raise Failed(
                    f"terminated is {turn.terminated!r} and truncated is {turn.truncated!r} {where}",
                    "return two plain bools",
                )
            end = turn.info.get("end") if isinstance(turn.info, dict) else None
            if not (turn.terminated or turn.truncated):
                if end is not None:
                    raise Failed(f"info['end'] is {end!r} and the episode goes on, {where}", fix)
                continue
            if turn.terminated and turn.truncated:
                raise Failed(f"terminated and truncated are both True {where}", fix)
            if end not in {reason.value for reason in EndReason}:
                raise Failed(f"the episode ended with info['end'] = {end!r} {where}", fix)
            if EndReason(end).terminal != turn.terminated:
                raise Failed(f"info['end'] is {end!r} with terminated={turn.terminated} {where}", fix)
        if not episode.ended:
            raise Failed(
                f"the episode went on after max_turns = {ctx.max_turns} ({episode.policy} policy), "
                f"in {episode.label}",
                "call super().step() or count the turns",
            )
    return f"{len(ctx.played())} episodes ended within {ctx.max_turns} turns, each with one reason"


def malformed(ctx: Context) -> str:
    """Broken calls are answered by an observation that says what is wrong."""
    sample = ctx.sample()
    if not sample:
        raise Skipped("not checked: there are no tasks")
    split, task, seed = sample[0]
    fix = "answer broken calls with a text and info['invalid_action']; @tiderl.tool does so by itself"
    cases = malformed_actions(ctx.tools)
    with ctx.driver.session() as env:
        for case in cases:
            ctx.driver.reset(env, task, split, seed)
            try:
                answer = ctx.driver.step(env, case.action, f"step with {case.label}")
            except Crash as crash:
                if ctx.knows(crash):
                    raise
                raise Failed(f"{crash}, in task {task!r}, seed {seed}", fix) from crash
            observation, _, terminated, truncated, info = answer
            if not (observation or terminated or truncated):
                raise Failed(f"{case.label} was answered by no message, in task {task!r}", fix)
            if ctx.tools and case.certain and "invalid_action" not in info:
                raise Failed(f"{case.label} was accepted, in task {task!r}", fix)
        if ctx.tools and ctx.max_turns > 1:
            _invalid_actions_end(ctx, env, split, task, seed)
    return f"{len(cases)} kinds of broken replies became observations"


def answers(ctx: Context) -> str:
    """Every tool call of a reply is answered once and in order, also after the end."""
    if not ctx.tools:
        raise Skipped("the environment has no tools")
    rng, seen = np.random.default_rng(5), 0
    with ctx.driver.session() as env:
        for split, task, seed in ctx.sample():
            ctx.driver.reset(env, task, split, seed)
            action = random_action(rng, ctx.tools, calls=3)
            wanted = [call["id"] for call in action["tool_calls"]]
            observation = ctx.driver.step(env, action, f"step with three calls, task {task!r} of {split!r}")[
                0
            ]
            got = [message.get("tool_call_id") for message in observation if message.get("role") == "tool"]
            if got != wanted:
                raise Failed(
                    f"three calls {wanted} were answered as {got}, in task {task!r} of {split!r}, "
                    f"seed {seed}",
                    "answer each call by one tool message with its id, in order; @tiderl.tool does so",
                )
            seen += len(got)
    return f"{seen} calls, three in a reply, were answered once and in order"


def _invalid_actions_end(ctx: Context, env: Any, split: str, task: Any, seed: int) -> None:
    """Broken calls without end must end the episode, by their own limit or by `max_turns`."""
    ctx.driver.reset(env, task, split, seed)
    action = malformed_actions(ctx.tools)[0].action
    for number in range(1, ctx.max_turns + 2):
        answer = ctx.driver.step(env, action, f"step {number} of broken calls only")
        if answer[2] or answer[3]:
            return
    raise Failed(
        f"{ctx.max_turns + 1} broken calls in a row did not end the episode",
        "call super().step(), which counts them against max_invalid_actions",
    )
