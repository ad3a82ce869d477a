"""Which weights made which KV: no new session reads older KV, and what is mixed says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tiderl.engine.base import Replay, Sampling, TurnOutput
from tiderl.engine.settings import EngineSettings
from tiderl.engine.task_session import VLLMTaskSession
from tiderl.engine.vllm import VLLMEngine
from tiderl.errors import EngineError

from .conftest import Live, load_reference, settle, tokens

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

SYSTEM = tokens(42, 320)


class Versions(Live):
    """An engine beside the reference model of each version it has had."""

    def __init__(self, engine: VLLMEngine, reference: Any, folder: Path) -> None:
        super().__init__(engine, reference, folder)
        self.models = {engine.version: self.snapshot()}

    async def update(self, seed: int, mode: str = "keep") -> None:
        """Really different weights, as a new version."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        model = self.snapshot()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
        self.models[self.engine.version + 1] = model
        await self.engine.publish(model.named_parameters(), self.engine.version + 1, mode)  # type: ignore[arg-type]
        self.reference = model

    def token_gaps(self, ids: list[int], out: TurnOutput, version: int | None = None) -> list[float]:
        """|engine - reference| of each token of a turn that ends `ids`, by its own version or the given."""
        import torch

        gaps = [0.0] * len(out.ids)
        start = len(ids) - len(out.ids)
        for each in set(out.versions) if version is None else {version}:
            with torch.no_grad():
                logits = self.models[each](torch.tensor([ids])).logits[0].float()
            rows = torch.log_softmax(logits, -1)[start - 1 : -1]
            for i, (token, value, stamp) in enumerate(zip(out.ids, out.logprobs, out.versions, strict=True)):
                if version is not None or stamp == each:
                    gaps[i] = abs(float(rows[i, token]) - value)
        return gaps

    def exact(self, ids: list[int], out: TurnOutput) -> bool:
        """Whether each token that claims KV of its own version alone agrees with that version's weights.

        Raises AssertionError when one does not; False when no token claims it.
        """
        claimed = [
            gap for gap, v in zip(self.token_gaps(ids, out), out.versions, strict=True) if v == out.kv_version
        ]
        assert all(gap <= 1e-4 for gap in claimed), (max(claimed), out)
        return bool(claimed)


def sampling(seed: int, count: int = 8) -> Sampling:
    return Sampling(count, seed=seed, ignore_eos=True)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def both(tiny: Path) -> AsyncIterator[tuple[Versions, Versions]]:
    settings = EngineSettings(
        model=tiny, kv_tokens=8192, max_sessions=24, max_model_len=1024, max_batched_tokens=256
    )
    async with VLLMEngine(settings) as one, VLLMEngine(settings) as other:
        yield Versions(one, load_reference(tiny), tiny), Versions(other, load_reference(tiny), tiny)


@pytest_asyncio.fixture(loop_scope="session")
async def live(both: tuple[Versions, Versions]) -> AsyncIterator[Versions]:
    yield both[0]
    await settle(both[0].engine)
    audit = both[0].engine.audit()
    assert audit.consistent
    assert (audit.promised_tokens, audit.used_tokens) == (0, 0)


async def test_c17_c18_c19_no_new_session_reads_kv_of_older_weights(live: Versions) -> None:
    """A long system prompt again and again, versions come in flight, old sessions live on in all ways."""
    engine = live.engine
    olds: list[VLLMTaskSession] = []
    replays = found = mixed = racing = 0

    async def new(stack: AsyncExitStack, name: str, seed: int) -> tuple[list[int], TurnOutput]:
        session = await stack.enter_async_context(engine.task_session(session_id=name))
        olds.append(session)
        ids = SYSTEM + tokens(seed, 20)
        return ids, await session.generate(ids, sampling(seed))

    async with AsyncExitStack() as stack:
        for update in range(12):
            for number in range(2):
                ids, out = await new(stack, f"u{update}n{number}", update + 50 * number)
                assert max(live.token_gaps([*ids, *out.ids], out)) <= 1e-4
                assert set(out.versions) == {out.kv_version} == {engine.version}
                if update:  # the versions differ enough for stale KV to show
                    assert max(live.token_gaps([*ids, *out.ids], out, engine.version - 1)) > 1e-2
            # The second one shares what the first one computed, and only that.
            assert out.cached_tokens == 320
            # Old sessions go on: some held, some from their own older KV, some had to let go of it for good.
            for number, old in enumerate(olds[-14:-2]):
                replays += not old.held
                new_ids = tokens(update, 5)
                ids = [*old.snapshot().ids, *new_ids]
                out = await old.generate(new_ids, sampling(update))
                live.exact([*ids, *out.ids], out)
                found += out.cached_tokens > 320
                mixed += out.kv_version < engine.version
                if (number + update) % 3:
                    await old.release(fresh=(number + update) % 7 == 0)
            for old in olds[:-14]:
                await old.close()
            # The next version arrives while new sessions start.
            starting = [
                asyncio.create_task(new(stack, f"u{update}r{number}", update + 50 * number))
                for number in range(6)
            ]
            await asyncio.sleep(0.004 * update)
            await live.update(update)
            for ids, out in await asyncio.gather(*starting):
                racing += live.exact([*ids, *out.ids], out)
                assert out.kv_version >= engine.version - 1
    assert engine.version >= 12
    assert replays > 20
    assert found > 30
    assert mixed > 20
    assert racing > 50


async def test_a_replay_goes_on_from_its_own_older_kv_or_from_none(live: Versions) -> None:
    engine = live.engine
    async with AsyncExitStack() as stack:
        sessions = {
            how: await stack.enter_async_context(engine.task_session(session_id=how))
            for how in ("kept", "fresh", "held")
        }
        contexts = {}
        for number, (how, session) in enumerate(sessions.items()):
            ids = [number, *SYSTEM, number]
            out = await session.generate(ids, sampling(number))
            contexts[how] = [*ids, *out.ids]
        old = engine.version
        await sessions["kept"].release()
        await live.update(1)
        await sessions["fresh"].release(fresh=True)
        await live.update(2)
        for how, session in sessions.items():
            out = await session.generate(tokens(7, 10), sampling(7))
            whole = [*contexts[how], *tokens(7, 10), *out.ids]
            assert set(out.versions) == {engine.version}
            if how == "fresh":
                assert (out.cached_tokens, out.kv_version) == (0, engine.version)
                assert session.snapshot().version == engine.version
                assert max(live.token_gaps(whole, out)) <= 1e-4
            else:
                assert out.cached_tokens == (320 if how == "kept" else 329)
                assert out.kv_version == session.snapshot().version == old
                assert max(live.token_gaps(whole, out)) > 1e-3  # what it says: the KV is mixed


async def test_a_replay_whose_kv_is_gone_goes_on_as_a_new_session_does(live: Versions) -> None:
    engine = live.engine
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(engine.task_session(session_id="gone"))
        ids = SYSTEM + tokens(3, 30)
        ids += (await session.generate(ids, sampling(1))).ids
        await session.release()
        async with AsyncExitStack() as fill:
            for number in range(8):
                other = await fill.enter_async_context(engine.session(1024))
                await other.generate(tokens(900 + 13 * number, 1000), sampling(1, 1))
        await live.update(3)
        out = await session.generate([5], sampling(2))
        assert (out.cached_tokens, out.kv_version) == (0, engine.version)
        ids += [5, *out.ids]
        assert max(live.token_gaps(ids, out)) <= 1e-4
        # What it computed is good for all: it lies under the present version's salt.
        newcomer = await stack.enter_async_context(engine.task_session(session_id="newcomer"))
        out = await newcomer.generate([*SYSTEM, 1, 2, 3], sampling(3))
        assert out.cached_tokens == 320
        assert max(live.token_gaps([*SYSTEM, 1, 2, 3, *out.ids], out)) <= 1e-4


async def test_a_replay_that_waits_across_an_update_keeps_its_kv(live: Versions) -> None:
    engine = live.engine
    async with AsyncExitStack() as stack:
        sessions = [
            await stack.enter_async_context(engine.task_session(session_id=f"w{n}")) for n in range(3)
        ]
        kept, fresh = sessions[:2]
        for number, session in enumerate((kept, fresh)):
            await session.generate([number, *SYSTEM], sampling(number))
        await kept.release()
        await fresh.release(fresh=True)
        old = engine.version
        async with engine.hold(3):
            turns = [asyncio.create_task(s.generate([9, *SYSTEM], sampling(4))) for s in sessions]
            await asyncio.sleep(0.05)
            await live.update(4)
        outs = await asyncio.gather(*turns)
        assert [o.kv_version for o in outs] == [old, engine.version, engine.version]
        assert [o.cached_tokens for o in outs] == [320, 0, 0]
        for session, out in zip(sessions[1:], outs[1:], strict=True):
            assert max(live.token_gaps(list(session.snapshot().ids), out)) <= 1e-4


async def test_kv_of_weights_that_come_later_is_never_claimed(both: tuple[Versions, Versions]) -> None:
    """A session moves to an engine that has not got the newest weights yet."""
    ahead, behind = both
    engine = behind.engine
    start = max(ahead.engine.version, engine.version)
    for live in both:
        live.models[start + 1] = live.snapshot()
        await live.engine.publish(live.reference.named_parameters(), start + 1)
    await ahead.update(5)
    async with ahead.engine.task_session(session_id="mover") as session:
        out = await session.generate(SYSTEM, sampling(1))
        ids = [*SYSTEM, *out.ids]
        replay = session.snapshot()
        assert replay.version == start + 2
    async with engine.task_session(session_id="mover", replay=replay) as session:
        out = await session.generate(tokens(2, 40), sampling(2))
        ids += [*tokens(2, 40), *out.ids]
        assert out.kv_version == session.snapshot().version == start + 1
        assert set(out.versions) == {start + 1}
        assert max(behind.token_gaps(ids, out)) <= 1e-4
    await behind.update(6)  # version start + 2, here
    async with engine.task_session(session_id="new") as session:
        out = await session.generate(ids, sampling(3))
        assert out.cached_tokens == 0
        assert max(behind.token_gaps([*ids, *out.ids], out)) <= 1e-4


async def test_recompute_refuses_held_sessions_and_changes_nothing(live: Versions) -> None:
    engine = live.engine
    version, reference = engine.version, live.reference
    async with engine.task_session(session_id="h") as session:
        await session.generate(SYSTEM, sampling(1))
        with pytest.raises(EngineError, match="1 sessions hold KV"):
            await live.update(7, "recompute")
        async with engine.session(512) as reserved:
            await reserved.generate(SYSTEM, sampling(1))
            with pytest.raises(EngineError, match="2 sessions hold KV"):
                await live.update(7, "recompute")
            await session.release()
            with pytest.raises(EngineError, match="1 sessions hold KV"):
                await live.update(7, "recompute")
        assert (engine.version, live.reference) == (version, reference)
        out = await session.generate([1], sampling(2))
        assert (out.cached_tokens, out.kv_version) == (320, version)
        assert live.exact(list(session.snapshot().ids), out)
        await session.release()
        await live.update(7, "recompute")
        out = await session.generate([1], sampling(2))
        assert (out.cached_tokens, out.kv_version) == (0, version + 1)
        assert max(live.token_gaps(list(session.snapshot().ids), out)) <= 1e-4


async def test_recompute_computes_running_turns_again(live: Versions) -> None:
    """Whole turns in the middle, prompts cut into steps, and turns that wait for their first step."""
    engine = live.engine
    before = engine.stats()
    old = engine.version
    async with AsyncExitStack() as stack:
        sessions = [
            await stack.enter_async_context(engine.task_session(session_id=f"r{n}")) for n in range(8)
        ]
        for number, session in enumerate(sessions[:4]):
            await session.generate([number, *tokens(1, 199)], sampling(1))
        await sessions[3].release()
        counts = [400, 400, 400, 400, 400, 400, 8, 8]
        turns = [
            asyncio.create_task(s.generate([n, *tokens(5 + n, 89 + 40 * n)], sampling(n, counts[n])))
            for n, s in enumerate(sessions)
            if n != 2
        ]
        await asyncio.sleep(0.15)
        async with engine.gate.paused():  # a chunk for a held session that arrives while nothing is scheduled
            late = asyncio.create_task(sessions[2].generate(tokens(7, 170), sampling(2, 400)))
            await asyncio.sleep(0.05)
            for session in sessions:
                if session.held and not session._busy:
                    await session.release()
            await live.update(8, "recompute")
        turns.insert(2, late)
        outs = await asyncio.wait_for(asyncio.gather(*turns), 60)
        split = 0
        for session, out in zip(sessions, outs, strict=True):
            ids = list(session.snapshot().ids)
            gaps = live.token_gaps(ids, out)
            assert set(out.versions) <= {old, old + 1}
            if out.versions[-1] == old + 1:
                assert out.kv_version == old + 1
                assert session.snapshot().version == old + 1
            assert max(gaps) <= 1e-4, (max(gaps), out.versions)  # every token: by its own version's weights
            if len(set(out.versions)) == 2:
                split += 1
                assert max(live.token_gaps(ids, out, old)) > 1e-2
                assert out.reprefilled >= out.prompt_tokens
        assert split >= 3
        assert set(outs[2].versions) == {old + 1}
        assert outs[2].cached_tokens == 0
        assert outs[2].reprefilled == 207
        # They go on held, from their new KV.
        for session in sessions:
            if session.held:
                out = await session.generate([1, 2], sampling(3))
                assert out.cached_tokens == out.prompt_tokens - 3
                assert max(live.token_gaps(list(session.snapshot().ids), out)) <= 1e-4
    after = engine.stats()
    assert after.preemptions == before.preemptions
    assert after.reprefilled_tokens > before.reprefilled_tokens


async def test_recompute_against_turns_that_end_all_the_time(live: Versions) -> None:
    """A turn may end while the engine pauses: the update is refused then, and made when asked again."""
    engine = live.engine
    stop = asyncio.Event()

    async def play(number: int) -> int:
        turns = 0
        async with engine.task_session(session_id=f"e{number}") as session:
            while not stop.is_set():
                if session.length > 700:
                    break
                out = await session.generate(tokens(number, 3), sampling(turns, 1 + turns % 4))
                live.exact(list(session.snapshot().ids), out)
                await session.release(fresh=True)
                turns += 1
        return turns

    work = [asyncio.create_task(play(n)) for n in range(6)]
    done = refused = 0
    async with asyncio.timeout(60):
        while done < 6:
            await asyncio.sleep(0.01)
            try:
                await live.update(done, "recompute")
                done += 1
            except EngineError as error:
                assert "hold KV" in str(error)
                refused += 1
    stop.set()
    assert min(await asyncio.gather(*work)) > 1


async def test_a_replay_made_by_hand_counts_as_what_it_says(live: Versions) -> None:
    engine = live.engine
    ids = (*SYSTEM, *tokens(2, 50))
    async with engine.task_session(session_id="hand", replay=Replay(ids, (), turns=3, version=-1)) as session:
        before = engine.stats()
        out = await session.generate([1, 2], sampling(1))
        after = engine.stats()
        assert out.prompt_tokens == len(ids) + 2
        assert out.new_tokens == 3
        assert out.reprefilled == max(0, len(ids) - 1 - out.cached_tokens)
        assert after.later_prompt_tokens - before.later_prompt_tokens == out.prompt_tokens
        assert session.snapshot().turns == 4
        assert out.kv_version == engine.version
        assert max(live.token_gaps(list(session.snapshot().ids), out)) <= 1e-4
