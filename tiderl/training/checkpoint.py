"""Checkpoints on disk.

Invariant: a folder that exists is complete. Everything is written beside it and renamed in one step; free
space is checked before the first byte. The root is a plain checkpoint (merged weights, configuration,
tokenizer); `state/` continues the run; `state/adapter/` is the adapter in peft's own format.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tiderl.errors import ModelError, ResourceError

if TYPE_CHECKING:
    from tiderl.training.replica import Replica

STATE = "state/trainer.pt"
FORMAT = 1
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
RESERVE_BYTES = 64 << 20
"""Kept free beyond what the checkpoint takes."""


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _copied_files(source: Path) -> list[Path]:
    """Tokenizer, chat template and the like: all of the model folder's own files but weights and config."""
    return [
        f
        for f in sorted(source.iterdir())
        if f.is_file()
        and not f.name.startswith(".")
        and f.name != "config.json"
        and not f.name.endswith(_WEIGHTS)
    ]


def check_space(folder: Path, needed: int) -> None:
    """Raise `ResourceError` when the file system of `folder` has not `needed` bytes to spare."""
    free = shutil.disk_usage(folder).free
    if free < needed + RESERVE_BYTES:
        raise ResourceError(
            f"a checkpoint needs {needed / 2**20:.0f} MiB and only {free / 2**20:.0f} MiB are free",
            where=str(folder),
            fix="free some space or choose another folder for the run",
        )


def save(replica: Replica, folder: Path) -> Path:
    """Write `folder` (replacing an older checkpoint of that name) and return it.

    Raises:
        ResourceError: not enough free disk, or the disk filled up while writing; `folder` is as it was.
    """
    model = replica.model
    state, full = replica.state_dict(), model.full_state()
    files = _copied_files(model.folder)
    moments = [
        v
        for entry in state["optimizer"]["adamw"]["state"].values()
        for v in entry.values()
        if torch.is_tensor(v)
    ]
    needed = _bytes([*full.values(), *state["parameters"], *state["optimizer"]["masters"], *moments])
    needed += _bytes(list(state["parameters"])) if model.wrapped is not None else 0
    needed += sum(f.stat().st_size for f in files)
    folder.parent.mkdir(parents=True, exist_ok=True)
    check_space(folder.parent, needed)
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        model.save_merged(partial, full)
        for file in files:
            shutil.copy2(file, partial / file.name)
        (partial / STATE).parent.mkdir()
        torch.save({"format": FORMAT, **state}, partial / STATE)
        if model.wrapped is not None:
            model.wrapped.save_pretrained(str(partial / "state" / "adapter"), save_embedding_layers=False)
        _sync(partial)
        _replace(partial, folder)
    except OSError as error:
        raise ResourceError(
            f"the checkpoint could not be written: {error}",
            where=str(folder),
            fix="free some space or check the folder's permissions",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _sync(folder: Path) -> None:
    """Flush every file, so that a rename never outlives the data it names."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())


def _replace(partial: Path, folder: Path) -> None:
    """Put `partial` in the place of `folder`; an older one is removed only after the new one is there."""
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    if folder.exists():
        os.rename(folder, old)
    try:
        os.rename(partial, folder)
    except OSError:
        if old.exists():
            os.rename(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def read_state(folder: Path) -> dict[str, Any]:
    """The trainer state of a checkpoint folder (or of its `state/`).

    Raises:
        ModelError: the folder has none, or one of another format.
    """
    path = folder / STATE
    if not path.is_file() and (folder / Path(STATE).name).is_file():
        path = folder / Path(STATE).name
    if not path.is_file():
        raise ModelError(f"no trainer state at {str(path)!r}", fix="give a checkpoint folder of a run")
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    if state.get("format") != FORMAT:
        raise ModelError(f"trainer state of format {state.get('format')}", where=str(path))
    return state
