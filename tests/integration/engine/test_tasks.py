"""Task sessions: KV leased turn by turn, let go, found again, computed again, moved: equal tokens always."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from tiderl.engine.base import Sampling, TurnOutput
from tiderl.engine.settings import EngineSettings
from tiderl.engine.vllm import VLLMEngine
from tiderl.errors import Busy, EngineError, PromptTooLong

from .conftest import Episode, Live, load_reference, settle, tokens

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]


def sampling(seed: int, count: int = 12) -> Sampling:
    return Sampling(count, seed=seed, ignore_eos=True)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def two(tiny: Path) -> AsyncIterator[tuple[Live, Live]]:
    """Two engines with the same weights in one process; each has room for four long contexts."""
    settings = EngineSettings(model=tiny, kv_tokens=2048, max_sessions=8, max_model_len=512)
    reference = load_reference(tiny)
    async with VLLMEngine(settings) as one, VLLMEngine(settings) as other:
        yield Live(one, reference, tiny), Live(other, reference, tiny)


@pytest_asyncio.fixture(loop_scope="session")
async def pair(two: tuple[Live, Live]) -> AsyncIterator[tuple[VLLMEngine, VLLMEngine]]:
    """The same, empty before and after."""
    engines = two[0].engine, two[1].engine
    yield engines
    for engine in engines:
        await settle(engine)
        audit = engine.audit()
        assert audit.consistent
        assert (audit.promised_tokens, audit.used_tokens, audit.sessions) == (0, 0, 0)


RNG = random.Random(3)
CHUNKS = [tokens(11, 90), tokens(12, 40), tokens(13, 1), tokens(14, 70)]


async def flush(engine: VLLMEngine) -> None:
    """Evict all that is not in use: take every free block at once."""
    async with AsyncExitStack() as stack:
        for _ in range((engine.capacity_tokens - engine.promised_tokens) // 512):
            session = await stack.enter_async_context(engine.session(512))
            await session.generate([RNG.randrange(250) for _ in range(511)], sampling(1, 1))


async def run(how: str, one: VLLMEngine, other: VLLMEngine) -> list[TurnOutput]:
    """All of CHUNKS, and between any two turns what `how` says."""
    outputs = []
    async with AsyncExitStack() as stack:
        engine = one
        session = await stack.enter_async_context(engine.task_session(session_id=how))
        for turn, chunk in enumerate(CHUNKS):
            outputs.append(await session.generate(chunk, sampling(turn)))
            assert session.held
            assert session.promised_tokens == -(-session.length // 32) * 32 == engine.promised_tokens
            if how == "held":
                continue
            await session.release(fresh=how == "fresh")
            assert not session.held
            assert session.promised_tokens == engine.promised_tokens == 0
            assert engine.open_slots == engine.max_sessions
            if how == "evicted":
                await flush(engine)
            if how == "moved":
                replay = session.snapshot()
                assert replay.turns == turn + 1
                assert len(replay.ids) == session.length == replay.length
                await stack.aclose()
                engine = other if engine is one else one
                session = await stack.enter_async_context(engine.task_session(session_id=how, replay=replay))
    return outputs


def figures(engine: VLLMEngine) -> tuple[int, int, int]:
    stats = engine.stats()
    return stats.later_prompt_tokens, stats.later_cached_tokens, stats.reprefilled_tokens


@pytest.mark.parametrize("how", ["cached", "fresh", "evicted", "moved"])
async def test_a_turn_is_the_same_however_its_context_got_there(
    two: tuple[Live, Live], pair: tuple[VLLMEngine, VLLMEngine], how: str
) -> None:
    one, other = pair
    await flush(one)
    held = await run("held", one, other)
    for engine in pair:
        await flush(engine)
    before = [figures(engine) for engine in pair]
    outputs = await run(how, one, other)
    after = [figures(engine) for engine in pair]

    episode = Episode()
    known = 0
    for chunk, mine, theirs in zip(CHUNKS, outputs, held, strict=True):
        assert mine.ids == theirs.ids
        assert max(abs(a - b) for a, b in zip(mine.logprobs, theirs.logprobs, strict=True)) <= 1e-4
        assert mine.prompt_tokens == theirs.prompt_tokens
        assert mine.new_tokens == theirs.new_tokens == mine.prompt_tokens - known
        assert mine.kv_version == 0
        assert mine.reprefilled == mine.prompt_tokens - mine.cached_tokens - mine.new_tokens
        known = mine.prompt_tokens + len(mine.ids) - 1
        episode.ids += chunk
        episode.turns.append((len(episode.ids), mine))
        episode.ids += mine.ids
    assert two[0].gap(episode) <= 1e-4

    # Held: nothing twice. Let go: whole blocks are found again. Evicted: nothing is left. Moved: nothing at
    # the first visit, and at the second what was left at the one before it.
    knowns = [0, *(o.prompt_tokens + len(o.ids) - 1 for o in outputs[:-1])]
    whole = [k // 32 * 32 for k in knowns]
    assert [o.cached_tokens for o in held] == knowns
    expected = {
        "cached": whole,
        "fresh": whole,  # the weights have not changed
        "evicted": [0, 0, 0, 0],
        "moved": [0, 0, whole[1], whole[2]],
    }[how]
    assert [o.cached_tokens for o in outputs] == expected

    # The engine's own counters say the same, on whichever engine the turns were.
    sums = [sum(b[i] - a[i] for a, b in zip(before, after, strict=True)) for i in range(3)]
    assert sums == [
        sum(o.prompt_tokens for o in outputs[1:]),
        sum(o.cached_tokens for o in outputs[1:]),
        sum(o.reprefilled for o in outputs),
    ]
    assert (one.stats().evicted_tokens > 0) == (how == "evicted" or one.stats().evicted_tokens > 0)
    if how == "moved":
        assert [b[0] - a[0] for a, b in zip(before, after, strict=True)] == [
            outputs[2].prompt_tokens,
            outputs[1].prompt_tokens + outputs[3].prompt_tokens,
        ]


async def test_what_is_evicted_from_its_end_is_computed_again(pair: tuple[VLLMEngine, VLLMEngine]) -> None:
    engine = pair[0]
    await flush(engine)
    evicted = engine.stats().evicted_tokens
    async with engine.task_session(session_id="part") as session:
        await session.generate(tokens(21, 300), sampling(1))
        await session.release()
        async with AsyncExitStack() as stack:
            for number, length in enumerate((500, 500, 500, 300)):  # 58 of 64 blocks
                other = await stack.enter_async_context(engine.task_session(session_id=f"o{number}"))
                await other.generate(tokens(30 + number, length), sampling(number, 4))
        again = await session.generate([1, 2, 3], sampling(2))
        assert 0 < again.cached_tokens < 288
        assert again.cached_tokens % 32 == 0
        assert again.reprefilled == 311 - again.cached_tokens
        assert engine.stats().evicted_tokens > evicted
        assert engine.stats().preemptions == 0


async def test_no_room_is_busy_at_once_and_changes_nothing(pair: tuple[VLLMEngine, VLLMEngine]) -> None:
    engine = pair[0]
    async with AsyncExitStack() as stack:
        sessions = [
            await stack.enter_async_context(engine.task_session(session_id=f"b{n}")) for n in range(6)
        ]
        for number, length in enumerate((120, 310, 470, 470, 470)):
            await sessions[number].generate(tokens(number, length), sampling(number, 10))
        assert engine.promised_tokens == 32 * (5 + 10 + 3 * 15)
        promised = engine.audit()
        small, late = sessions[0], sessions[5]
        for session, turn in ((late, sampling(9, 200)), (small, sampling(9, 200))):
            kept = session.snapshot()
            for _ in range(3):
                began = time.monotonic()
                with pytest.raises(Busy, match="60 of 64 blocks and 5 of 8 slots"):
                    await session.generate(tokens(3, 1 if session is small else 300), turn)
                assert time.monotonic() - began < 0.5
                assert session.snapshot() == kept
                assert engine.audit() == promised
        await sessions[3].release()
        first = await late.generate(tokens(3, 300), sampling(9, 200))
        assert len(first.ids) == 200
        assert len((await small.generate([1], sampling(9, 16))).ids) == 16
        with pytest.raises(PromptTooLong):
            await late.generate(tokens(3, 12), sampling(9))
        # Slots run out, too.
        await late.release()
        others = [await stack.enter_async_context(engine.task_session(session_id=f"s{n}")) for n in range(4)]
        for session in others:
            await session.generate([1], sampling(0, 1))
        assert engine.open_slots == 0
        with pytest.raises(Busy, match="8 of 8 slots"):
            await late.generate([], sampling(1))
        await others[0].release()
        await late.generate([], sampling(1, 2))


@pytest.mark.parametrize("after", [0.0, 0.01, 0.05, 0.2])
@pytest.mark.parametrize("held", [True, False])
async def test_a_cancelled_turn_leaves_the_session_as_it_was(
    two: tuple[Live, Live], pair: tuple[VLLMEngine, VLLMEngine], after: float, held: bool
) -> None:
    engine = pair[0]
    episode = Episode()
    async with engine.task_session(session_id="again") as session:
        first = await session.generate(tokens(51, 60), sampling(1))
        if not held:
            await session.release()
        kept = session.snapshot()
        task = asyncio.create_task(session.generate(tokens(52, 20), sampling(2, 400)))
        await asyncio.sleep(after)
        with pytest.raises(EngineError, match="still running"):
            await session.generate([1], sampling(1))
        with pytest.raises(EngineError, match="still running"):
            await session.release()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not session.held
        assert engine.promised_tokens == 0
        assert session.snapshot() == kept
        second = await session.generate(tokens(53, 20), sampling(3))
        assert second.new_tokens == 21
        assert second.kv_version == 0
    episode.ids = [*tokens(51, 60), *first.ids, *tokens(53, 20), *second.ids]
    episode.turns = [(60, first), (60 + 12 + 20, second)]
    assert two[0].gap(episode) <= 1e-4


async def test_a_turn_that_takes_too_long_fails_and_can_be_sent_again(
    pair: tuple[VLLMEngine, VLLMEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = pair[0]
    async with engine.task_session(session_id="late") as session:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "settings", dataclasses.replace(engine.settings, turn_timeout=0.2))
            async with engine.gate.paused():
                with pytest.raises(EngineError, match="did not end within"):
                    await session.generate(tokens(1, 20), sampling(1))
        assert (session.length, session.held, engine.promised_tokens) == (0, False, 0)
        await session.generate(tokens(1, 20), sampling(1))


async def test_what_a_session_refuses(pair: tuple[VLLMEngine, VLLMEngine]) -> None:
    engine = pair[0]
    with pytest.raises(EngineError, match="~"):
        async with engine.task_session(session_id="a~b"):
            pass
    async with engine.task_session(session_id="x") as session:
        await session.release(fresh=True)  # nothing to let go
        for ids, turn, text in (
            ([], Sampling(4), "no prompt"),
            ([320], Sampling(4), "token ids"),
            ([1], Sampling(0), "max_tokens"),
        ):
            with pytest.raises(EngineError, match=text):
                await session.generate(ids, turn)
        with pytest.raises(EngineError, match="images"):
            await session.generate([1], Sampling(1), images=[None])  # type: ignore[list-item]
        with pytest.raises(PromptTooLong):
            await session.generate(tokens(1, 512), Sampling(1))
        cut = await session.generate(tokens(1, 500), sampling(1, 100))
        assert (len(cut.ids), cut.finish) == (12, "length")
        await session.release()
        await session.release()
    with pytest.raises(EngineError, match="closed"):
        await session.generate([1], Sampling(1))


async def test_a_session_closed_in_the_middle_of_a_turn_frees_everything(
    pair: tuple[VLLMEngine, VLLMEngine],
) -> None:
    engine = pair[0]
    for delay in (0.0, 0.01, 0.1):
        async with engine.task_session(session_id="shut") as session:
            await session.generate(tokens(1, 20), sampling(1, 2))
            task = asyncio.create_task(session.generate(tokens(2, 20), sampling(1, 400)))
            await asyncio.sleep(delay)
        assert engine.promised_tokens == 0
        with pytest.raises(EngineError):
            await asyncio.wait_for(task, 5)
        assert engine.promised_tokens == 0
        await settle(engine)


async def test_queue_and_prefill_seconds(pair: tuple[VLLMEngine, VLLMEngine]) -> None:
    engine = pair[0]
    await flush(engine)
    async with engine.task_session(session_id="t") as session:
        async with engine.gate.paused():
            turn = asyncio.create_task(session.generate(tokens(61, 480), sampling(1, 2)))
            await asyncio.sleep(0.3)
        first = await turn
        assert 0.25 < first.queue_seconds < 5
        assert first.prefill_seconds > 0
        began = time.monotonic()
        second = await session.generate([1], sampling(1, 25))
        wall = time.monotonic() - began
        assert 0 < second.queue_seconds + second.prefill_seconds < wall
        assert second.prefill_seconds < first.prefill_seconds


async def test_the_engine_says_what_a_step_costs(pair: tuple[VLLMEngine, VLLMEngine]) -> None:
    engine = pair[0]
    for number in range(12):  # each: a long prompt, a short one, and steps with none
        async with engine.task_session(session_id=f"cost{number}") as session:
            await session.generate(tokens(900 + number, 40 * (1 + number % 6)), sampling(1, 6))
            await session.generate([1, 2, 3], sampling(1, 6))
    cost = engine.stats().cost
    assert cost.step > 0
    assert 0 < cost.step + cost.decode < 1
    assert 0 <= engine.prefill_s == cost.prefill < 0.1


async def test_sessions_with_a_reservation_share_the_budget(pair: tuple[VLLMEngine, VLLMEngine]) -> None:
    """An evaluation waits for room, gets what tasks give back, and no task takes it before."""
    engine = pair[0]
    async with AsyncExitStack() as stack:
        tasks = [await stack.enter_async_context(engine.task_session(session_id=f"e{n}")) for n in range(4)]
        for number, task in enumerate(tasks):
            await task.generate(tokens(number, 470), sampling(number, 10))

        async def evaluate() -> TurnOutput:
            async with engine.session(512) as session:
                return await session.generate(tokens(9, 300), sampling(9, 100))

        waiting = asyncio.create_task(evaluate())
        await asyncio.sleep(0.05)
        assert engine.stats().waiting == 1
        late = await stack.enter_async_context(engine.task_session(session_id="late"))
        with pytest.raises(Busy):
            await late.generate([1, 2], sampling(1, 2))
        await tasks[1].generate([1], sampling(1, 3))  # who holds room may go on
        await tasks[0].release()
        await tasks[1].release()
        assert len((await asyncio.wait_for(waiting, 20)).ids) == 100
        await tasks[0].generate([1], sampling(1, 3))
