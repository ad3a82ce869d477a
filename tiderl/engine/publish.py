"""The trainer's side of a weight update: names and shapes checked, tensors written once to shared memory.

Invariant: the engine is asked to load only tensors whose name and shape are those of its own checkpoint and
whose values are finite, so an update cannot fail half-way for a reason of the trainer's. The file is a memory
file: it exists only while it is open, so none is ever left behind.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import struct
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tiderl.engine.checkpoint import Checkpoint
from tiderl.errors import EngineError, nearest

if TYPE_CHECKING:
    import torch

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@asynccontextmanager
async def write_weights(
    weights: Iterable[tuple[str, torch.Tensor]], checkpoint: Checkpoint, dtype: str, timeout: float
) -> AsyncIterator[str]:
    """Write `weights` and give the path under which the engine can map them while the block runs.

    Raises:
        EngineError: a tensor does not fit the model, or the iterable took longer than `timeout` seconds.
    """
    file = WeightFile(checkpoint, dtype)
    writing = asyncio.ensure_future(asyncio.to_thread(file.write, weights))
    try:
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(writing)
        except TimeoutError as error:
            raise EngineError(
                f"the new weights were not written within {timeout:.0f} s", where="publish"
            ) from error
        yield file.path
    finally:
        # The thread must be out of the file before its descriptor is closed and given to somebody else.
        file.stop.set()
        await asyncio.wait([writing])
        file.close()


class WeightFile:
    """A safetensors file in memory, written tensor by tensor; close it to give the memory back."""

    def __init__(self, checkpoint: Checkpoint, dtype: str) -> None:
        self._checkpoint, self._dtype = checkpoint, dtype
        self._entries: dict[str, dict[str, object]] = {}
        # Room for the header of a full update: the tensors are written before all names are known.
        self._room = 8 * (64 + sum(len(name) + 120 for name in checkpoint.shapes) // 8)
        self._end = 0
        self.stop = threading.Event()
        self.fd = os.memfd_create("tiderl-weights")

    @property
    def path(self) -> str:
        """A path under which a process of the same user can open the file."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def write(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Append tensors, cast to the engine's dtype, and finish the header.

        Raises:
            EngineError: a name the checkpoint does not have, a wrong shape, a name sent twice, a value that
                is not finite, or no tensor at all. The engine has not been touched.
        """
        import torch

        dtype = getattr(torch, self._dtype)
        with torch.no_grad():
            for name, tensor in weights:
                if self.stop.is_set():
                    return
                if self._checkpoint.tied and name == "lm_head.weight" and name not in self._checkpoint.shapes:
                    continue  # the same tensor as the input embedding, which is sent under its own name
                self._check(name, tuple(tensor.shape))
                data = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
                if not _finite(data):
                    raise EngineError(
                        f"the new weight {name} holds a value that is not finite", where="publish"
                    )
                self._append(name, data)
        if not self._entries:
            raise EngineError("there are no weights to publish", where="publish")
        header = json.dumps(self._entries, separators=(",", ":")).encode()
        os.pwrite(self.fd, struct.pack("<Q", self._room) + header.ljust(self._room), 0)

    def close(self) -> None:
        """Give the memory back."""
        os.close(self.fd)

    def _append(self, name: str, data: torch.Tensor) -> None:
        import torch

        raw = data.reshape(-1).view(torch.uint8).numpy().data
        start = self._end
        while raw:
            done = os.pwrite(self.fd, raw, 8 + self._room + self._end)
            self._end += done
            raw = raw[done:]
        self._entries[name] = {
            "dtype": _DTYPES[self._dtype],
            "shape": list(data.shape),
            "data_offsets": [start, self._end],
        }

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        expected = self._checkpoint.shapes.get(name)
        if expected is None:
            near = nearest(name, self._checkpoint.shapes, 1)
            hint = f"did you mean {near[0]}" if near else "send the names of the checkpoint"
            raise EngineError(f"the model has no weight {name}", where="publish", fix=hint)
        if expected != shape:
            raise EngineError(
                f"the new weight {name} has shape {shape}, the model's is {expected}", where="publish"
            )
        if name in self._entries:
            raise EngineError(f"the weight {name} was sent twice", where="publish")


def _finite(data: torch.Tensor) -> bool:
    """True when every value is finite; min and max carry NaN through and cost 1/50 of isfinite()."""
    return not data.numel() or all(math.isfinite(float(edge)) for edge in data.aminmax())
