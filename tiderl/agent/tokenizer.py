"""Loads a model's tokenizer. Invariant: transformers is imported only here, at the first call."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

from ..errors import MissingExtra, ModelError
from .base import Tokenizer

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer in a model folder, with its chat template; nothing is downloaded.

    Raises:
        ModelError: the folder is missing, holds no tokenizer that can be read, or no chat template.
        MissingExtra: transformers is not installed.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(
            f"there is no model folder {str(folder)!r}", fix="give the path of a folder with a tokenizer"
        )
    if not any((folder / name).is_file() for name in _FILES):
        raise ModelError(
            "the model folder holds no tokenizer",
            where=str(folder),
            fix=f"put the model's {_FILES[0]} and {_FILES[1]} there",
        )
    try:
        tokenizer = _load(folder)
    except ImportError as error:
        raise MissingExtra(
            "transformers is needed for a model's tokenizer", fix="pip install 'tiderl[cpu]' or 'tiderl[gpu]'"
        ) from error
    except Exception as error:  # the tokenizers library raises plain Exception
        first = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"the tokenizer cannot be loaded ({type(error).__name__}: {first})",
            where=str(folder),
            fix="restore the model's tokenizer files",
        ) from error
    if not tokenizer.chat_template:
        tokenizer.chat_template = _processor_template(folder)
    if not tokenizer.chat_template:
        raise ModelError(
            "the model has no chat template",
            where=str(folder),
            fix="use an instruction-tuned model, or put its chat_template.jinja into the folder",
        )
    return cast(Tokenizer, tokenizer)


def _load(folder: Path) -> Any:
    if (folder / "tokenizer.json").is_file():
        # The file says all there is to say, and this class does not import torch as AutoTokenizer does.
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def _processor_template(folder: Path) -> str | None:
    """The template of a vision model that keeps it with its processor (`chat_template.json`)."""
    try:
        found = json.loads((folder / "chat_template.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    template = found.get("chat_template") if isinstance(found, dict) else None
    return template if isinstance(template, str) else None
