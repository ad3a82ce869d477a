"""What all policies of a workload share: model, agent, engines, environments, weights.

Invariant: everything that was started is closed when the `async with` block is left, however it is left.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiderl.bench.rollout.model import bench_model, image_tokens, token_ids
from tiderl.bench.rollout.sizes import ENVIRONMENT, Overhead, Sizes, measure_overhead, measure_sizes
from tiderl.engine.settings import EngineSettings

if TYPE_CHECKING:
    import torch

    from tiderl.agent.chat import ChatAgent
    from tiderl.bench.rollout.engine import BenchEngine
    from tiderl.bench.rollout.workload import Workload
    from tiderl.hub.local import LocalHub

_SESSIONS_OF_A_WORKER = 64
_PERTURBATION = 1e-3


@dataclass(frozen=True)
class Plan:
    """A workload worked out, before anything is started."""

    workload: Workload
    folder: Path
    agent: ChatAgent
    overhead: Overhead
    sizes: Sizes
    arguments: dict[str, Any]
    """Of the environment."""
    settings: EngineSettings
    lengths: dict[int, int]
    tasks: list[int | str]


def plan_workload(workload: Workload) -> Plan:
    """Model, sizes and settings of a workload; makes the model at the first call.

    Raises:
        ConfigError, ModelError, EnvironmentFault: it cannot be run.
    """
    from tiderl.agent.chat import ChatAgent
    from tiderl.agent.tokenizer import load_tokenizer
    from tiderl.env.registry import make

    spec = workload.model
    arguments = workload.environment()
    env: Any = make(ENVIRONMENT, **arguments, pace=0)
    try:
        folder = bench_model(spec, env.vocabulary)
        agent = ChatAgent(load_tokenizer(folder), "text")
        overhead = measure_overhead(env, agent)
        if workload.episodes.trace is not None:
            arguments["overhead"] = overhead.later
            env.close()
            env = make(ENVIRONMENT, **arguments, pace=0)
        pictures = spec.image_size > 0
        sizes = measure_sizes(workload, env, overhead, image_tokens(spec) if pictures else 0)
        banned: tuple[int, ...] = ()
        lengths: dict[int, int] = {}
        if spec.path is None:
            ids = token_ids(env.vocabulary, pictures=pictures)
            fillers = {ids[word] for word in env.fillers}
            banned = tuple(number for number in range(-(-len(ids) // 64) * 64) if number not in fillers)
            lengths = {number: int(word) for word, number in ids.items() if word.isdigit()}
        else:
            banned = tuple(agent.stop_token_ids)
        tasks = env.task_lists.ids("train")[: workload.episodes.tasks]
        most_pictures = -(-env.max_turns // workload.episodes.image_every) if pictures else 0
    finally:
        env.close()
    engine = workload.engine
    settings = EngineSettings(
        model=str(folder),
        dtype=spec.dtype,
        max_model_len=sizes.longest,
        kv_tokens=sizes.kv_tokens,
        block_size=engine.block_size,
        max_sessions=min(256, workload.load.concurrency),
        threads=engine.threads,
        seed=workload.seed,
        max_batched_tokens=engine.max_batched_tokens,
        banned_token_ids=banned,
        max_images=most_pictures,
        turn_timeout=300.0,
    )
    return Plan(workload, folder, agent, overhead, sizes, arguments, settings, lengths, tasks)


class Bench:
    """A workload's engines and environments, running."""

    def __init__(self, plan: Plan, engines: list[BenchEngine], hub: LocalHub) -> None:
        self.plan, self.engines, self.hub = plan, engines, hub
        self._weights = _two_weights(plan.folder)

    @property
    def version(self) -> int:
        """The newest version that the engines run."""
        return max(engine.version for engine in self.engines)

    def weights(self, version: int) -> list[tuple[str, torch.Tensor]]:
        """Those of a version: two sets take turns, so each publish changes every tensor."""
        return self._weights[version % 2]

    async def refresh(self) -> None:
        """New weights under a new version: no later task reads KV of an earlier policy's run."""
        version = self.version + 1
        for engine in self.engines:
            await engine.publish(self.weights(version), version)


def _two_weights(folder: Path) -> list[list[tuple[str, torch.Tensor]]]:
    import torch
    from safetensors.torch import load_file

    first: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        first |= load_file(path)
    generator = torch.Generator().manual_seed(0)
    second = []
    for name, tensor in first.items():
        noise = torch.randn(tensor.shape, generator=generator) * (_PERTURBATION * float(tensor.float().std()))
        second.append((name, tensor + noise.nan_to_num().to(tensor.dtype)))
    return [list(first.items()), second]


@asynccontextmanager
async def running(plan: Plan) -> AsyncIterator[Bench]:
    """Start engines and environments; end them on leaving.

    Raises:
        EngineError, ModelError, WorkerDied: something did not start.
    """
    from tiderl.bench.rollout.engine import BenchEngine
    from tiderl.hub.local import LocalHub

    load = plan.workload.load
    workers = -(-load.concurrency // _SESSIONS_OF_A_WORKER)
    async with AsyncExitStack() as stack:
        hub = LocalHub(workers, sessions_per_process=_SESSIONS_OF_A_WORKER)
        await stack.enter_async_context(hub)
        engines: list[BenchEngine] = []
        for _ in itertools.repeat(None, plan.workload.engine.count):
            engine = BenchEngine(plan.settings, plan.lengths)
            await stack.enter_async_context(engine)
            engines.append(engine)
        yield Bench(plan, engines, hub)
