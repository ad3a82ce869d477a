"""A tiny random language model for tests and docs: Qwen2, byte-level tokenizer, ChatML template.

Invariant: the same arguments write the same weights; logits are sharp (initializer_range 0.12), so a wrong KV
entry or a stale weight shows in the log-probs by far more than rounding does.
"""

from __future__ import annotations

import json
from pathlib import Path

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tiny_model(folder: str | Path, seed: int = 0, tied: bool = False) -> Path:
    """Write the checkpoint (0.9 M parameters, 320 token ids of which 259 have a text) and return its folder.

    Args:
        folder: made when missing; files in it are overwritten.
        seed: of the weights.
        tied: input and output embedding share one tensor.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    for special in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        vocabulary[special] = len(vocabulary)
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=tied,
        initializer_range=0.12,
        bos_token_id=None,
        eos_token_id=vocabulary["<|im_end|>"],
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = Qwen2ForCausalLM(config).to(torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zero by default: a lost bias would go unseen
                torch.nn.init.normal_(parameter, std=0.1)
    finally:
        torch.random.set_rng_state(state)
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    return folder


def write_idefics3_processor(folder: Path, edge: int, image_tokens: int) -> None:
    """Make a checkpoint's images `edge` x `edge` pixels, unsplit, `image_tokens` ids each.

    The processor is the one on PIL: it works without torchvision.
    """
    processor = {
        "image_processor_type": "Idefics3ImageProcessorPil",
        "do_convert_rgb": True,
        "do_image_splitting": False,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "max_image_size": {"longest_edge": edge},
        "size": {"longest_edge": edge},
        "resample": 1,
        "rescale_factor": 1 / 255,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    kind = {"processor_class": "Idefics3Processor", "image_seq_len": image_tokens}
    (folder / "processor_config.json").write_text(json.dumps(kind))
