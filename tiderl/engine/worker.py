"""vLLM's worker with turns that are seeded one by one.

Invariant: with a seed, a turn's tokens depend on its context and that seed alone: not on earlier turns, not
on how its prompt was cut into steps, not on who shares the batch.

vLLM 0.32 falls short of that in two ways. The generator of a resumable request is made at its first turn and
goes on through all later ones, whatever seed they bring. And a step that computes only a part of a prompt
draws a token all the same and then winds the generator back, which a CPU generator cannot do: the engine
dies ("CPU Generator does not use offset"). Here a turn gets a generator of its own, and rows whose draw is
thrown away draw from no request's generator.

It also strips the pixels of images whose KV is there from what it sends the worker, and dies ("Encoder cache
miss") when the request is preempted and must compute that KV again; `scheduler.py` sends them again then.

Runs in the engine process.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingType
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

import tiderl.engine.weights  # noqa: F401  # registers the weight transfer backends in this process

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _VLLMWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as _VLLMWorker


class _SeededTurns:
    """Mixed in before vLLM's model runner."""

    def _update_streaming_request(self, req_id: str, new_req_data: Any) -> Any:
        state = super()._update_streaming_request(req_id, new_req_data)  # type: ignore[misc]
        params = state.sampling_params
        state.generator = None
        if params.sampling_type == SamplingType.RANDOM_SEED:
            me: Any = self
            state.generator = torch.Generator(device=me.device)
            state.generator.manual_seed(params.seed)
        return state

    def _update_states(self, scheduler_output: Any) -> Any:
        me: Any = self
        for req_id, features in getattr(scheduler_output, "tiderl_mm_features", {}).items():
            me.requests[req_id].mm_features = features
        return super()._update_states(scheduler_output)  # type: ignore[misc]

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        me: Any = self
        generators = me.input_batch.generators
        unfinished = me.discard_request_mask.np[: me.input_batch.num_reqs].nonzero()[0]
        self._aside = {row: generators.pop(row) for row in map(int, unfinished) if row in generators}
        return super()._sample(*args, **kwargs)  # type: ignore[misc]

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        me: Any = self
        try:
            return super()._bookkeeping_sync(*args, **kwargs)  # type: ignore[misc]
        finally:
            me.input_batch.generators.update(self._aside)
            self._aside = {}


def _sampled_logprobs(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> LogprobsTensors:
    """In place of `Sampler.gather_logprobs`: no ranks, which nobody reads and which cost a pass over the
    logits (6 % of a decode step of a 135 M model on one core)."""
    if num_logprobs:
        return Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)
    ids = token_ids.unsqueeze(-1)
    return LogprobsTensors(ids.to(torch.int32), logprobs.gather(-1, ids), torch.zeros_like(token_ids))


class TideWorker(_VLLMWorker):
    """The worker class every engine of ours runs."""

    def init_device(self) -> None:
        super().init_device()
        runner = self.model_runner
        runner.sampler.gather_logprobs = _sampled_logprobs
        runner.__class__ = type("Seeded" + type(runner).__name__, (_SeededTurns, type(runner)), {})

    def gpu_uuid(self) -> str:
        """UUID of this worker's GPU, "" on a CPU; tells the parent whether CUDA IPC can reach it."""
        if self.device.type != "cuda":
            return ""
        return str(torch.cuda.get_device_properties(self.device).uuid)
