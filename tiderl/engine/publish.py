"""The trainer's side of a weight update: names and shapes checked, tensors written once to shared memory.

Invariant: the engine is asked to load only tensors whose name and shape are those of its own checkpoint, so
an update can never fail half-way. The file is a memory file: it exists only while it is open and cannot be
left behind.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tiderl.errors import EngineError, ModelError, nearest

if TYPE_CHECKING:
    import torch

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def checkpoint_shapes(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a safetensors checkpoint, from its headers alone.

    Raises:
        ModelError: the folder holds no safetensors file, or one is cut short.
    """
    folder = Path(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(
            "there is no *.safetensors file",
            where=str(folder),
            fix="name a folder written by save_pretrained",
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        try:
            with path.open("rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(size))
        except (struct.error, ValueError) as error:
            raise ModelError("the file is not a whole safetensors file", where=str(path)) from error
        header.pop("__metadata__", None)
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items()}
    return shapes


class WeightFile:
    """A safetensors file in memory, written tensor by tensor; close it to give the memory back."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: str, tied: bool) -> None:
        self._shapes, self._dtype, self._tied = shapes, dtype, tied
        self._entries: dict[str, dict[str, object]] = {}
        # Room for the header of a full update, so that the tensors can be written before their names are known.
        self._room = 8 * (64 + sum(len(name) + 120 for name in shapes) // 8)
        self._end = 0
        self.fd = os.memfd_create("tiderl-weights")

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    @property
    def size(self) -> int:
        """Bytes of tensor data."""
        return self._end

    def write(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Append tensors, cast to the engine's dtype, and finish the header.

        Raises:
            EngineError: a name the checkpoint does not have, a wrong shape, a name sent twice, no tensor at
                all, or a value that is not finite. The engine has not been touched.
        """
        import torch

        dtype = getattr(torch, self._dtype)
        with torch.no_grad():
            for name, tensor in weights:
                if self._tied and name == "lm_head.weight" and name not in self._shapes:
                    continue  # the same tensor as the input embedding, which is sent under its own name
                self._check(name, tuple(tensor.shape))
                data = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
                if not bool(torch.isfinite(data).all()):
                    raise EngineError(
                        f"the new weight {name} holds a value that is not finite", where="publish"
                    )
                raw = memoryview(data.view(torch.uint8).numpy().reshape(-1))  # type: ignore[arg-type]
                start = self._end
                while raw:
                    done = os.pwrite(self.fd, raw, 8 + self._room + self._end)
                    self._end += done
                    raw = raw[done:]
                self._entries[name] = {
                    "dtype": _DTYPES[self._dtype],
                    "shape": list(tensor.shape),
                    "data_offsets": [start, self._end],
                }
        if not self._entries:
            raise EngineError("there are no weights to publish", where="publish")
        header = json.dumps(self._entries, separators=(",", ":")).encode()
        os.pwrite(self.fd, struct.pack("<Q", self._room) + header.ljust(self._room), 0)

    def close(self) -> None:
        os.close(self.fd)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        expected = self._shapes.get(name)
        if expected is None:
            near = nearest(name, self._shapes, 1)
            hint = f"did you mean {near[0]}" if near else "send the names of the checkpoint"
            raise EngineError(f"the model has no weight {name}", where="publish", fix=hint)
        if expected != shape:
            raise EngineError(
                f"the new weight {name} has shape {shape}, the model's is {expected}", where="publish"
            )
        if name in self._entries:
            raise EngineError(f"the weight {name} was sent twice", where="publish")
