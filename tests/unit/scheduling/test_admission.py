"""Fixed budget: never over capacity, never out of order, never stuck."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiderl.scheduling.admission import EngineLoad, FixedBudget, WaitingEpisode

episodes = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 7), st.integers(1, 400)),
    max_size=30,
    unique_by=lambda t: t[:2],
)


@given(episodes, st.integers(400, 2000), st.integers(1, 16), st.sampled_from([1, 16, 32]))
def test_runs_everything_in_order_within_the_budget(
    rows: list[tuple[int, int, int]], capacity: int, sessions: int, block: int
) -> None:
    capacity = -(-capacity // block) * block
    waiting = [WaitingEpisode(f"{g}.{m}", (g, m), n) for g, m, n in rows]
    size = {w.key: -(-w.reserve_tokens // block) * block for w in waiting}
    started: list[str] = []
    running: list[str] = []
    while waiting or running:
        load = EngineLoad(capacity, sum(size[k] for k in running), sessions, len(running), block)
        chosen = FixedBudget().admit(waiting, load)
        started += chosen
        running += chosen
        waiting = [w for w in waiting if w.key not in chosen]
        assert sum(size[k] for k in running) <= capacity
        assert len(running) <= sessions
        assert running, "nothing runs and nothing is admitted"
        running.pop(0)
    assert started == [f"{g}.{m}" for g, m, _ in sorted(rows)]


def test_a_decision_depends_on_its_inputs_only() -> None:
    waiting = [WaitingEpisode("b", (1, 0), 64), WaitingEpisode("a", (0, 0), 64)]
    load = EngineLoad(100, 0, 4, 0, 32)
    assert FixedBudget().admit(waiting, load) == FixedBudget().admit(waiting, load) == ("a",)
