"""What the policies are for, on simulated engines: seeded facts that hold with a margin.

The numbers of a real engine are in docs; these say that the order of things is right, and would tell at once
if a change made a policy lose what it is good at.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from tiderl.scheduling import make_policy

from . import simulation

GRID = simulation.grid()
SHORT = {"warm": 15.0, "seconds": 45.0}


@cache
def result(name: str, workload: str, **changes):
    return simulation.simulate(make_policy(name), replace(GRID[workload], **SHORT, **changes))


@pytest.mark.parametrize("wait", ["short wait", "long wait"])
@pytest.mark.parametrize("context", ["short context", "long context"])
def test_at_three_times_too_many_tasks_ctb_beats_async(wait: str, context: str) -> None:
    workload = f"{wait}, {context}, 3.0x"
    ctb, plain = result("ctb", workload), result("async", workload)
    assert ctb.tokens >= 1.33 * plain.tokens
    assert ctb.hit_rate >= 1.58 * plain.hit_rate


@pytest.mark.parametrize("rival", ["aimd", "ttl", "smallest_first", "sorted", "mlfq", "sync"])
@pytest.mark.parametrize("wait", ["short wait", "long wait"])
def test_at_three_times_too_many_tasks_no_other_is_better(wait: str, rival: str) -> None:
    workload = f"{wait}, long context, 3.0x"
    assert result("ctb", workload).tokens >= 0.98 * result(rival, workload).tokens


@pytest.mark.parametrize("wait", ["short wait", "long wait"])
def test_nothing_is_computed_twice_when_everything_fits(wait: str) -> None:
    workload = f"{wait}, long context, 0.5x"
    ctb = result("ctb", workload)
    assert ctb.hit_rate >= 0.98
    assert ctb.tokens >= 0.98 * max(result(name, workload).tokens for name in ("async", "ttl", "mlfq"))


def test_a_barrier_leaves_the_engine_idle() -> None:
    workload = "long wait, long context, 3.0x"
    assert result("sync", workload).busy < 0.6
    assert result("ctb", workload).busy > 0.9
    assert result("ctb", workload).tokens > 3 * result("sync", workload).tokens


def test_long_waits_do_not_pin_kv_while_others_could_use_it() -> None:
    """Waits of half a minute: holding on fills the KV with sleepers, letting go of them does not."""
    load = replace(
        GRID["long wait, long context, 3.0x"], wait=("lognormal", 5.0, 1.5), warm=30.0, seconds=60.0
    )
    ctb = simulation.simulate(make_policy("ctb"), load)
    holds = simulation.simulate(make_policy("smallest_first"), load)
    assert ctb.tokens > 1.2 * holds.tokens


def test_two_engines_are_both_used() -> None:
    workload = "short wait, long context, 3.0x"
    one, two = result("ctb", workload), result("ctb", workload, engines=2)
    assert two.tokens > 1.8 * one.tokens
    assert two.hit_rate > 0.98, "tasks move about"


def test_mixed_keeps_the_mix() -> None:
    """Two kinds in turn in the stream, 3 to 1 wanted: what is shipped follows the wish, not the stream."""
    load = replace(GRID["short wait, short context, 1.0x"], kinds=("web", "code"), **SHORT)

    class Wish(simulation.Simulation):
        def snapshot(self):
            return replace(super().snapshot(), target_mix={"web": 0.75, "code": 0.25})

    load = replace(load, ahead=400)
    mixed, plain = Wish(make_policy("mixed"), load).run(), Wish(make_policy("async"), load).run()
    share = mixed.shipped["web"] / sum(mixed.shipped.values())
    assert share == pytest.approx(0.75, abs=0.05)
    assert plain.shipped["web"] / sum(plain.shipped.values()) == pytest.approx(0.5, abs=0.05)


def test_what_ctb_finishes_is_as_long_as_what_the_stream_holds() -> None:
    """No bias towards short tasks: the length-bias alarm of training would show it."""
    load = GRID["short wait, long context, 3.0x"]
    stream = [simulation.script(load, group, member) for group in range(60) for member in range(load.group)]
    lengths = [plot.prompt + sum(plot.replies) + sum(plot.observations[1:]) for plot in stream]
    mean = sum(lengths) / len(lengths)
    assert result("ctb", "short wait, long context, 3.0x").lengths == pytest.approx(mean, rel=0.05)
