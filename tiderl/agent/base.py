"""Words shared by the parts of an agent.

Invariant: a message is a plain dict of the shape that `tiderl.env.messages` defines; nothing here adds
keys to it, and nothing here changes a message it was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..env.messages import Message, images_of, text_of

__all__ = [
    "Message",
    "Tokenizer",
    "Tool",
    "calls_of",
    "function_of",
    "images_of",
    "make_action",
    "make_call",
    "parameters_of",
    "text_of",
]

Tool = dict[str, Any]
"""An OpenAI tool schema."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the bridge uses."""

    chat_template: Any
    added_tokens_decoder: dict[int, Any]
    eos_token_id: Any
    bos_token_id: Any
    pad_token_id: Any
    name_or_path: str

    def apply_chat_template(self, conversation: Sequence[Message], **options: Any) -> Any: ...

    def encode(self, text: str, **options: Any) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], **options: Any) -> str: ...


def function_of(tool: Tool) -> dict[str, Any]:
    """The function part of an OpenAI tool schema (the schema itself when it is already flat)."""
    inner = tool.get("function")
    return inner if isinstance(inner, dict) else tool


def parameters_of(tool: Tool) -> dict[str, dict[str, Any]]:
    """Parameter name -> JSON schema, in the order of the tool's signature."""
    schema = function_of(tool).get("parameters") or {}
    properties = schema.get("properties") or {}
    return {name: value if isinstance(value, dict) else {} for name, value in properties.items()}


def calls_of(message: Message) -> list[dict[str, Any]]:
    """The tool calls of an assistant message."""
    return list(message.get("tool_calls") or [])


def make_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A tool call as it stands in an assistant message; `arguments` is text, JSON when well formed."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def make_action(content: str, calls: Sequence[dict[str, Any]] = ()) -> Message:
    """An assistant message; `tool_calls` only when there are some."""
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = list(calls)
    return message
