"""OpenAI-shaped messages whose image parts hold HxWx3 uint8 arrays.

Invariant: every function here returns new objects; no message, part or array is ever shared with
what was passed in, so two observations can never share a mutable object.

A message is `{"role": "system"|"user"|"assistant"|"tool", "content": str | [part] | None}`; a part is
`{"type": "text", "text": str}` or `{"type": "image", "image": array}`. An assistant message may carry
`tool_calls`, a tool message carries `tool_call_id` and `name`.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tiderl.env.images import decode_image, encode_png, image_hash, image_problem
from tiderl.errors import EnvironmentFault

Message = dict[str, Any]
Part = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")


def clean_text(text: str) -> str:
    """`text` with lone surrogates replaced, so that it can be sent as UTF-8."""
    try:
        text.encode("utf-8")
        return str(text)
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode("utf-8")


def parts_of(value: Any) -> list[Part]:
    """What an author's method returned, as a list of parts.

    Takes text, an image (array or Pillow image), a part, a list of these, None (nothing), a number or
    bool (its text), a dict without "type" (its JSON).

    Raises:
        EnvironmentFault: the value is none of these, for example a float image.
    """
    if value is None:
        return []
    if isinstance(value, str):
        return [{"type": "text", "text": clean_text(value)}]
    if isinstance(value, np.ndarray):
        problem = image_problem(value)
        if problem:
            raise EnvironmentFault(problem, fix="return an HxWx3 array with dtype uint8")
        return [{"type": "image", "image": np.array(value, copy=True, order="C")}]
    if isinstance(value, (bool, int, float, np.generic)):
        return [{"type": "text", "text": str(value)}]
    if isinstance(value, dict):
        if value.get("type") == "text" and isinstance(value.get("text"), str):
            return [{"type": "text", "text": clean_text(value["text"])}]
        if value.get("type") == "image" and "image" in value:
            return parts_of(np.asarray(value["image"]))
        return [{"type": "text", "text": clean_text(_json_text(value))}]
    if isinstance(value, (list, tuple)):
        return [part for item in value for part in parts_of(item)]
    if hasattr(value, "convert") and hasattr(value, "getbands"):
        return parts_of(np.array(value.convert("RGB"), np.uint8))
    raise EnvironmentFault(
        f"a value of type {type(value).__name__} cannot be made into a message",
        fix="return text, an HxWx3 uint8 image, a dict, or a list of these",
    )


def _json_text(value: dict[Any, Any]) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise EnvironmentFault(
            f"a dict cannot be made into a message: {error}", fix="return JSON-serialisable values"
        ) from error


def content_of(values: Iterable[Any]) -> str | list[Part]:
    """Values as a message's content: one string when there is only text, else a list of parts."""
    parts = [part for value in values for part in parts_of(value)]
    if all(part["type"] == "text" for part in parts) and len(parts) <= 1:
        return parts[0]["text"] if parts else ""
    return parts


def system(text: str) -> Message:
    """A system message."""
    return {"role": "system", "content": clean_text(text)}


def user(*parts: Any) -> Message:
    """A user message made of text and images."""
    return {"role": "user", "content": content_of(parts)}


def assistant(text: str | None, tool_calls: Sequence[dict[str, Any]] = ()) -> Message:
    """An assistant message; `tool_calls` are made by `tool_call`."""
    message: Message = {"role": "assistant", "content": None if text is None else clean_text(text)}
    if tool_calls:
        message["tool_calls"] = [_copy(call) for call in tool_calls]
    return message


def tool(call_id: str, name: str, *parts: Any) -> Message:
    """The answer to the tool call with id `call_id`."""
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": content_of(parts)}


def tool_call(_name: str, /, id: str | None = None, **arguments: Any) -> dict[str, Any]:
    """One structured tool call, for demonstrations and oracles; `id` defaults to `call_<name>`."""
    return {
        "id": id or f"call_{_name}",
        "type": "function",
        "function": {"name": _name, "arguments": json.dumps(arguments)},
    }


def text_of(message: Message) -> str:
    """All text of a message, parts joined by newlines; "" when there is none."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part.get("type") == "text")


def images_of(message: Message) -> list[np.ndarray]:
    """The image arrays of a message, in order (not copied)."""
    content = message.get("content")
    if not isinstance(content, list):
        return []
    return [part["image"] for part in content if part.get("type") == "image"]


def _part_problem(part: Any) -> str | None:
    if not isinstance(part, dict):
        return f"a content part must be a dict, not {type(part).__name__}"
    if part.get("type") == "text":
        return None if isinstance(part.get("text"), str) else "a text part needs a string in 'text'"
    if part.get("type") == "image":
        return image_problem(part.get("image"))
    return f"a content part has type {part.get('type')!r}, not 'text' or 'image'"


def _call_problem(call: Any) -> str | None:
    if not isinstance(call, dict):
        return f"a tool call must be a dict, not {type(call).__name__}"
    if not isinstance(call.get("id"), str):
        return "a tool call needs a string in 'id'"
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return "a tool call needs a string in 'function.name'"
    if not isinstance(function.get("arguments"), str):
        return "a tool call needs a JSON string in 'function.arguments'"
    return None


def message_problem(message: Any) -> str | None:
    """Why `message` is not a valid message, or None when it is one."""
    if not isinstance(message, dict):
        return f"a message must be a dict, not {type(message).__name__}"
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        return f"a message has role {role!r}, not one of {', '.join(ROLES)}"
    calls = message.get("tool_calls")
    if calls is not None:
        if role != "assistant":
            return f"a message with role {role!r} has tool_calls, only an assistant message may"
        if not isinstance(calls, list):
            return "tool_calls must be a list"
        for call in calls:
            if problem := _call_problem(call):
                return problem
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        return "a tool message needs a string in 'tool_call_id'"
    if content is None:
        return None if role == "assistant" else f"a message with role {role!r} has no content"
    if isinstance(content, str):
        return None
    if not isinstance(content, list):
        return f"content must be a string or a list of parts, not {type(content).__name__}"
    for part in content:
        if problem := _part_problem(part):
            return problem
    return None


def validate_message(message: Any, where: str | None = None) -> None:
    """Raise an `EnvironmentFault` that names what is wrong with `message`."""
    if problem := message_problem(message):
        raise EnvironmentFault(problem, where=where, fix="build messages with tiderl.messages")


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy(item) for item in value]
    if isinstance(value, np.ndarray):
        return np.array(value, copy=True)
    return value


def copy_message(message: Message) -> Message:
    """A deep copy of one message, arrays included."""
    return _copy(message)


def copy_messages(messages: Iterable[Message]) -> list[Message]:
    """Deep copies of the messages, arrays included."""
    return [_copy(message) for message in messages]


def to_openai(messages: Iterable[Message]) -> list[Message]:
    """The messages as an OpenAI endpoint takes them: images become PNG data URLs."""
    return [_map_content(message, _part_to_openai) for message in messages]


def from_openai(messages: Iterable[Message]) -> list[Message]:
    """The inverse of `to_openai`; only data URLs are taken, nothing is downloaded."""
    return [_map_content(message, _part_from_openai) for message in messages]


def _map_content(message: Message, convert: Any) -> Message:
    content = message.get("content")
    out = {key: _copy(value) for key, value in message.items() if key != "content"}
    out["content"] = [convert(part) for part in content] if isinstance(content, list) else content
    return out


def _part_to_openai(part: Part) -> Part:
    if part.get("type") != "image":
        return _copy(part)
    url = "data:image/png;base64," + base64.b64encode(encode_png(part["image"])).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def _part_from_openai(part: Part) -> Part:
    if part.get("type") != "image_url":
        return _copy(part)
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, dict) else url
    if not isinstance(url, str) or not url.startswith("data:") or ";base64," not in url:
        raise EnvironmentFault(
            f"an image URL cannot be used: {str(url)[:40]!r}", fix="send a data:image/png;base64 URL"
        )
    try:
        data = base64.b64decode(url.split(";base64,", 1)[1], validate=True)
    except ValueError as error:
        raise EnvironmentFault(f"an image URL is not base64: {error}", fix="send valid base64") from error
    return {"type": "image", "image": decode_image(data)}


def jsonable(messages: Iterable[Message], image_dir: str | os.PathLike[str] | None = None) -> list[Message]:
    """The messages as JSON values; an image becomes its content hash and shape.

    With `image_dir`, each image is also written there once, as `<sha256>.png` (to a temporary name,
    then renamed).
    """

    def convert(part: Part) -> Part:
        if part.get("type") != "image":
            return _copy(part)
        digest = image_hash(part["image"])
        out = {"type": "image", "sha256": digest, "shape": list(part["image"].shape)}
        if image_dir is not None:
            target = Path(image_dir) / f"{digest}.png"
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                draft = target.with_name(f".{digest}.{os.getpid()}.tmp")
                draft.write_bytes(encode_png(part["image"]))
                draft.replace(target)
            out["file"] = target.name
        return out

    return [_map_content(message, convert) for message in messages]
