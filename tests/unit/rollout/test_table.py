"""The task table: every way that leads somewhere, and that no other does."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.rollout.table import WAYS, IllegalMove, TaskTable
from tiderl.scheduling.views import KV, EngineView, State, Task

VIEW = EngineView("e", capacity=1024, slots=8, block=32)


def new(key: str = "a", member: int = 0) -> Task:
    return Task(key, (0, member), "env", State.QUEUED)


PATH: dict[State, list[tuple[State, dict[str, Any]]]] = {
    State.QUEUED: [],
    State.ADMITTED: [(State.ADMITTED, {})],
    State.READY: [(State.ADMITTED, {}), (State.READY, {"new": 40, "growth": 10})],
}
PATH[State.RUNNING] = [*PATH[State.READY], (State.RUNNING, {"kv": KV.HELD, "engine": "e"})]
PATH[State.PAUSED] = [*PATH[State.RUNNING], (State.PAUSED, {"context": 50, "new": 0, "growth": 0})]
PATH |= {end: [*PATH[State.PAUSED], (end, {})] for end in State if end.final}


def at(state: State) -> TaskTable:
    table = TaskTable()
    table.add(new())
    for to, changes in PATH[state]:
        table.move("a", to, 1.0, **changes)
    return table


@pytest.mark.parametrize(("before", "after"), list(itertools.product(State, State)))
def test_a_task_goes_only_where_a_way_leads(before: State, after: State) -> None:
    changes: dict[str, Any] = {"kv": KV.HELD, "engine": "e"} if after is State.RUNNING else {}
    table = at(before)
    if after in WAYS[before]:
        assert table.move("a", after, 2.0, **changes).state is after
        assert ("a" in table) is not after.final
        return
    with pytest.raises(IllegalMove):
        table.move("a", after, 2.0, **changes)
    assert ("a" in table) is not before.final
    if not before.final:
        assert table["a"].state is before


@pytest.mark.parametrize(
    ("state", "kv", "legal"),
    [
        (State.RUNNING, KV.CACHED, False),
        (State.PAUSED, KV.CACHED, True),
        (State.PAUSED, KV.COLD, True),
        (State.PAUSED, KV.NONE, False),
        (State.ADMITTED, KV.HELD, False),
    ],
)
def test_kv_fits_the_state(state: State, kv: KV, legal: bool) -> None:
    table = at(state)
    if legal:
        assert table.change("a", 2.0, kv=kv).kv is kv
    else:
        with pytest.raises(IllegalMove):
            table.change("a", 2.0, kv=kv, engine="e")


def test_cold_kv_never_becomes_cached_again() -> None:
    table = at(State.PAUSED)
    table.change("a", 2.0, kv=KV.COLD)
    with pytest.raises(IllegalMove):
        table.change("a", 3.0, kv=KV.CACHED)


def test_promises_are_whole_blocks_of_held_contexts_and_running_peaks() -> None:
    table = TaskTable()
    for member, state in enumerate((State.RUNNING, State.PAUSED)):
        table.add(new(f"t{member}", member))
        for to, changes in PATH[state]:
            table.move(f"t{member}", to, 1.0, **changes)
    assert table.promised(VIEW) == (64 + 64, 2, 1)  # 40 + 10 and 50, both in blocks of 32
    table.change("t1", 2.0, kv=KV.CACHED)
    assert table.promised(VIEW) == (64, 1, 1)


def test_listeners_hear_every_move_in_order() -> None:
    heard: list[tuple[str, str]] = []
    table = TaskTable(
        lambda before, after, when, cause: heard.append((str(before and before.state), after.state))
    )
    table.add(new())
    for to, changes in PATH[State.DONE]:
        table.move("a", to, 1.0, **changes)
    assert [after for _, after in heard] == ["queued", "admitted", "ready", "running", "paused", "done"]
    assert [before for before, _ in heard] == ["None", "queued", "admitted", "ready", "running", "paused"]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(list(State)), st.sampled_from(list(KV)))))
def test_whatever_is_tried_the_table_stays_whole(tries: list[tuple[int, State, KV]]) -> None:
    table = TaskTable()
    for number in range(4):
        table.add(new(f"t{number}", number))
    for number, state, kv in tries:
        key = f"t{number}"
        try:
            table.move(key, state, 0.0, kv=kv, engine="e", context=10)
        except IllegalMove:
            continue
    listed = [t for state in State for t in table.within(state)]
    assert sorted(t.key for t in listed) == sorted(t.key for t in table.tasks())
    for task in listed:
        assert not task.state.final
        assert (task.state is State.RUNNING) <= (task.kv is KV.HELD)
        assert (task.state in (State.QUEUED, State.ADMITTED)) <= (task.kv is KV.NONE)
