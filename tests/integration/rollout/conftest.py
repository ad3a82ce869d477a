"""Episodes of random tokens on the conductor and real engines; the environment is a sleep."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tiderl.engine.base import Sampling, TurnOutput
from tiderl.engine.settings import EngineSettings
from tiderl.engine.tiny import make_tiny_model
from tiderl.env.ends import EndReason
from tiderl.rollout.conductor import Conductor
from tiderl.rollout.engines import Engines
from tiderl.scheduling import make_policy


@dataclass
class Episode:
    """What one episode saw: its context and each turn's output."""

    key: str
    ids: list[int] = field(default_factory=list)
    turns: list[tuple[int, TurnOutput]] = field(default_factory=list)
    end: EndReason | None = None


def tokens(seed: str, count: int) -> list[int]:
    """Ids that are text of the tiny tokenizer."""
    rng = random.Random(seed)
    return [rng.randrange(250) for _ in range(count)]


async def play(
    conductor: Conductor,
    key: str,
    order: tuple[int, int],
    *,
    turns: int = 4,
    observation: int = 24,
    reply: int = 8,
    wait: float = 0.02,
    die_at: int = -1,
    prompt: list[int] | None = None,
) -> Episode:
    """One episode; at turn `die_at` its environment dies. Raises what the conductor raises."""
    episode = Episode(key)
    rng = random.Random(key)
    async with conductor.task(key, order, "play") as task:
        async with task.session(512, session_id=key) as kv:
            for turn in range(turns):
                new = tokens(f"{key}/{turn}", observation)
                if turn == 0 and prompt is not None:
                    new = prompt + new
                out = await kv.generate(new, Sampling(reply, seed=1000 * order[0] + turn, ignore_eos=True))
                episode.ids += new
                episode.turns.append((len(episode.ids), out))
                episode.ids += out.ids
                assert kv.length == len(episode.ids)
                task.acting("tool")
                await asyncio.sleep(rng.expovariate(1 / wait) if wait else 0)
                if turn == die_at:
                    break
        episode.end = EndReason.INFRASTRUCTURE if die_at >= 0 else EndReason.SUCCESS
        task.finish(episode.end, tokens=sum(len(o.ids) for _, o in episode.turns))
    return episode


class Weights:
    """The reference model at each version, for recomputing log-probs."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.models: list[Any] = [model]

    def perturb(self, scale: float = 0.02) -> list[tuple[str, Any]]:
        """Another version; returns what to publish."""
        import torch

        model = copy.deepcopy(self.models[-1])
        generator = torch.Generator().manual_seed(len(self.models))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
        self.models.append(model)
        return [(name, p.detach().clone()) for name, p in model.named_parameters()]

    def gaps(self, episode: Episode, version: int | None = None) -> list[float]:
        """Largest |engine - transformers| of each turn, under each turn's version (or the one given)."""
        import torch

        result = []
        for start, out in episode.turns:
            model = self.models[out.versions[-1] if version is None else version]
            with torch.no_grad():
                logits = model(torch.tensor([episode.ids[: start + len(out.ids)]])).logits[0].float()
            rows = torch.log_softmax(logits, -1)[start - 1 : start - 1 + len(out.ids)]
            ours = rows.gather(1, torch.tensor(out.ids)[:, None])[:, 0]
            result.append(float((ours - torch.tensor(out.logprobs)).abs().max()))
        return result


def pure(out: TurnOutput) -> bool:
    """Its tokens and all KV they were computed from are of one version."""
    return set(out.versions) == {out.kv_version}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def settings(tiny: Path) -> EngineSettings:
    """About nine episodes of `play` fit one engine."""
    return EngineSettings(
        model=tiny,
        kv_tokens=1536,
        max_sessions=16,
        max_model_len=512,
        max_batched_tokens=512,
        turn_timeout=60,
    )


@asynccontextmanager
async def conducting(
    settings: EngineSettings, policy: str = "ctb", *, ranks: int = 1, respawn: int = 0, **options: Any
) -> AsyncIterator[tuple[Conductor, Engines]]:
    """A conductor over fresh engines."""
    engines = Engines(settings, ranks, respawn=respawn)
    try:
        await engines.start()
        spawn = engines.spawn if respawn else None
        async with over(engines, policy, spawn=spawn, **options) as conductor:
            yield conductor, engines
    finally:
        await engines.close()


@asynccontextmanager
async def over(engines: Engines, policy: str = "ctb", **options: Any) -> AsyncIterator[Conductor]:
    """A conductor over started engines, strict about its accounting."""
    wanted = {key: options.pop(key) for key in ("update_mode",) if key in options}
    options.setdefault("stall_s", 30.0)
    async with Conductor(make_policy(policy, **wanted), engines.pool, strict=True, **options) as conductor:
        yield conductor
