"""What the replica publishes and saves is, in a real vLLM engine, the policy that was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiderl.engine.base import Sampling
from tiderl.engine.settings import EngineSettings
from tiderl.engine.vllm import VLLMEngine
from tiderl.trajectory.record import TokenRecord

pytestmark = pytest.mark.engine


async def sample(engine: Any, turns: int = 3) -> TokenRecord:
    """A record of `turns` sampled turns with observations between them."""
    record, new = TokenRecord(), list(range(30, 60))
    async with engine.session(256) as session:
        for turn in range(turns):
            out = await session.generate(new, Sampling(max_tokens=12, seed=turn, ignore_eos=True))
            record.append_context(new)
            record.append_sampled(out.ids, out.logprobs, out.versions)
            new = [40 + turn, 41, 42]
    return record


def gap(replica: Any, record: TokenRecord) -> float:
    sampler = np.array([x for x, m in zip(record.logprobs, record.mask, strict=True) if m])
    return float(np.abs(replica.logprobs([record])[0] - sampler).max())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("lora", [True, False])
async def test_published_and_saved_weights_agree_with_the_trainer(
    lora: bool, tmp_path: Path, model_folder: Path, make_replica: Any, make_groups: Any
) -> None:
    replica = make_replica(lora=lora, optim={"learning_rate": 1e-2 if lora else 1e-3})
    engine = VLLMEngine(EngineSettings(model=model_folder, kv_tokens=2048, max_model_len=512))
    await engine.start()
    try:
        before = await sample(engine)
        assert gap(replica, before) <= 1e-4
        replica.update(make_groups(), 0)
        assert gap(replica, before) > 1e-3
        await engine.publish(replica.weights(), 1)
        after = await sample(engine)
        assert set(after.versions) == {-1, 1}
        assert gap(replica, after) <= 1e-4
    finally:
        await engine.close()
    saved = VLLMEngine(EngineSettings(model=replica.save(tmp_path / "c"), kv_tokens=2048, max_model_len=512))
    await saved.start()
    try:
        assert gap(replica, await sample(saved)) <= 1e-4
    finally:
        await saved.close()
