"""The `hermes` action format: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Invariants: text outside of call blocks stays as content; every block becomes at least one call; a block
that is not well formed becomes a call whose `arguments` are the block's raw text. Blocks inside of
`<think>` are thoughts, not calls; tags inside of a call's JSON strings are text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from tiderl.agent.base import Message, Tool, calls_of, function_of, make_action, make_call, text_of

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_TAG = re.compile(r"<think>|</think>|<tool_call>")
_BLOCK_END = re.compile(r"</tool_call>|(?=<tool_call>)|\Z")
_NAME = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)*)"')
_DECODER = json.JSONDecoder()
_ARGUMENT_KEYS = ("arguments", "parameters")


class HermesFormat:
    """JSON calls in tags, as Hermes and Qwen models are trained to write them."""

    name = "hermes"
    template_marker = OPEN

    def instructions(self, tools: Sequence[Tool]) -> str | None:
        """The tools' schemas and the form of a call, in the words of Qwen2.5's template."""
        if not tools:
            return None
        schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return (
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n"
            f"<tools>\n{schemas}\n</tools>\n\n"
            "For each function call, return a json object with function name and arguments within "
            "<tool_call></tool_call> XML tags:\n"
            '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        )

    def render_call(self, message: Message) -> str:
        """The message's text, then one block a call."""
        text = text_of(message)
        pieces = [text] if text else []
        for call in calls_of(message):
            function = call["function"]
            raw = function.get("arguments")
            arguments = raw if isinstance(raw, str) else json.dumps(raw or {}, ensure_ascii=False)
            if _object(arguments or "{}") is None:
                # A faulty call is written as faulty as it was.
                pieces.append(f"{OPEN}\n{arguments}\n{CLOSE}")
            else:
                name = json.dumps(function["name"], ensure_ascii=False)
                pieces.append(f'{OPEN}\n{{"name": {name}, "arguments": {arguments or "{}"}}}\n{CLOSE}')
        return "\n".join(pieces)

    def render_result(self, message: Message) -> Message:
        """A user message whose text stands in `<tool_response>` tags; images follow the text."""
        content = message.get("content") or ""
        if isinstance(content, str):
            return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
        tagged = {"type": "text", "text": f"<tool_response>\n{text_of(message)}\n</tool_response>"}
        return {"role": "user", "content": [tagged, *(part for part in content if part["type"] == "image")]}

    def parse(self, text: str, tools: Sequence[Tool], call_id_prefix: str) -> Message:
        """Calls from the blocks, content from what is left; see the module's invariants."""
        found: list[tuple[str, str]] = []
        kept: list[str] = []
        done = position = 0
        while tag := _TAG.search(text, position):
            position = tag.end()
            if tag.group() == "<think>":
                end = text.find("</think>", position)
                position = len(text) if end < 0 else end + len("</think>")
            elif tag.group() == "</think>":
                # The thought began in the prompt: all so far was thought.
                found, kept, done = [], [text[:position]], position
            else:
                read, end = _read_block(text, position, tools)
                found += read
                kept.append(text[done : tag.start()])
                done = position = end
        if not found:
            return make_action(text)
        calls = [make_call(f"{call_id_prefix}_{k}", *call) for k, call in enumerate(found)]
        return make_action("".join([*kept, text[done:]]).strip(), calls)


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _read_block(text: str, start: int, tools: Sequence[Tool]) -> tuple[list[tuple[str, str]], int]:
    """(name, arguments) of each call in the block that begins at `start`, and where the block ends.

    The end is looked for behind the JSON, since its strings may hold tags. When anything is wrong, the
    block is one call whose arguments are its raw text.
    """
    found: list[tuple[str, str]] = []
    position = _skip_space(text, start)
    while position < len(text) and not text.startswith((CLOSE, OPEN), position):
        try:
            value, position = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError):
            found = []
            break
        call = _read_call(value)
        if call is None:
            found = []
            break
        found.append(call)
        position = _skip_space(text, position)
    end = _BLOCK_END.search(text, position)
    assert end is not None  # the pattern matches at the end of any text
    if not found:
        raw = text[start : end.start()].strip()
        return [(_guess_name(raw, tools), raw)], end.end()
    return found, end.end()


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _read_call(value: Any) -> tuple[str, str] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments: Any = next((value[key] for key in _ARGUMENT_KEYS if key in value), {})
    if isinstance(arguments, str):
        # Encoded twice, or not an object at all: either way it is already the text of the arguments.
        return _sendable(value["name"]), _sendable(arguments)
    return _sendable(value["name"]), json.dumps({} if arguments is None else arguments)


def _sendable(text: str) -> str:
    """JSON can spell lone surrogates, which no wire can carry: they are written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _guess_name(raw: str, tools: Sequence[Tool]) -> str:
    """The name a faulty call seems to mean, so that the answer can name the tool; "" when there is none."""
    match = _NAME.search(raw)
    if match is None:
        return ""
    known = {function_of(tool).get("name") for tool in tools}
    return match.group(1) if match.group(1) in known else ""
