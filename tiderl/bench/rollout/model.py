"""The models that rollout benchmarks run: random weights, a tokenizer in which each word is one token.

Invariant: the same spec and vocabulary give the same folder; a folder that exists is whole. A model never
samples anything but filler words, so a reply of n tokens is a reply of n words.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiderl.cache import cache_folder, locked
from tiderl.engine.tiny import write_idefics3_processor
from tiderl.errors import ModelError

if TYPE_CHECKING:
    from tiderl.bench.rollout.workload import ModelSpec

_FORMAT = 2
"""Raise it when what is written changes: other cached folders are then left alone."""
_LOCK_TIMEOUT = 600.0
_ROLES = ("system", "user", "assistant", "tool")
_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_IMAGE = "<image>"
_PICTURE_SPECIALS = (_IMAGE, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
_UNKNOWN = "<unk>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def bench_model(spec: ModelSpec, vocabulary: Sequence[str]) -> Path:
    """The model folder of a workload; made and cached at the first call.

    Raises:
        ModelError: `spec.path` is no model, or the model cannot be written.
    """
    if spec.path is not None:
        from tiderl.engine.models import resolve_model

        return resolve_model(spec.path).path
    text = json.dumps([_FORMAT, spec.model_dump(mode="json"), list(vocabulary)], sort_keys=True)
    name = f"bench-{spec.hidden}x{spec.layers}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    folder = cache_folder() / "models" / name
    with locked(folder, timeout=_LOCK_TIMEOUT, doing="writing the model"):
        if not (folder / "config.json").is_file():
            part = Path(tempfile.mkdtemp(prefix=f".{name}.part-", dir=folder.parent))
            try:
                write_model(part, spec, vocabulary)
                part.chmod(0o755)
                part.rename(folder)
            except OSError as error:
                raise ModelError(f"the model cannot be written: {error}", where=str(folder)) from error
            finally:
                shutil.rmtree(part, ignore_errors=True)
    return folder


def write_model(folder: Path, spec: ModelSpec, vocabulary: Sequence[str]) -> None:
    """A checkpoint with random weights (seed 0) and its tokenizer."""
    import torch
    from transformers.utils import logging

    pictures = spec.image_size > 0
    ids = token_ids(vocabulary, pictures=pictures)
    _write_tokenizer(folder, ids, pictures=pictures)
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = _vision_model(spec, ids) if pictures else _text_model(spec, ids)
        model.to(torch.float32)
        model.generation_config.do_sample = False
        model.save_pretrained(folder)
    finally:
        torch.random.set_rng_state(state)
        if bars:
            logging.enable_progress_bar()
    if pictures:
        write_idefics3_processor(folder, spec.image_size, image_tokens(spec) - 3)


def token_ids(vocabulary: Sequence[str], *, pictures: bool) -> dict[str, int]:
    """Word -> id: the vocabulary first, then roles and control tokens."""
    more = (*_ROLES, _UNKNOWN, *_SPECIALS, *(_PICTURE_SPECIALS if pictures else ()))
    if pictures:
        more += tuple(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7))
    return {word: number for number, word in enumerate(dict.fromkeys([*vocabulary, *more]))}


def image_tokens(spec: ModelSpec) -> int:
    """Tokens of one picture, with those around it."""
    side = spec.image_size // spec.patch // spec.scale
    return side * side + 3


def _padded(count: int) -> int:
    return -(-count // 64) * 64


def _text_config(spec: ModelSpec, ids: dict[str, int]) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=_padded(len(ids)),
        hidden_size=spec.hidden,
        intermediate_size=_padded(spec.hidden * 8 // 3),
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.hidden // spec.heads,
        max_position_embeddings=65536,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<|endoftext|>"],
    )


def _text_model(spec: ModelSpec, ids: dict[str, int]) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(_text_config(spec, ids))


def _vision_model(spec: ModelSpec, ids: dict[str, int]) -> Any:
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    vision = {
        "hidden_size": spec.vision_hidden,
        "intermediate_size": 4 * spec.vision_hidden,
        "num_hidden_layers": spec.vision_layers,
        "num_attention_heads": max(1, spec.vision_hidden // 64),
        "image_size": spec.image_size,
        "patch_size": spec.patch,
    }
    config = Idefics3Config(
        vision_config=vision,
        text_config=_text_config(spec, ids).to_dict() | {"model_type": "llama"},
        scale_factor=spec.scale,
        image_token_id=ids[_IMAGE],
        tie_word_embeddings=False,
        pad_token_id=ids["<|endoftext|>"],
    )
    return Idefics3ForConditionalGeneration(config)


def _write_tokenizer(folder: Path, ids: dict[str, int], *, pictures: bool) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(WordLevel(vocab=ids, unk_token=_UNKNOWN))
    raw.pre_tokenizer = WhitespaceSplit()
    controls = [word for word in ids if word.startswith("<") and word not in (_UNKNOWN, *_SPECIALS)]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        unk_token=_UNKNOWN,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", *controls],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
