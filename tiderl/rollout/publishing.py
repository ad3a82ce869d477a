"""New weights for every engine of a rollout, in the policy's update mode.

Invariant: when `publish` returns, every living engine runs the new version; no task is lost in any mode.

`keep`: sessions go on with their old KV, later tokens are stamped with the new version.
`recompute`: whatever a task goes on from is computed again with the new weights.
`wait`: no turn is in an engine while its weights change; KV is kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tiderl.errors import EngineError

if TYPE_CHECKING:
    import torch

    from tiderl.engine.base import PublishMode
    from tiderl.rollout.conductor import Conductor
    from tiderl.rollout.pool import Member

    Weights = list[tuple[str, torch.Tensor]]

_TRIES = 40


async def publish(conductor: Conductor, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> float:
    """Put weights into every engine; returns the seconds it took.

    Raises:
        EngineError: an engine that is alive refused them.
    """
    began, mode = time.monotonic(), conductor.policy.update_mode
    tensors = list(weights)
    conductor.teller.note(conductor.now(), f"weights of version {version}, mode {mode}")
    if mode == "keep":
        await _to_all(conductor, tensors, version, "keep")
    else:
        async with conductor.still("weights"):
            if mode == "wait":
                await conductor.until_none_runs()
                await _to_all(conductor, tensors, version, "keep")
            else:
                await _recompute(conductor, tensors, version)
    return time.monotonic() - began


async def _to_all(conductor: Conductor, tensors: Weights, version: int, mode: PublishMode) -> None:
    async def one(member: Member) -> None:
        try:
            await member.engine.publish(tensors, version, mode=mode)
        except EngineError:
            if not await conductor.fleet.is_dead(member.name):
                raise

    await asyncio.gather(*(one(m) for m in list(conductor.pool) if m.engine.version < version))


async def _recompute(conductor: Conductor, tensors: Weights, version: int) -> None:
    conductor.all_fresh()
    for attempt in range(_TRIES):
        await conductor.release_all(fresh=True)
        try:
            await _to_all(conductor, tensors, version, "recompute")
            return
        except EngineError:  # a turn ended a moment ago, and its session was still held
            behind = [m for m in conductor.pool if m.engine.version < version]
            if attempt == _TRIES - 1 or not behind or any(m.error() is not None for m in behind):
                raise
            await asyncio.sleep(0.05)
