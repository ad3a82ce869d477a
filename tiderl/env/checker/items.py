"""The items in the order in which they are checked, and the loop that runs them.

Invariant: whatever one item meets, the next one still runs; what is reported last for a name counts.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable
from typing import Any, Protocol

from gymnasium.utils.env_checker import check_env

from tiderl.env.checker import contract, determinism, hub, process, rewards, sharing
from tiderl.env.checker.context import Context, Failed, Item, Skipped
from tiderl.env.checker.driver import Crash, Monitor, author_location
from tiderl.env.checker.report import CheckItem

_STEADY = ("seeds", "global_rng")


class Reporter(Monitor, Protocol):
    """Where items go as soon as they are known."""

    def phase(self, name: str) -> None:
        """The check of an item begins."""

    def report(self, item: CheckItem) -> None:
        """An item is done; a later one of the same name replaces it."""


def gymnasium(ctx: Context) -> str:
    """Gymnasium's own checker accepts the environment."""
    with ctx.driver.session() as env, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ctx.driver.monitor.begin("Gymnasium's checker", 12 * ctx.step_timeout, own=False)
        try:
            check_env(env, skip_render_check=True)
        except Exception as error:
            raise Failed(
                _gymnasium_detail(ctx, error), "see the text, and the other items that failed"
            ) from error
        finally:
            ctx.driver.monitor.end()
    return "gymnasium.utils.env_checker.check_env found nothing"


def _gymnasium_detail(ctx: Context, error: Exception) -> str:
    place = author_location(error)
    text = (
        f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no text'}"
    )
    if place and not isinstance(error, AssertionError):
        text += f" at {place}"
    known = [name for name, state in ctx.states.items() if state == "fail"]
    return text + (f" (probably the fault named by {', '.join(known)})" if known else "")


def exceptions(ctx: Context) -> str:
    """No valid action and no call of the environment raises."""
    ctx.record()
    return f"none in {len(ctx.episodes)} episodes and the runs of the other items"


ITEMS = (
    Item("start", contract.start),
    Item("tasks", contract.tasks, ("start",)),
    Item("tools", contract.tools, ("start",)),
    Item("messages", contract.messages, ("start",)),
    Item("images", contract.images, ("start",)),
    Item("seeds", determinism.seeds, ("start",)),
    Item("global_rng", determinism.global_rng, ("start",)),
    Item("info", determinism.info, ("start",)),
    Item("rewards", rewards.rewards, ("start",)),
    Item("oracle", rewards.oracle, ("start",)),
    Item("floor", rewards.floor, ("start",)),
    Item("first_step", contract.first_step, ("start",)),
    Item("ends", contract.ends, ("start",)),
    Item("answers", contract.answers, ("start", "messages")),
    Item("malformed", contract.malformed, ("start",)),
    Item("sharing", sharing.sharing, ("start", *_STEADY)),
    Item("sessions", determinism.sessions, ("start", *_STEADY)),
    Item("close", process.close, ("start",)),
    Item("gymnasium", gymnasium, ("start",)),
    Item("remote", hub.remote, ("start", "info", *_STEADY)),
    Item("timeouts", hub.timeouts, ("start",)),
    Item("exceptions", exceptions, ("start",)),
)


def run_items(ctx: Context, reporter: Reporter, items: Iterable[Item] = ITEMS) -> None:
    """Run the items one after the other and report each; then report faults that came to light later."""
    done: dict[str, CheckItem] = {}
    for item in items:
        began = time.monotonic()
        reporter.phase(item.name)
        result = _run(ctx, item)
        result = CheckItem(result.name, result.state, result.detail, result.fix, time.monotonic() - began)
        done[item.name] = result
        ctx.states[item.name] = result.state
        reporter.report(result)
    for name, item_done in done.items():
        if item_done.ok and (fault := _charged(ctx, name)) is not None:
            reporter.report(CheckItem(name, "fail", fault.detail, fault.fix, item_done.seconds))


def _run(ctx: Context, item: Item) -> CheckItem:
    broken = [name for name in item.needs if ctx.states.get(name) == "fail"]
    if "start" in item.needs and ctx.states["start"] == "skip":
        broken = list(ctx.faults)
    if broken:
        return _charged(ctx, item.name) or CheckItem(
            item.name, "skip", f"not checked: see {', '.join(broken)}"
        )
    try:
        detail = item.run(ctx)
        return _charged(ctx, item.name) or CheckItem(item.name, "pass", detail)
    except Failed as failed:
        return CheckItem(item.name, "fail", failed.detail, failed.fix)
    except Skipped as skipped:
        return _charged(ctx, item.name) or CheckItem(item.name, "skip", str(skipped))
    except Crash as crash:
        name = ctx.blame(crash)
        return _charged(ctx, item.name) or CheckItem(item.name, "skip", f"not checked: see {name}")


def _charged(ctx: Context, name: str) -> CheckItem | None:
    """The first fault that was charged to an item, as a failure of it."""
    found: list[Any] = ctx.faults.get(name, [])
    if not found:
        return None
    detail, fix = found[0]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return CheckItem(name, "fail", detail + more, fix)
