"""Messages: built new, validated with a reason, sent and read back without loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image

from tiderl.env import messages as m
from tiderl.env.images import decode_image, encode_png, image_hash
from tiderl.errors import EnvironmentFault

PICTURE = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
images = arrays.arrays(np.uint8, st.tuples(st.integers(1, 6), st.integers(1, 6), st.just(3)))


def same(left: Any, right: Any) -> bool:
    """Equality with arrays compared bit by bit."""
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def test_text_alone_is_a_string_and_an_image_makes_parts():
    assert m.user("hello") == {"role": "user", "content": "hello"}
    assert m.user() == {"role": "user", "content": ""}
    mixed = m.user("look", PICTURE)
    assert [part["type"] for part in mixed["content"]] == ["text", "image"]
    assert m.text_of(mixed) == "look"
    assert np.array_equal(m.images_of(mixed)[0], PICTURE)


def test_what_authors_return_becomes_parts():
    assert m.parts_of(None) == []
    assert m.parts_of(7)[0]["text"] == "7"
    assert m.parts_of(np.float64(0.5))[0]["text"] == "0.5"
    assert json.loads(m.parts_of({"a": [1, "é"]})[0]["text"]) == {"a": [1, "é"]}
    assert [p["type"] for p in m.parts_of(["a", ["b", PICTURE]])] == ["text", "text", "image"]
    pillow = m.parts_of(Image.fromarray(PICTURE))
    assert np.array_equal(pillow[0]["image"], PICTURE)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (PICTURE.astype(np.float32), "float32"),
        (PICTURE[:, :, 0], "shape"),
        (np.zeros((0, 2, 3), np.uint8), "empty"),
        ({"type": "image", "image": PICTURE / 255.0}, "float64"),
        ({"when": object()}, "JSON"),
        (object(), "object"),
        ({1, 2}, "set"),
    ],
)
def test_what_cannot_be_a_message_is_named(value: Any, word: str):
    with pytest.raises(EnvironmentFault, match=word):
        m.parts_of(value)


def test_arrays_are_copied_on_the_way_in():
    picture = PICTURE.copy()
    message = m.user(picture)
    picture[:] = 0
    assert np.array_equal(m.images_of(message)[0], PICTURE)
    copied = m.copy_messages([message])[0]
    assert not np.shares_memory(m.images_of(copied)[0], m.images_of(message)[0])


def test_lone_surrogates_are_replaced():
    assert m.user("a\udc80b")["content"] == "a?b"


def test_tool_calls_carry_json_text():
    call = m.tool_call("move", "c1", name="x", id_number=3)
    assert call["id"] == "c1"
    assert json.loads(call["function"]["arguments"]) == {"name": "x", "id_number": 3}
    message = m.assistant(None, [call])
    call["id"] = "changed"
    assert message["tool_calls"][0]["id"] == "c1"
    assert m.message_problem(message) is None


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ("text", "dict"),
        ({"role": "robot", "content": ""}, "robot"),
        ({"role": "user", "content": None}, "no content"),
        ({"role": "user", "content": 3}, "int"),
        ({"role": "user", "content": [3]}, "part"),
        ({"role": "user", "content": [{"type": "video"}]}, "video"),
        ({"role": "user", "content": [{"type": "text"}]}, "text"),
        ({"role": "user", "content": [{"type": "image", "image": PICTURE / 2}]}, "uint8"),
        ({"role": "user", "content": "", "tool_calls": []}, "tool_calls"),
        ({"role": "tool", "content": ""}, "tool_call_id"),
        ({"role": "assistant", "content": None, "tool_calls": {}}, "list"),
        ({"role": "assistant", "content": None, "tool_calls": [{}]}, "id"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": {}}]}, "name"),
        (
            {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": {"name": "f"}}]},
            "arguments",
        ),
    ],
)
def test_faults_in_messages_are_named(message: Any, word: str):
    with pytest.raises(EnvironmentFault, match=word):
        m.validate_message(message)


@given(images)
@settings(max_examples=30, deadline=None)
def test_t63_pixels_survive_png_and_data_urls(picture: np.ndarray):
    assert np.array_equal(decode_image(encode_png(picture)), picture)
    message = m.user("see", picture)
    wire = json.loads(json.dumps(m.to_openai([message])))
    back = m.from_openai(wire)
    assert same(back, [message])
    assert image_hash(m.images_of(back[0])[0]) == image_hash(picture)


def test_openai_form_takes_only_data_urls():
    url = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    with pytest.raises(EnvironmentFault, match="data:image"):
        m.from_openai([{"role": "user", "content": [url]}])
    url["image_url"] = {"url": "data:image/png;base64,@@"}
    with pytest.raises(EnvironmentFault, match="base64"):
        m.from_openai([{"role": "user", "content": [url]}])
    with pytest.raises(EnvironmentFault, match="picture"):
        decode_image(b"no picture")


def test_hash_depends_on_shape_and_bytes():
    assert image_hash(PICTURE) != image_hash(PICTURE.reshape(3, 2, 3))
    assert image_hash(PICTURE) == image_hash(np.asfortranarray(PICTURE))


def test_jsonable_writes_each_picture_once(tmp_path: Path):
    messages = [m.user("a", PICTURE), m.user("b", PICTURE.copy()), m.assistant("ok")]
    out = json.loads(json.dumps(m.jsonable(messages, tmp_path)))
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [f"{image_hash(PICTURE)}.png"]
    part = out[0]["content"][1]
    assert part == {
        "type": "image",
        "sha256": image_hash(PICTURE),
        "shape": [2, 3, 3],
        "file": files[0].name,
    }
    assert np.array_equal(decode_image(files[0].read_bytes()), PICTURE)
    assert "file" not in m.jsonable(messages)[0]["content"][1]
