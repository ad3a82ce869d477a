"""Chat templates as models ship them, shortened where a part is not exercised, and a byte-level tokenizer."""
# ruff: noqa: E501

from __future__ import annotations

import functools
from typing import Any

import pytest

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# As Qwen3's: thoughts of turns before the last real question are taken out.
QWEN3 = (
    "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' and not "
    "(m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- set content = m.content %}"
    "{%- if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# As Qwen2.5's: tools in the system message, tool messages as tagged user text, adjacent ones as one.
QWEN25 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- else %}{{- 'You are Qwen.' }}{%- endif %}
    {{- "\\n\\n# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n\\nAnswer with\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# As Gemma's: no system role, roles must alternate, contents are trimmed.
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
# As Qwen2-VL's: contents may be parts; an image becomes three tokens.
QWEN_VL = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The same, but images of tool messages are lost (the fault of C-47 and T61).
QWEN_VL_DROPS = QWEN_VL.replace(
    "part['type'] == 'image' %}", "part['type'] == 'image' %}{% if message['role'] != 'tool' %}"
).replace("<|vision_end|>{%", "<|vision_end|>{% endif %}{%")
# As SmolVLM's: contents must be parts.
SMOLVLM = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|vision_start|>",
    "<|image_pad|>",
    "<|vision_end|>",
    "<image>",
    "<end_of_utterance>",
    "<repo_name>",
]
PLAIN_ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


TEMPLATES = {
    "chatml": CHATML,
    "smollm2": SMOLLM2,
    "llama3": LLAMA3,
    "qwen3": QWEN3,
    "qwen25": QWEN25,
    "gemma": GEMMA,
    "qwen_vl": QWEN_VL,
    "qwen_vl_drops": QWEN_VL_DROPS,
    "smolvlm": SMOLVLM,
}
EOS = {"llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "smolvlm": "<end_of_utterance>"}


@functools.cache
def tokenizer_named(name: str) -> Any:
    return byte_tokenizer(TEMPLATES[name], eos=EOS.get(name, "<|im_end|>"))


@pytest.fixture(scope="session")
def tokenizer_of() -> Any:
    """A function from a template's name to a tokenizer with it."""
    return tokenizer_named


@pytest.fixture(scope="session")
def make_tokenizer() -> Any:
    """A function from a template's text to a tokenizer with it."""
    return byte_tokenizer


def byte_tokenizer(template: str | None, *, eos: str = "<|im_end|>") -> Any:
    """A byte-level BPE tokenizer with a few merges; like Qwen's, some added tokens are not special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(letters)}
    pairs: list[tuple[str, str]] = []
    for pair in ["Ġ P", "a n", "t o", "an to", "ĠP anto", "< |", "Ċ Ċ"]:
        left, right = pair.split()
        pairs.append((left, right))
        vocab[left + right] = len(vocab)
    inner = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    inner.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN_ADDED])
    bos = "<|begin_of_text|>"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=eos, pad_token="<|endoftext|>", bos_token=bos
    )
    tokenizer.chat_template = template
    return tokenizer
