"""Held batches: equal seeds give equal tokens and log-probs bit by bit, whatever the timing."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tiderl.engine.base import Sampling
from tiderl.engine.settings import EngineSettings
from tiderl.engine.vllm import VLLMEngine
from tiderl.errors import EngineError, PromptTooLong

from .conftest import tokens

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

Outputs = list[tuple[tuple[int, ...], tuple[float, ...]]]


async def rounds(engine: VLLMEngine, delays: random.Random, hold: bool = True) -> Outputs:
    """12 sessions, 3 turns each; the turns of a round are submitted in a random order at random times."""
    stack = [engine.session(400, session_id=f"s{k:02d}") for k in range(12)]
    sessions = [await session.__aenter__() for session in stack]
    outputs: dict[tuple[int, int], tuple[tuple[int, ...], tuple[float, ...]]] = {}

    async def turn(k: int, number: int) -> None:
        await asyncio.sleep(delays.random() * 0.03)
        count = 20 + 5 * k if number == 0 else 3 + k
        output = await sessions[k].generate(
            tokens(k // 4, count), Sampling(6 + k, seed=100 * k + number, ignore_eos=True)
        )
        outputs[k, number] = output.ids, output.logprobs

    for number in range(3):
        order = list(range(12))
        delays.shuffle(order)
        if hold:
            async with engine.hold(len(order)):
                tasks = [asyncio.create_task(turn(k, number)) for k in order]
        else:
            tasks = [asyncio.create_task(turn(k, number)) for k in order]
        await asyncio.gather(*tasks)
    delays.shuffle(stack)
    for session in stack:
        await session.__aexit__(None, None, None)
    return [outputs[key] for key in sorted(outputs)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_lockstep_is_bit_for_bit(tiny: Path, dtype: str) -> None:
    settings = EngineSettings(
        model=tiny,
        dtype=dtype,
        kv_tokens=8192,
        max_sessions=16,
        max_batched_tokens=256,  # type: ignore[arg-type]
    )
    runs = []
    async with VLLMEngine(settings) as engine:
        for seed in range(3):
            runs.append(await rounds(engine, random.Random(seed)))
            # A new version's salt: each run starts from an empty prefix cache.
            await engine.publish(_same(tiny), engine.version + 1)
    assert runs[0] == runs[1] == runs[2]


def _same(folder: Path) -> list:
    from safetensors.torch import load_file

    return list(load_file(folder / "model.safetensors").items())


async def test_hold_does_not_wait_for_turns_that_fail(tiny: Path) -> None:
    settings = EngineSettings(model=tiny, kv_tokens=2048, max_sessions=4, turn_timeout=2.0)
    async with VLLMEngine(settings) as engine, engine.session(64) as one, engine.session(64) as two:
        async with engine.hold(2):
            good = asyncio.create_task(one.generate(tokens(1, 20), Sampling(4)))
            bad = asyncio.create_task(two.generate(tokens(1, 64), Sampling(4)))
        await good
        with pytest.raises(PromptTooLong):
            await bad
        async with engine.hold():
            again = asyncio.create_task(one.generate(tokens(1, 2), Sampling(4)))
        await again
        with pytest.raises(EngineError, match="1 of 3"):
            async with engine.hold(3):
                last = asyncio.create_task(one.generate(tokens(1, 2), Sampling(4)))
        await last  # the engine runs again
