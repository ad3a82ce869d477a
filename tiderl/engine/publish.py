"""The trainer's side of a weight update: names and shapes checked, tensors shared with the engine once.

Invariant: the engine is asked to load only tensors whose name and shape are those of its own checkpoint and
whose values are finite, so an update cannot fail half-way for a reason of the trainer's. The file is a memory
file: it exists only while it is open, so none is ever left behind.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import os
import pickle
import struct
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from tiderl.engine.checkpoint import Checkpoint
from tiderl.errors import EngineError, nearest

if TYPE_CHECKING:
    import torch

_LEAVE_TIMEOUT = 30.0
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@asynccontextmanager
async def offered_weights(
    weights: Iterable[tuple[str, torch.Tensor]],
    checkpoint: Checkpoint,
    dtype: str,
    *,
    gpu: str,
    timeout: float,
) -> AsyncIterator[dict[str, Any]]:
    """Make `weights` readable for the engine while the block runs; gives what the engine must be told.

    Args:
        gpu: UUID of the GPU the engine lives on, "" when there is none or when only host memory may be used.

    Raises:
        EngineError: a tensor does not fit the model, or the iterable took longer than `timeout` seconds.
    """
    offer = Offer(checkpoint, dtype, gpu)
    writing = asyncio.ensure_future(asyncio.to_thread(offer.take, weights))
    try:
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(writing)
        except TimeoutError as error:
            raise EngineError(
                f"the new weights were not there within {timeout:.0f} s", where="publish"
            ) from error
        yield offer.told()
    finally:
        # The thread must be out of the file before its descriptor is closed and given to somebody else; one
        # that hangs in the trainer's iterable keeps it.
        offer.stop.set()
        await asyncio.wait([writing], timeout=_LEAVE_TIMEOUT)
        if writing.done():
            offer.close()


class Offer:
    """The tensors of one update: on the engine's own GPU shared where they are, else in a memory file."""

    def __init__(self, checkpoint: Checkpoint, dtype: str, gpu: str = "") -> None:
        self._checkpoint, self._dtype, self._gpu = checkpoint, dtype, gpu
        self._store: WeightFile | GPUHandles | None = None
        self._seen: set[str] = set()
        self.stop = threading.Event()

    def take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Read the iterable to its end, casting to the engine's dtype.

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
                if self._store is None:
                    here = tensor.is_cuda and _gpu_of(tensor) == self._gpu
                    self._store = GPUHandles(self._gpu) if here else WeightFile(self._checkpoint)
                device = None if isinstance(self._store, GPUHandles) else "cpu"
                data = tensor.detach().to(device=device, dtype=dtype).contiguous()
                if not _finite(data):
                    raise EngineError(
                        f"the new weight {name} holds a value that is not finite", where="publish"
                    )
                self._store.append(name, data)
        if self._store is None:
            raise EngineError("there are no weights to publish", where="publish")
        self._store.finish()

    def told(self) -> dict[str, Any]:
        """What the engine's side of the transfer needs to know."""
        assert self._store is not None
        return self._store.told()

    def close(self) -> None:
        """Give the memory back."""
        if self._store is not None:
            self._store.close()

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
        if name in self._seen:
            raise EngineError(f"the weight {name} was sent twice", where="publish")
        self._seen.add(name)


class WeightFile:
    """A safetensors file in memory, written tensor by tensor."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._entries: dict[str, dict[str, object]] = {}
        # Room for the header of a full update: the tensors are written before all names are known.
        self._room = 8 * (64 + sum(len(name) + 120 for name in checkpoint.shapes) // 8)
        self._end = 0
        self.fd = os.memfd_create("tiderl-weights")

    def append(self, name: str, data: torch.Tensor) -> None:
        """Write one contiguous CPU tensor."""
        import torch

        raw = data.reshape(-1).view(torch.uint8).numpy().data
        start = self._end
        while raw:
            done = os.pwrite(self.fd, raw, 8 + self._room + self._end)
            self._end += done
            raw = raw[done:]
        self._entries[name] = {
            "dtype": _DTYPES[str(data.dtype).removeprefix("torch.")],
            "shape": list(data.shape),
            "data_offsets": [start, self._end],
        }

    def finish(self) -> None:
        """Write the header: from here on it is a safetensors file."""
        header = json.dumps(self._entries, separators=(",", ":")).encode()
        os.pwrite(self.fd, struct.pack("<Q", self._room) + header.ljust(self._room), 0)

    def told(self) -> dict[str, Any]:
        """A path under which a process of the same user can open the file."""
        return {"path": f"/proc/{os.getpid()}/fd/{self.fd}"}

    def close(self) -> None:
        """Give the memory back."""
        os.close(self.fd)


class GPUHandles:
    """CUDA IPC handles of tensors on the engine's GPU; the tensors live until the handles are closed."""

    def __init__(self, gpu: str) -> None:
        self._gpu = gpu
        self._names: list[str] = []
        self._tensors: list[torch.Tensor] = []
        self._handles: list[dict[str, Any]] = []

    def append(self, name: str, data: torch.Tensor) -> None:
        """Share one tensor; a handle does not keep its memory alive, so the tensor is kept here."""
        from torch.multiprocessing.reductions import reduce_tensor

        self._names.append(name)
        self._tensors.append(data)
        self._handles.append({self._gpu: reduce_tensor(data)[1]})

    def finish(self) -> None:
        """Another process reads without our streams' order: everything must have been computed."""
        import torch

        torch.cuda.synchronize(self._tensors[0].device)

    def told(self) -> dict[str, Any]:
        """Names, dtypes, shapes and the handles, as vLLM's IPC engine takes them."""
        return {
            "names": self._names,
            "dtype_names": [str(t.dtype).removeprefix("torch.") for t in self._tensors],
            "shapes": [list(t.shape) for t in self._tensors],
            "handles": base64.b64encode(pickle.dumps(self._handles)).decode(),
        }

    def close(self) -> None:
        """The engine has copied everything."""
        self._tensors.clear()


def _gpu_of(tensor: torch.Tensor) -> str:
    import torch

    return str(torch.cuda.get_device_properties(tensor.device).uuid)


def _finite(data: torch.Tensor) -> bool:
    """True when every value is finite; min and max carry NaN through and cost 1/50 of isfinite()."""
    return not data.numel() or all(math.isfinite(float(edge)) for edge in data.aminmax())
