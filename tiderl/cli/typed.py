"""What a line that a person types means: a tool call or a text.

Invariant: a line is a call exactly where its first word is a tool's name; a call says what was typed, without
loss, or there is a `ConfigError`: quotes, spaces and JSON inside a value stay in that value.
"""

from __future__ import annotations

import io
import json
import re
import shlex
from typing import Any

from tiderl.env import messages as m
from tiderl.errors import ConfigError

_NAME = re.compile(r"([^\W\d]\w*)=")
_SPACE = re.compile(r"\s*")


def parse(line: str, tools: list[dict[str, Any]], number: int) -> str | m.Message:
    """What a typed line means: a call where its first word is a tool, else a text.

    `tool 5 left` fills the parameters in order, `tool n=5` by name, `tool {"n": 5}` all at once. A value is
    JSON (also with spaces in it), text in quotes, or a word.

    Raises:
        ConfigError: quotes or brackets are not closed, a parameter is given twice, or there are more values
            than parameters.
    """
    known = {tool["function"]["name"]: tool["function"] for tool in tools}
    first, rest = [*line.split(maxsplit=1), "", ""][:2]
    if first not in known:
        return line
    properties = known[first].get("parameters", {}).get("properties", {})
    arguments = _whole(rest, properties)
    if arguments is None:
        arguments = _one_by_one(first, rest, properties)
    return m.assistant("", [m.tool_call(first, id=f"call_{number}", **arguments)])


def _whole(rest: str, properties: dict[str, Any]) -> dict[str, Any] | None:
    """All arguments as one JSON object; None where the line is written otherwise."""
    if not rest.lstrip().startswith("{"):
        return None
    try:
        value = json.loads(rest)
    except ValueError:
        return None
    first: dict[str, Any] = next(iter(properties.values()), {})
    if isinstance(value, dict) and (set(value) <= set(properties) or not _accepts("object", first)):
        return value
    return None


def _one_by_one(tool: str, rest: str, properties: dict[str, Any]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    position = _skip(rest, 0)
    while position < len(rest):
        named = _NAME.match(rest, position)
        if named is not None:
            name, position = named.group(1), named.end()
        else:
            name = next((one for one in properties if one not in arguments), "")
            if not name:
                raise ConfigError(
                    f"{tool} takes {len(properties)} values", fix="put quotes around text with spaces"
                )
        if name in arguments:
            raise ConfigError(f"{tool} was given {name} twice", fix="give it once")
        arguments[name], position = _value(rest, position, name, properties.get(name, {}))
        position = _skip(rest, position)
    return arguments


def _value(text: str, start: int, name: str, schema: dict[str, Any]) -> tuple[Any, int]:
    """The value that begins at `start`, and where it ends."""
    opening = text[start : start + 1]
    if opening and opening in '{["':
        problem = "a space is missing behind it"
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
            if end == len(text) or text[end].isspace():
                as_text = value if isinstance(value, str) else text[start:end]
                return _of_kind(as_text, schema), end
        except ValueError as error:
            problem = str(error)
        if opening != '"' and not _accepts("string", schema):
            raise ConfigError(
                f"the value of {name} is not JSON: {problem}", fix="close its brackets and quotes"
            )
    stream = io.StringIO(text[start:])
    words = shlex.shlex(stream, posix=True)
    words.whitespace_split, words.commenters = True, ""
    try:
        # `name=` at the end, or before a space, is the empty text: shlex would read on to the next word.
        word = words.get_token() if opening and not opening.isspace() else ""
    except ValueError as error:
        raise ConfigError(f"the line cannot be read: {error}", fix="close the quotes") from error
    return _of_kind(word or "", schema), start + stream.tell()


def _of_kind(text: str, schema: dict[str, Any]) -> Any:
    """A typed value as the parameter wants it: text where it takes text, else JSON, else text again."""
    if _accepts("string", schema) and not (text == "null" and _accepts("null", schema)):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _accepts(kind: str, schema: dict[str, Any]) -> bool:
    """Whether a schema names a JSON type, alone or among others."""
    named = schema.get("type")
    return kind == named or any(_accepts(kind, one) for one in schema.get("anyOf", ()))


def _skip(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return found.end() if found else position
