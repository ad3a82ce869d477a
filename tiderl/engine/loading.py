"""Loading new weights while nothing is computed.

Invariant: everything that can refuse an update has been asked before the first weight changes; one that fails
after that ends the engine. When it is done and the engine runs again, the version in the scheduler's table,
the one that tokens are stamped with, and the weights are one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiderl.engine.base import PublishMode
from tiderl.engine.counters import Cell, Counters
from tiderl.errors import EngineError

if TYPE_CHECKING:
    from tiderl.engine.vllm import VLLMEngine


async def load_weights(
    engine: VLLMEngine, llm: Any, cells: Counters, told: dict[str, Any], version: int, mode: PublishMode
) -> None:
    """Pause, load what was offered, go on. `told`: what the worker needs to find the weights.

    Raises:
        EngineError: sessions are held in mode `recompute` (nothing has changed), or the update failed.
    """
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    timeout = engine.settings.publish_timeout
    if mode == "recompute":
        _refuse_held(len(engine.idle))
    async with engine.gate.paused():
        if mode == "recompute":
            _refuse_held(cells[Cell.HELD])  # a turn that ended while the engine was pausing holds its KV
            # Running turns go back to the queue with all their tokens and lose their KV; no block is in use
            # then, so the prefix cache can be emptied. They start again when the pause ends.
            await engine.call(llm.reset_prefix_cache(reset_running_requests=True))
        try:
            await engine.call(llm.start_weight_update(), timeout)
            await engine.call(llm.update_weights(WeightTransferUpdateRequest(update_info=told)), timeout)
            await engine.call(llm.finish_weight_update(weight_version=str(version)), timeout)
            if engine.settings.max_images:
                await engine.call(llm.reset_encoder_cache())
        except EngineError as error:
            # Half-loaded weights: no token of this engine can be trusted any more.
            engine.fail(
                EngineError(f"a weight update failed half-way: {error.what}", fix="start a new engine")
            )
            raise
        cells[Cell.VERSION] = version
        engine.version = version
        if mode == "recompute":
            engine.oldest_kv = version


def _refuse_held(held: int) -> None:
    if held:
        raise EngineError(
            f"{held} sessions hold KV between two turns, which an update in mode recompute cannot renew",
            where="publish",
            fix="release every session first",
        )
