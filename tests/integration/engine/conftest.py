"""One tiny engine for all tests of this folder, beside the transformers model it must agree with."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tiderl.engine.base import Sampling, TurnOutput
from tiderl.engine.settings import EngineSettings
from tiderl.engine.vllm import VLLMEngine


@dataclass
class Episode:
    """A played session: the whole context and each turn's output."""

    ids: list[int] = field(default_factory=list)
    turns: list[tuple[int, TurnOutput]] = field(default_factory=list)
    """(where the sampled tokens start in `ids`, output)"""


def tokens(seed: int, count: int) -> list[int]:
    """A fixed sequence of ids that are text of the tiny tokenizer (0..255)."""
    return [(seed * 31 + 7 * i + (i * i) % 13) % 250 for i in range(count)]


async def play(
    engine: VLLMEngine,
    chunks: Sequence[Sequence[int]],
    *,
    max_tokens: int = 8,
    temperature: float = 1.0,
    seed: int = 0,
    reserve: int = 512,
    name: str | None = None,
    think: float = 0.0,
) -> Episode:
    """One session: each chunk is a prompt or an observation; `think` seconds pass between turns."""
    episode = Episode()
    async with engine.session(reserve, session_id=name) as session:
        for turn, chunk in enumerate(chunks):
            sampling = Sampling(max_tokens, temperature, seed=1000 * seed + turn, ignore_eos=True)
            output = await session.generate(chunk, sampling)
            episode.ids.extend(chunk)
            episode.turns.append((len(episode.ids), output))
            episode.ids.extend(output.ids)
            assert session.length == len(episode.ids)
            if think:
                await asyncio.sleep(think)
    return episode


class Live:
    """An engine and a reference model with the same weights."""

    def __init__(self, engine: VLLMEngine, reference: Any, folder: Path) -> None:
        self.engine, self.reference, self.folder = engine, reference, folder

    async def publish(self, seed: int, names: Sequence[str] | None = None, scale: float = 0.02) -> float:
        """Perturb the reference (only `names`, None: all) and send what changed to the engine."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        changed = {}
        with torch.no_grad():
            for name, parameter in self.reference.named_parameters():
                if names is None or name in names:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
                    changed[name] = parameter
        return await self.engine.publish(changed.items(), self.engine.version + 1)

    def gap(self, episode: Episode) -> float:
        """Largest |log-prob of the engine - log-prob of transformers| over the sampled tokens."""
        return max(self.gaps(episode))

    def gaps(self, episode: Episode) -> list[float]:
        """The same, turn by turn."""
        import torch

        with torch.no_grad():
            logits = self.reference(torch.tensor([episode.ids])).logits[0].float()
        logprobs = torch.log_softmax(logits, -1)
        result = []
        for start, output in episode.turns:
            rows = logprobs[start - 1 : start - 1 + len(output.ids)]
            ours = rows.gather(1, torch.tensor(output.ids)[:, None])[:, 0]
            result.append(float((ours - torch.tensor(output.logprobs)).abs().max()))
        return result

    def snapshot(self) -> Any:
        """A copy of the reference as it is now."""
        return copy.deepcopy(self.reference)


def load_reference(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


async def settle(engine: VLLMEngine, seconds: float = 5.0) -> None:
    """Wait until the engine holds nothing."""
    async with asyncio.timeout(seconds):
        while engine.stats().held or engine.stats().running or engine.stats().waiting:
            await asyncio.sleep(0.01)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiderl.engine.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def live(tiny: Path) -> AsyncIterator[Live]:
    settings = EngineSettings(
        model=tiny, kv_tokens=6144, max_sessions=20, max_model_len=1024, max_batched_tokens=512
    )
    async with VLLMEngine(settings) as engine:
        yield Live(engine, load_reference(tiny), tiny)
