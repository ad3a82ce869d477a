"""The players that a check lets act: nothing, at random, broken calls.

Invariant: every action depends only on the arguments (tool schemas, generator), never on global state,
so that two episodes with the same generator seed send the same actions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

NOOP = ""
"""The reply of a model that says nothing and calls nothing."""

_WORDS = ("yes", "no", "left", "right", "open", "0", "1", "7", "42", "hello", "unknown", "a b c")


def call(name: Any, arguments: Any, call_id: str = "call_0") -> dict[str, Any]:
    """An assistant message with one tool call; `arguments` goes out as it is when it is a string."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    function = {"name": name, "arguments": text}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def random_action(rng: np.random.Generator, tools: Sequence[dict[str, Any]]) -> Any:
    """A valid call of a random tool with random arguments, or a random short text without tools."""
    if not tools:
        return " ".join(_WORDS[int(rng.integers(len(_WORDS)))] for _ in range(int(rng.integers(1, 4))))
    function = tools[int(rng.integers(len(tools)))]["function"]
    schema = function.get("parameters") or {}
    arguments = random_value({"type": "object", **schema}, rng, schema.get("$defs", {}))
    return call(function["name"], arguments, f"call_{int(rng.integers(1_000_000))}")


def random_value(schema: dict[str, Any], rng: np.random.Generator, defs: dict[str, Any]) -> Any:
    """A random value that a JSON schema accepts; covers what type hints of tools turn into."""
    if "$ref" in schema:
        return random_value(defs.get(str(schema["$ref"]).rsplit("/", 1)[-1], {}), rng, defs)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][int(rng.integers(len(schema["enum"])))]
    for union in ("anyOf", "oneOf"):
        if schema.get(union):
            return random_value(schema[union][int(rng.integers(len(schema[union])))], rng, defs)
    kind = schema.get("type", "string")
    if isinstance(kind, list):
        kind = kind[int(rng.integers(len(kind)))]
    if kind == "object":
        return {key: random_value(value, rng, defs) for key, value in schema.get("properties", {}).items()}
    if kind == "array":
        size = int(schema.get("minItems", rng.integers(0, 3)))
        items = schema.get("prefixItems") or [schema.get("items", {})] * size
        return [random_value(item, rng, defs) for item in items]
    if kind in ("integer", "number"):
        low, high = schema.get("minimum", -10), schema.get("maximum", 100)
        if kind == "integer":
            return int(rng.integers(int(low), int(max(low, high)) + 1))
        return float(low + (max(low, high) - low) * rng.random())
    if kind == "boolean":
        return bool(rng.integers(2))
    if kind == "null":
        return None
    return _WORDS[int(rng.integers(len(_WORDS)))]


@dataclass(frozen=True)
class Malformed:
    """A broken action. `certain`: an environment with tools must mark it as `invalid_action`."""

    label: str
    action: Any
    certain: bool = True


def malformed_actions(tools: Sequence[dict[str, Any]]) -> list[Malformed]:
    """Broken calls that models do send; each must be answered by an observation."""
    name = tools[0]["function"]["name"] if tools else "no_such_tool"
    broken = [
        Malformed("a call of a tool that does not exist", call("no_such_tool", {})),
        Malformed("arguments that are cut off", call(name, '{"n": 5')),
        Malformed("arguments that are a list", call(name, "[1, 2]")),
        Malformed("arguments with text after the JSON", call(name, "{} and so on")),
        Malformed("arguments that are no JSON", call(name, "n=5")),
        Malformed("a name that is null", call(None, {})),
        Malformed("a name that is a number", call(7, {})),
        Malformed("a call without a function", {**call(name, {}), "tool_calls": [{"id": "call_0"}]}),
        Malformed("tool_calls that is a text", {**call(name, {}), "tool_calls": "compare(5)"}),
        Malformed("content that is null and no call", {"role": "assistant", "content": None}, certain=False),
        Malformed("a text of 100 000 characters", "word " * 20_000, certain=False),
        Malformed("a text with control characters", "\x00\x1b[2J\u202e\U0001f30a", certain=False),
    ]
    for tool in tools:
        function = tool["function"]
        schema = function.get("parameters") or {}
        required = schema.get("required", [])
        if required:
            broken.append(
                Malformed(f"{function['name']} without {required[0]!r}", call(function["name"], {}))
            )
        wrong = {
            key: {"integer": "many", "number": "many", "boolean": "perhaps", "string": {"a": 1}}.get(
                str(schema["properties"][key].get("type")), {"a": 1}
            )
            for key in required
        }
        if wrong:
            broken.append(
                Malformed(
                    f"{function['name']} with wrong types", call(function["name"], wrong), certain=False
                )
            )
    return broken
