"""Sessions of the real engine on a tiny checkpoint: exactness, counters, limits, capacity, cancellation."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from tiderl.engine.base import Sampling
from tiderl.engine.vllm import VLLMEngine
from tiderl.errors import Busy, EngineError, PromptTooLong

from .conftest import Live, play, settle, tokens

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

THREE = [tokens(1, 300), tokens(2, 50), tokens(3, 33)]


async def test_three_turns_equal_full_prefill(live: Live) -> None:
    episode = await play(live.engine, THREE, temperature=0.0)
    assert live.gap(episode) <= 1e-4
    for start, output in episode.turns:
        whole = await play(live.engine, [episode.ids[:start]], temperature=0.0)
        assert whole.turns[0][1].ids == output.ids


async def test_sixteen_in_flight_match_transformers_before_and_after_an_update(live: Live) -> None:
    for update in (False, True):
        if update:
            await live.publish(11)
        await settle(live.engine)
        before = live.engine.stats()
        episodes = await asyncio.gather(
            *(
                play(
                    live.engine,
                    [tokens(k, 60 + 7 * k), tokens(k + 1, 9), tokens(k + 2, 21)],
                    seed=k,
                    think=0.01,
                )
                for k in range(16)
            )
        )
        after = live.engine.stats()
        assert max(live.gap(e) for e in episodes) <= 1e-4
        assert {v for e in episodes for _, o in e.turns for v in o.versions} == {live.engine.version}
        # The scheduler's counters against the truth.
        later = [(start, output) for e in episodes for start, output in e.turns[1:]]
        assert after.reprefilled_tokens == before.reprefilled_tokens
        assert after.preemptions == before.preemptions
        assert after.later_prompt_tokens - before.later_prompt_tokens == sum(start for start, _ in later)
        new = 16 * (9 + 21 + 2)  # observations, and each turn's last sampled token
        assert after.later_cached_tokens - before.later_cached_tokens == sum(s for s, _ in later) - new
        assert all(o.prompt_tokens - o.cached_tokens in (10, 22) for _, o in later)
        sampled = sum(len(o.ids) for e in episodes for _, o in e.turns)
        assert after.decode_tokens - before.decode_tokens == sampled - 3 * 16  # a prefill samples one token
        computed = sum(start - output.cached_tokens for e in episodes for start, output in e.turns)
        assert after.prefill_tokens - before.prefill_tokens == computed


async def test_equal_seeds_give_equal_turns(live: Live) -> None:
    one = await play(live.engine, THREE, seed=5)
    two = await play(live.engine, THREE, seed=5)
    other = await play(live.engine, THREE, seed=6)
    assert [o.ids for _, o in one.turns] == [o.ids for _, o in two.turns]
    assert [o.ids for _, o in one.turns] != [o.ids for _, o in other.turns]


async def test_a_turn_depends_on_its_context_and_its_seed_alone(live: Live) -> None:
    """vLLM alone keeps the first turn's generator, and dies of a seed when a prompt is cut into steps."""
    for first, observation in ((tokens(9, 40), tokens(8, 30)), (tokens(7, 700), tokens(6, 200))):
        await asyncio.gather(*(play(live.engine, [tokens(k, 300)], seed=k) for k in range(3)))
        kept = await play(live.engine, [first, observation], seed=4, reserve=1024)
        start, output = kept.turns[1]
        async with live.engine.session(1024) as session:
            fresh = await session.generate(kept.ids[:start], Sampling(8, seed=4001, ignore_eos=True))
        assert fresh.ids == output.ids
        assert live.gap(kept) <= 1e-4


async def test_a_prompt_that_is_too_long_is_refused_before_the_engine_sees_it(live: Live) -> None:
    engine = live.engine
    async with engine.session(200) as session:
        with pytest.raises(PromptTooLong, match="200"):
            await session.generate(tokens(1, 200), Sampling(4))
        await session.generate(tokens(1, 150), Sampling(4, ignore_eos=True))
        with pytest.raises(PromptTooLong):
            await session.generate(tokens(2, 46), Sampling(4))
        assert session.length == 154
        output = await session.generate(tokens(2, 40), Sampling(100, ignore_eos=True))  # cut, not refused
        assert len(output.ids) == 6
        assert output.finish == "length"
        with pytest.raises(PromptTooLong):
            await session.generate([], Sampling(1))
    async with engine.session(10**9) as session:  # cut to the model's limit
        assert session.limit == engine.max_model_len
        with pytest.raises(PromptTooLong):
            await session.generate(tokens(1, 1024), Sampling(4))
        output = await session.generate(tokens(1, 1000), Sampling(500, ignore_eos=True))
        assert len(output.ids) == 24
    assert live.gap(await play(engine, THREE)) <= 1e-4


async def test_oversubscription_by_three_completes(live: Live) -> None:
    engine = live.engine
    sessions = 3 * engine.capacity_tokens // 512
    episodes = await asyncio.wait_for(
        asyncio.gather(
            *(
                play(engine, [tokens(k, 400), tokens(k, 60)], max_tokens=20, seed=k, think=0.02)
                for k in range(sessions)
            )
        ),
        100,
    )
    assert all(len(o.ids) == 20 for e in episodes for _, o in e.turns)
    await settle(engine)
    stats = engine.stats()
    assert stats.free_tokens == engine.capacity_tokens
    assert stats.waiting == 0


async def test_a_session_waits_for_a_slot_and_for_blocks(live: Live) -> None:
    engine = live.engine
    async with asyncio.timeout(60):
        for reserve, count in ((32, engine.max_sessions), (1024, 6)):
            stack = [engine.session(reserve) for _ in range(count)]
            for session in stack:
                await session.__aenter__()
            waiting = asyncio.create_task(play(engine, [tokens(1, 20)], reserve=32))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            assert engine.stats().waiting == 1
            await stack[0].__aexit__(None, None, None)
            await waiting
            for session in stack[1:]:
                await session.__aexit__(None, None, None)


async def test_no_room_in_time_is_busy(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = live.engine
    monkeypatch.setattr(engine, "settings", dataclasses.replace(engine.settings, admission_timeout=0.1))
    stack = [engine.session(1024) for _ in range(6)]
    for session in stack:
        await session.__aenter__()
    with pytest.raises(Busy, match="blocks"):
        async with engine.session(64):
            pass
    for session in stack:
        await session.__aexit__(None, None, None)
    await settle(engine)


async def test_a_reservation_above_the_cache_is_refused_at_once(tmp_path: Path) -> None:
    from tiderl.engine.budget import KVBudget

    with pytest.raises(PromptTooLong, match="does not fit"):
        await KVBudget(4, 2, 32).acquire(200, timeout=1)


@pytest.mark.parametrize("after", [0.0, 0.02, 0.15])
async def test_a_cancelled_turn_frees_its_session(live: Live, after: float) -> None:
    engine = live.engine
    await settle(engine)
    tasks = [asyncio.create_task(play(engine, [tokens(k, 100)], max_tokens=380)) for k in range(8)]
    await asyncio.sleep(after)
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(r, asyncio.CancelledError) for r in results)
    await settle(engine)
    assert engine.stats().free_tokens == engine.capacity_tokens
    assert live.gap(await play(engine, THREE)) <= 1e-4


async def test_a_failed_session_is_never_fed_again(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = live.engine
    async with engine.session(512) as session:
        await session.generate(tokens(1, 20), Sampling(4, ignore_eos=True))
        task = asyncio.create_task(session.generate(tokens(1, 20), Sampling(400, ignore_eos=True)))
        await asyncio.sleep(0.02)
        with pytest.raises(EngineError, match="still running"):
            await session.generate([1], Sampling(1))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(EngineError, match="cannot be used"):
            await session.generate(tokens(1, 20), Sampling(4))
    monkeypatch.setattr(engine, "settings", dataclasses.replace(engine.settings, turn_timeout=0.2))
    async with engine.session(512) as session:
        async with engine.gate.paused():
            with pytest.raises(EngineError, match="did not end within"):
                await session.generate(tokens(1, 20), Sampling(4))
        with pytest.raises(EngineError, match="cannot be used"):
            await session.generate(tokens(1, 20), Sampling(4))
    await settle(engine)


async def test_an_error_in_the_users_block_frees_the_session(live: Live) -> None:
    with pytest.raises(ZeroDivisionError):
        async with live.engine.session(512) as session:
            await session.generate(tokens(1, 20), Sampling(4))
            raise ZeroDivisionError
    await settle(live.engine)
    assert live.engine.stats().free_tokens == live.engine.capacity_tokens


async def test_turns_end_at_stop_tokens_and_at_the_models_own_end(live: Live) -> None:
    end = 258  # <|im_end|>
    async with live.engine.session(512) as session:
        free = await session.generate(tokens(4, 30), Sampling(60, seed=3, ignore_eos=True))
    stop = free.ids[10]
    first = free.ids.index(stop)
    async with live.engine.session(512) as session:
        output = await session.generate(tokens(4, 30), Sampling(60, seed=3, stop_token_ids=(stop,)))
    assert output.ids == free.ids[: first + 1]
    assert output.finish == "stop"
    for seed in range(40):
        async with live.engine.session(512) as session:
            output = await session.generate(tokens(seed, 30), Sampling(400, seed=seed))
        assert (output.ids[-1] == end) == (output.finish == "stop")
        assert end not in output.ids[:-1]
        if output.finish == "stop":
            return
    pytest.fail("no turn sampled the end token")


@pytest.mark.parametrize(
    ("ids", "sampling", "text"),
    [
        ([], Sampling(4), "no prompt"),
        ([320], Sampling(4), "token ids"),
        ([-1, 3], Sampling(4), "token ids"),
        ([1], Sampling(0), "max_tokens"),
    ],
)
async def test_bad_turns_are_refused(live: Live, ids: list[int], sampling: Sampling, text: str) -> None:
    async with live.engine.session(64) as session:
        with pytest.raises(EngineError, match=text):
            await session.generate(ids, sampling)
        await session.generate([1, 2, 3], Sampling(2))
        with pytest.raises(EngineError, match="images"):
            await session.generate([1], Sampling(1), images=[None])  # type: ignore[list-item]


async def test_a_resubmitted_session_counts_what_is_computed_twice(live: Live) -> None:
    await settle(live.engine)
    chunk = tokens(77, 130)
    first = await play(live.engine, [chunk], name="again")
    before = live.engine.stats()
    second = await play(live.engine, [[*first.ids, 1, 2, 3]], name="again")
    after = live.engine.stats()
    known = len(first.ids) - 1  # the last sampled token never had KV
    cached = second.turns[0][1].cached_tokens
    assert cached == 128  # whole blocks of the prefix cache
    assert after.reprefilled_tokens - before.reprefilled_tokens == known - cached
    assert after.later_prompt_tokens - before.later_prompt_tokens == len(first.ids) + 3


async def test_the_effective_configuration_is_what_was_asked_for(live: Live) -> None:
    """C-20: a setting that was overwritten on the way is an error at start, not a surprise later."""
    from tiderl.engine.counters import Cell
    from tiderl.engine.figures import check_effective

    counters = live.engine._counters
    assert counters is not None
    assert counters[Cell.PREFIX_CACHING] == 1
    assert counters[Cell.BLOCKS] == 192
    old = counters[Cell.PREFIX_CACHING]
    counters[Cell.PREFIX_CACHING] = 0
    try:
        with pytest.raises(EngineError, match="prefix_caching 0"):
            check_effective(live.engine.settings, counters)
    finally:
        counters[Cell.PREFIX_CACHING] = old


async def test_a_closed_engine_refuses(tiny: Path) -> None:
    from tiderl.engine.settings import EngineSettings

    engine = VLLMEngine(EngineSettings(model=tiny))
    with pytest.raises(EngineError, match="not running"):
        async with engine.session(10):
            pass
    await engine.close()
    with pytest.raises(EngineError, match="closed|started"):
        await engine.start()
