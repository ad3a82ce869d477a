"""The conductor on real engines: nothing is lost, nothing is promised twice, tokens stay exact."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from tiderl.engine.settings import EngineSettings
from tiderl.engine.stream import ResumableRequest
from tiderl.errors import EngineError
from tiderl.rollout.engines import Engines
from tiderl.scheduling import POLICIES

from .conftest import Weights, conducting, over, play, pure

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(settings: EngineSettings) -> AsyncIterator[Engines]:
    """One engine for all policies."""
    engines = Engines(settings)
    try:
        await engines.start()
        yield engines
    finally:
        await engines.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("policy", sorted(POLICIES))
async def test_every_policy_runs_more_tasks_than_fit(shared: Engines, policy: str) -> None:
    engines, weights = shared, Weights(shared.settings.model)
    async with over(engines, policy, concurrency=32) as conductor:
        async with asyncio.timeout(90):
            episodes = await asyncio.gather(
                *(play(conductor, f"{policy}-{i // 4}-{i % 4}", (i // 4, i % 4)) for i in range(48))
            )
        assert [len(e.turns) for e in episodes] == [4] * 48
        assert max(gap for e in episodes[::6] for gap in weights.gaps(e)) <= 1e-4
        assert len(conductor.table) == 0
        assert conductor.watch.drifts == 0
        audit = engines.first().audit()
        assert (audit.promised_tokens, audit.sessions) == (0, 0)


async def test_nothing_is_computed_twice_when_everything_fits(settings: EngineSettings) -> None:
    async with conducting(settings) as (conductor, _):
        episodes = await asyncio.gather(*(play(conductor, f"t{i}", (i, 0)) for i in range(8)))
    assert sum(out.reprefilled for e in episodes for _, out in e.turns) == 0


async def test_the_same_tokens_whatever_was_held_released_or_moved(settings: EngineSettings) -> None:
    """Same seeds, and a policy that lets everything go against one that holds all: equal ids."""
    found = []
    for policy, ranks in (("sync", 1), ("async", 1), ("ctb", 2)):
        async with conducting(settings, policy, ranks=ranks) as (conductor, _):
            found.append(
                await asyncio.gather(*(play(conductor, f"t{i}", (i, 0), wait=0.01) for i in range(16)))
            )
    for episodes in found[1:]:
        assert [e.ids for e in episodes] == [e.ids for e in found[0]]


async def test_an_engine_dies_and_its_tasks_go_on_elsewhere(settings: EngineSettings) -> None:
    weights = Weights(settings.model)
    async with conducting(settings, ranks=2) as (conductor, engines):
        work = [asyncio.create_task(play(conductor, f"t{i}", (i, 0), turns=6)) for i in range(24)]
        await asyncio.sleep(0.4)
        _kill(engines.first())
        episodes = await asyncio.wait_for(asyncio.gather(*work), 90)
        assert len(conductor.pool) == 1
    assert [len(e.turns) for e in episodes] == [6] * 24
    assert max(gap for e in episodes for gap in weights.gaps(e)) <= 1e-4


async def test_an_engine_dies_between_a_decision_and_its_turn(settings: EngineSettings) -> None:
    """Granted an engine that is out of the pool when the turn gets there: sent again, not lost."""
    async with conducting(settings, ranks=2) as (conductor, engines):
        granted, met = conductor.granted, []

        async def late(key: str) -> str:
            name = await granted(key)
            if not met and key in conductor._turns and name == "engine-0":
                met.append(key)
                _kill(engines.first())
                async with asyncio.timeout(30):
                    while name in conductor.pool:
                        await asyncio.sleep(0.01)
            return name

        conductor.granted = late  # type: ignore[method-assign]
        work = [asyncio.create_task(play(conductor, f"t{i}", (i, 0), turns=4)) for i in range(8)]
        episodes = await asyncio.wait_for(asyncio.gather(*work), 90)
    assert met
    assert [len(e.turns) for e in episodes] == [4] * 8


@pytest.mark.parametrize("fault", ["abort", "death"])
async def test_lockstep_goes_on_after_what_befalls_a_turn_on_its_way(
    settings: EngineSettings, fault: str
) -> None:
    """A task ends, or an engine dies, between the decision and the step that starts its turn."""
    async with conducting(settings, ranks=2, lockstep=True) as (conductor, engines):
        hold, met = engines.first().hold, []

        @asynccontextmanager
        async def eventful(turns: Callable[[], int]) -> AsyncIterator[None]:
            if len(met) != 2 or fault == "abort":
                async with hold(turns):
                    if len(met) == 2:
                        work[3].cancel()
                        await asyncio.sleep(0.01)
                    met.append(1)
                    yield
            else:
                met.append(1)
                _kill(engines.first())
                async with hold(turns):
                    yield

        engines.first().hold = eventful  # type: ignore[method-assign]
        work = [asyncio.create_task(play(conductor, f"t{i}", (i, 0), turns=5)) for i in range(8)]
        results = await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), 60)
        assert len(met) > 2
        assert len(conductor.table) == 0
    whole = [r for r in results if not isinstance(r, BaseException)]
    assert [len(e.turns) for e in whole] == [5] * (8 - (fault == "abort"))


async def test_the_last_engine_dies_and_everybody_is_told(settings: EngineSettings) -> None:
    async with conducting(settings) as (conductor, engines):
        work = [asyncio.create_task(play(conductor, f"t{i}", (i, 0), turns=50)) for i in range(12)]
        await asyncio.sleep(0.4)
        _kill(engines.first())
        results = await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), 30)
    assert all(isinstance(r, EngineError) and "killed" in str(r) for r in results)


async def test_a_dead_engine_is_replaced_and_runs_the_newest_weights(settings: EngineSettings) -> None:
    weights = Weights(settings.model)
    async with conducting(settings, respawn=1) as (conductor, engines):
        newest = weights.perturb()

        async def source() -> tuple[list, int]:
            return newest, 1

        engines.newest = source
        await conductor.publish(newest, 1)
        work = [asyncio.create_task(play(conductor, f"t{i}", (i, 0), turns=6)) for i in range(12)]
        await asyncio.sleep(0.3)
        _kill(engines.first())
        episodes = await asyncio.wait_for(asyncio.gather(*work), 120)
        assert conductor.pool.names == ("engine-1",)
    assert {v for e in episodes for _, out in e.turns for v in out.versions} == {1}
    assert max(gap for e in episodes for gap in weights.gaps(e)) <= 1e-4


async def test_engines_join_and_leave_while_rollouts_run(settings: EngineSettings) -> None:
    async with conducting(settings, ranks=2) as (conductor, _engines):
        work = [asyncio.create_task(play(conductor, f"t{i}", (i, 0), turns=12)) for i in range(32)]
        await asyncio.sleep(0.3)
        engine = await conductor.fleet.leave("engine-0")
        audit = engine.audit()
        assert (audit.sessions, audit.promised_tokens) == (0, 0)
        assert conductor.pool.names == ("engine-1",)
        before = engine.stats().decode_tokens
        await asyncio.sleep(0.3)
        assert engine.stats().decode_tokens == before
        await conductor.fleet.join("engine-0", engine)
        episodes = await asyncio.wait_for(asyncio.gather(*work), 90)
        assert engine.stats().decode_tokens > before
    assert [len(e.turns) for e in episodes] == [12] * 32


@pytest.mark.parametrize("mode", ["keep", "recompute", "wait"])
async def test_weights_change_in_flight(settings: EngineSettings, mode: str) -> None:
    """`keep` mixes KV of several versions and says so; under `recompute` no later turn reads old KV."""
    weights = Weights(settings.model)
    async with conducting(settings, update_mode=mode, concurrency=24) as (conductor, engines):
        work = [asyncio.create_task(play(conductor, f"t{i}", (i, 0), turns=8, wait=0.05)) for i in range(32)]
        for version in range(1, 6):
            await asyncio.sleep(0.3)
            await conductor.publish(weights.perturb(), version)
        episodes = await asyncio.wait_for(asyncio.gather(*work), 120)
        assert engines.first().version == 5
    turns = [(e, i, out) for e in episodes for i, (_, out) in enumerate(e.turns)]
    assert len({v for _, _, out in turns for v in out.versions}) > 2
    gaps = {e.key: weights.gaps(e) for e in episodes}
    assert max(gaps[e.key][i] for e, i, out in turns if pure(out)) <= 1e-4
    mixed = [(e, i) for e, i, out in turns if not pure(out)]
    if mode == "keep":
        assert mixed
        assert max(gaps[e.key][i] for e, i in mixed) > 1e-3  # the stamp says something
    if mode == "recompute":
        assert not [1 for e, i in mixed if len(set(e.turns[i][1].versions)) == 1 and i > 0] or all(
            out.kv_version >= 0 for _, _, out in turns
        )
    if mode == "wait":
        assert all(len(set(out.versions)) == 1 for _, _, out in turns)


async def test_cancelled_tasks_leave_nothing_behind(settings: EngineSettings) -> None:
    async with conducting(settings) as (conductor, engines):
        work = [asyncio.create_task(play(conductor, f"t{i}", (i, 0), turns=20)) for i in range(24)]
        await asyncio.sleep(0.5)
        for task in work[::2]:
            task.cancel()
        await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), 90)
        assert len(conductor.table) == 0
        audit = engines.first().audit()
        assert (audit.promised_tokens, audit.sessions) == (0, 0)


async def test_a_tasks_room_is_its_own_until_the_engine_has_it_back(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled again and again while a slow engine ends it: nobody is sent to room that is not there."""

    def slow(method: Callable[..., Any]) -> Callable[..., Any]:
        async def slowly(request: ResumableRequest) -> None:
            await asyncio.sleep(0.2)
            await method(request)

        return slowly

    for name in ("end", "abort"):
        monkeypatch.setattr(ResumableRequest, name, slow(getattr(ResumableRequest, name)))
    async with conducting(settings) as (conductor, engines):  # strict: a refused turn is an error
        work = {
            f"t{i}": asyncio.create_task(play(conductor, f"t{i}", (i, 0), turns=3, wait=0)) for i in range(40)
        }
        async with asyncio.timeout(90):
            while not all(task.done() for task in work.values()):
                for task in [work[t.key] for t in conductor.table.on("engine-0")][::2]:
                    task.cancel()
                await asyncio.sleep(0.02)
        failures = [t.exception() for t in work.values() if not t.cancelled() and t.exception()]
        assert not failures, failures[:3]
        assert any(t.cancelled() for t in work.values())
        assert engines.first().audit().promised_tokens == 0


async def test_an_evaluation_gets_the_engine_for_itself(settings: EngineSettings) -> None:
    from tiderl.engine.base import Sampling

    async with conducting(settings, concurrency=24) as (conductor, engines):
        work = [asyncio.create_task(play(conductor, f"t{i}", (i, 0), turns=8)) for i in range(24)]
        await asyncio.sleep(0.3)
        async with conductor.quiet():
            engine = engines.first()
            assert engine.audit().promised_tokens == 0
            async with asyncio.timeout(20), engine.session(512) as whole:
                await whole.generate([1, 2, 3], Sampling(4, ignore_eos=True))
        episodes = await asyncio.wait_for(asyncio.gather(*work), 90)
    assert [len(e.turns) for e in episodes] == [8] * 24


def _kill(engine: object) -> None:
    from tiderl.engine.counters import Cell

    os.killpg(engine._counters[Cell.PID], signal.SIGKILL)  # type: ignore[attr-defined]
