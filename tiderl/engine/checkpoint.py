"""What the engine must know of a checkpoint before it starts, read from its JSON and tensor headers.

Invariant: no tensor is loaded here, and nothing heavy is imported.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiderl.errors import ModelError


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's tensors and the facts of its configuration."""

    folder: Path
    shapes: dict[str, tuple[int, ...]]
    """Name -> shape of every tensor."""
    tied: bool
    """Output and input embedding are one tensor."""
    vocabulary: int
    eos: tuple[int, ...]
    """Ids that end a turn by the model's own configuration."""
    architecture: str


def read_config(folder: str | Path, name: str = "config.json") -> dict[str, Any]:
    """A parsed JSON file of a checkpoint folder.

    Raises:
        ModelError: the folder or the file is missing or unreadable.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(f"there is no model folder {folder}", fix="check the path")
    try:
        config = json.loads((folder / name).read_text())
    except FileNotFoundError as error:
        raise ModelError(
            f"the folder has no {name}", where=str(folder), fix="name a folder written by save_pretrained"
        ) from error
    except ValueError as error:
        raise ModelError(f"{name} is not JSON ({error})", where=str(folder)) from error
    if not isinstance(config, dict):
        raise ModelError(f"{name} is not a JSON object", where=str(folder))
    return config


def read_checkpoint(folder: str | Path, max_model_len: int) -> Checkpoint:
    """Read a checkpoint folder.

    Raises:
        ModelError: it is not a safetensors checkpoint of a language model, or its longest context is below
            `max_model_len`.
    """
    folder = Path(folder)
    config = read_config(folder)
    text = config.get("text_config") or config
    for key in ("vocab_size", "architectures"):
        if not (text.get(key) or config.get(key)):
            raise ModelError(
                f"config.json has no {key}", where=str(folder), fix="name the folder of a language model"
            )
    longest = text.get("max_position_embeddings")
    if longest and max_model_len > longest:
        raise ModelError(
            f"engine.max_model_len {max_model_len} passes the model's own limit of {longest} tokens",
            where=str(folder),
            fix=f"set engine.max_model_len to {longest} or less",
        )
    return Checkpoint(
        folder=folder,
        shapes=_shapes(folder),
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        vocabulary=int(text.get("vocab_size") or config["vocab_size"]),
        eos=_eos(folder, config, text),
        architecture=(config.get("architectures") or text["architectures"])[0],
    )


def _eos(folder: Path, config: dict[str, Any], text: dict[str, Any]) -> tuple[int, ...]:
    if (folder / "generation_config.json").is_file():
        value = read_config(folder, "generation_config.json").get("eos_token_id")
    else:
        value = config.get("eos_token_id", text.get("eos_token_id"))
    if value is None:
        return ()
    return tuple(int(i) for i in value) if isinstance(value, list) else (int(value),)


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
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
