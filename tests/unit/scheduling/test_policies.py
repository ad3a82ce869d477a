"""What every policy owes: legal plans, room that exists, progress, no starvation, no clock."""

from __future__ import annotations

import copy
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiderl.scheduling import POLICIES, make_policy
from tiderl.scheduling.decisions import Admit, Release, Resume
from tiderl.scheduling.views import Snapshot, State

from . import worlds

every_policy = pytest.mark.parametrize("name", list(POLICIES))
few = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
IDLE = (State.QUEUED, State.READY)


@every_policy
@few
@given(first=worlds.snapshots(), later=worlds.snapshots())
def test_plans_are_legal_and_never_promise_what_is_not_there(
    name: str, first: Snapshot, later: Snapshot
) -> None:
    policy = make_policy(name)
    plan = policy.decide(first, policy.start())
    worlds.applied(plan, first)
    worlds.applied(policy.decide(later, plan.memory), later)


@every_policy
@few
@given(snapshot=worlds.snapshots())
def test_resumes_come_before_new_work(name: str, snapshot: Snapshot) -> None:
    policy = make_policy(name)
    kinds = [type(d) for d in policy.decide(snapshot, policy.start()).decisions]
    if Admit in kinds:
        assert Resume not in kinds[kinds.index(Admit) :]


@every_policy
@few
@given(first=worlds.snapshots(), later=worlds.snapshots(), by=st.integers(-(1 << 10), 1 << 10))
def test_no_decision_depends_on_the_wall_clock(name: str, first: Snapshot, later: Snapshot, by: int) -> None:
    def plans(shift: float) -> list:
        policy = make_policy(name)
        plan = policy.decide(worlds.shifted(first, shift), policy.start())
        return [plan, policy.decide(worlds.shifted(later, shift), plan.memory)]

    for here, there in zip(plans(0.0), plans(float(by)), strict=True):
        assert here.decisions == there.decisions
        assert (here.wake is None) == (there.wake is None)
        if here.wake is not None:
            assert there.wake - by == pytest.approx(here.wake, abs=1e-6)


@every_policy
@few
@given(snapshot=worlds.snapshots())
def test_equal_input_equal_plan(name: str, snapshot: Snapshot) -> None:
    policy, other = make_policy(name), make_policy(name)
    memory = policy.decide(snapshot, policy.start()).memory
    kept = copy.deepcopy(memory)
    assert policy.decide(snapshot, memory) == other.decide(snapshot, kept)
    assert memory == kept, "a policy may not change its memory in place"


@every_policy
@few
@given(snapshot=worlds.snapshots(states=IDLE, accepting=True))
def test_what_can_run_runs_when_nothing_else_would_happen(name: str, snapshot: Snapshot) -> None:
    policy = make_policy(name)
    plan = policy.decide(snapshot, policy.start())
    able = [e for e in snapshot.engines if e.slots]

    def ever(task) -> bool:
        return any(e.blocks(task.peak) <= e.capacity for e in able)

    if any(ever(task) for task in snapshot.ready):
        assert any(isinstance(d, Resume) for d in plan.decisions)
    elif not snapshot.ready and snapshot.concurrency > 0:
        end = min(snapshot.allowed, snapshot.barrier) if name == "sync" else snapshot.allowed
        if any(ever(task) and task.order[0] < end for task in snapshot.queued):
            assert any(isinstance(d, Admit) for d in plan.decisions)


@every_policy
@few
@given(
    seed=st.integers(0, 1 << 30),
    engines=st.integers(1, 3),
    slots=st.integers(1, 6),
    concurrency=st.sampled_from([1, 3, 8, 1 << 62]),
    capacity=st.sampled_from([704, 1024, 4096]),
)
def test_every_task_ends(
    name: str, seed: int, engines: int, slots: int, concurrency: int, capacity: int
) -> None:
    world = worlds.World(
        make_policy(name), random.Random(seed), count=engines, slots=slots, concurrency=concurrency,
        capacity=capacity,
    )  # fmt: skip
    for _ in range(3000):
        if not world.tasks:
            break
        world.step()
    assert sorted(world.done) == sorted(world.turns), f"left: {world.tasks}"


@every_policy
def test_a_task_that_fits_nowhere_is_passed_by(name: str) -> None:
    world = worlds.World(make_policy(name), random.Random(1), groups=3)
    world.tasks["2.0"] = worlds.replace(world.tasks["2.0"], new=100_000)
    for _ in range(400):
        if len(world.tasks) == 1:
            break
        world.step()
    assert sorted(world.tasks) == ["2.0"]


def test_only_who_predicts_a_return_can_be_wrong_about_it() -> None:
    """`async` lets go of every context whenever its task pauses: what comes back was not mispredicted."""
    found = {}
    for name in ("async", "ctb"):
        world = worlds.World(make_policy(name), random.Random(3), groups=6)
        told = found[name] = []
        for _ in range(300):
            plan = world.step()
            told += [d.predicted for d in plan.decisions if isinstance(d, Release)]
    assert found["async"]
    assert set(found["async"]) == {None}
    assert found["ctb"]
    assert None not in found["ctb"]


def test_unknown_names_and_options_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no scheduling policy 'fifo'.*ctb.*mixed"):
        make_policy("fifo")
    with pytest.raises(ValueError, match=r"no option 'tau'.*update_mode.*concurrency"):
        make_policy("async", tau=1)
    with pytest.raises(ValueError, match="at least 1"):
        make_policy("async", concurrency=0)
    with pytest.raises(ValueError, match="keep, recompute or wait"):
        make_policy("ctb", update_mode="later")
    assert make_policy("ctb", update_mode="recompute").update_mode == "recompute"
    assert [make_policy(name).name for name in POLICIES] == list(POLICIES)
