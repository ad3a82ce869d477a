"""The `lines` action format for small models: `NAME: argument`, one call a line.

Invariants: a line is a call exactly when what stands before its first colon is a tool's name
(case, surrounding space and the choice of `_`, `-` or space do not matter; a tool without parameters
needs no colon); values are typed by the
tool's schema, and one that does not fit its type is passed on as the text it is, so that the
environment can answer it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from tiderl.agent.base import (
    Message,
    Tool,
    calls_of,
    function_of,
    images_of,
    make_action,
    make_call,
    parameters_of,
    text_of,
)
from tiderl.agent.formats import FormatError

_INTEGER = re.compile(r"[+-]?\d+\Z")
_TRUE, _FALSE = ("true", "yes"), ("false", "no")


class LinesFormat:
    """`CALC: 31+14` calls the tool `calc`; results come back as `RESULT: 45`."""

    name = "lines"
    template_marker = None

    def instructions(self, tools: Sequence[Tool]) -> str | None:
        """One line a tool: its form and the first sentence of its description."""
        if not tools:
            return None
        lines = ["Write one of these lines to act:"]
        for tool in tools:
            form = f"{_label(tool)}:"
            if names := list(parameters_of(tool)):
                form += " " + ", ".join(f"<{name}>" for name in names)
            about = str(function_of(tool).get("description") or "").strip().split("\n")[0]
            lines.append(f"{form} - {about}" if about else form)
        return "\n".join(lines)

    def render_call(self, message: Message) -> str:
        """The message's text, then one line a call.

        Raises:
            FormatError: a value has a line break, or a comma where only the last value may have one.
        """
        lines = [text_of(message)] if text_of(message) else []
        for call in calls_of(message):
            lines.append(_write_call(call["function"]))
        return "\n".join(lines)

    def render_result(self, message: Message) -> Message:
        """A user message `RESULT: ...`; images follow the text."""
        text = f"RESULT: {text_of(message)}"
        if not (images := images_of(message)):
            return {"role": "user", "content": text}
        parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
        return {"role": "user", "content": parts + [{"type": "image", "image": image} for image in images]}

    def parse(self, text: str, tools: Sequence[Tool], call_id_prefix: str) -> Message:
        """Every matching line is a call; the other lines stay as content."""
        by_name = {_plain(str(function_of(tool)["name"])): tool for tool in tools}
        calls: list[dict[str, Any]] = []
        kept: list[str] = []
        for line in text.split("\n"):
            name, colon, rest = line.partition(":")
            matched = by_name.get(_plain(name))
            if matched is None or not (colon or not parameters_of(matched)):
                kept.append(line)
                continue
            arguments = json.dumps(_arguments(matched, rest.strip()), ensure_ascii=False)
            calls.append(
                make_call(f"{call_id_prefix}_{len(calls)}", str(function_of(matched)["name"]), arguments)
            )
        return make_action("\n".join(kept).strip(), calls) if calls else make_action(text)


def _label(tool: Tool) -> str:
    return str(function_of(tool)["name"]).upper()


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", "_", name.strip().lower())


def _arguments(tool: Tool, rest: str) -> dict[str, Any]:
    """Typed arguments from what stands behind the colon; missing ones are left out."""
    parameters = parameters_of(tool)
    if not parameters:
        return {"text": rest} if rest else {}
    if not rest and len(parameters) > 1:
        return {}
    values = [rest] if len(parameters) == 1 else [v.strip() for v in rest.split(",", len(parameters) - 1)]
    pairs = zip(parameters.items(), values, strict=False)
    return {name: _typed(value, schema) for (name, schema), value in pairs if value}


def _typed(value: str, schema: dict[str, Any]) -> Any:
    """`value` as the schema's type; `value` itself when it does not fit."""
    kinds = schema.get("type", [])
    options = [
        *(schema.get("anyOf") or schema.get("oneOf") or []),
        *({"type": kind} for kind in (kinds if isinstance(kinds, list) else [])),
    ]
    if options:
        # Text is tried last: it takes everything.
        for option in sorted(options, key=lambda option: option.get("type") == "string"):
            typed = _typed(value, option)
            if not isinstance(typed, str):
                return typed
        return value
    if kinds == "null":
        return None if value.lower() in ("null", "none") else value
    choices = schema.get("enum") or []
    for choice in (*(c for c in choices if str(c) == value), *choices):
        if str(choice).lower() == value.lower():
            return choice
    reader = _READERS.get(str(kinds))
    found = reader(value) if reader else None
    return value if found is None else found


def _integer(value: str) -> int | None:
    # Past this length no environment means it, and Python refuses to convert.
    return int(value) if _INTEGER.match(value) and len(value) < 400 else None


def _number(value: str) -> float | int | None:
    if (whole := _integer(value)) is not None:
        return whole
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _boolean(value: str) -> bool | None:
    low = value.lower()
    return True if low in _TRUE else False if low in _FALSE else None


def _container(kind: type) -> Any:
    def read(value: str) -> Any:
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, kind) else None

    return read


_READERS: dict[str, Any] = {
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "array": _container(list),
    "object": _container(dict),
}


def _write_call(function: dict[str, Any]) -> str:
    name = str(function["name"]).upper()
    raw = function.get("arguments") or "{}"
    try:
        arguments = json.loads(raw) if isinstance(raw, str) else raw
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        return f"{name}: {str(raw).strip()}"
    values = [_written(value) for value in arguments.values()]
    if any("\n" in value for value in values) or any("," in value for value in values[:-1]):
        raise FormatError(
            f"the call of {function['name']!r} cannot be written on one line: a value holds a line break "
            "or a comma",
            fix="use the format hermes for this environment",
        )
    return f"{name}: {', '.join(values)}".rstrip()


def _written(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)
