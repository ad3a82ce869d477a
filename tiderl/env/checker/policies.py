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

from tiderl.env.tools import sample_call

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


def random_action(rng: np.random.Generator, tools: Sequence[dict[str, Any]], calls: int = 1) -> Any:
    """Well-formed calls of random tools with random arguments, or a random short text without tools."""
    if not tools:
        return " ".join(_WORDS[int(rng.integers(len(_WORDS)))] for _ in range(int(rng.integers(1, 4))))
    complete = [{"function": {**tool["function"], "parameters": _parameters(tool)}} for tool in tools]
    made = [sample_call(complete, rng, f"call_{int(rng.integers(10**9))}") for _ in range(calls)]
    return {"role": "assistant", "content": "", "tool_calls": made}


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool's parameter schema with the keys that may be left out."""
    return {"properties": {}, "required": [], **(tool["function"].get("parameters") or {})}


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
        schema = _parameters(tool)
        required = schema["required"]
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
