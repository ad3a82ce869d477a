"""Loading a tokenizer: every fault of a model folder has an error that names it."""

from __future__ import annotations

import json

import pytest

from tiderl.agent.tokenizer import load_tokenizer
from tiderl.errors import ModelError


def test_loads_a_folder_with_its_template(tmp_path, tokenizer_of):
    tokenizer_of("chatml").save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.chat_template == tokenizer_of("chatml").chat_template
    assert loaded.encode("a<|im_end|>", add_special_tokens=False)[-1] == loaded.eos_token_id


def test_takes_the_processors_template_of_a_vision_model(tmp_path, make_tokenizer):
    make_tokenizer(None).save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert load_tokenizer(tmp_path).chat_template == "{{ messages }}"


def test_missing_folder(tmp_path):
    with pytest.raises(ModelError, match=r"no model folder.*gone"):
        load_tokenizer(tmp_path / "gone")


def test_folder_without_tokenizer(tmp_path):
    with pytest.raises(ModelError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"model": {', '{"added_tokens": [], "model": {"type": "Q"}}']
)
def test_broken_tokenizer(tmp_path, tokenizer_of, content):
    tokenizer_of("chatml").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_tokenizer(tmp_path)


def test_checkpoint_without_a_chat_template(tmp_path, make_tokenizer):
    make_tokenizer(None).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"no chat template.*chat_template\.jinja"):
        load_tokenizer(tmp_path)
