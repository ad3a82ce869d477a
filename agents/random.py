"""The random policy: a floor for every environment.

Invariant: what it says depends on the episode's seed and on what the environment said, on nothing else.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tiderl.agent.policy import Action, Message, Policy, PolicyOptions, PolicyState
from tiderl.env.messages import text_of
from tiderl.errors import ConfigError

if TYPE_CHECKING:
    from tiderl.hub.base import SessionSpec

WORDS = ("yes", "no", "left", "right", "up", "down", "a", "b", "c", "0", "1", "2", "3", "the", "open", "stop")
SPAN = 100
"""Numbers without bounds are drawn from -SPAN..SPAN."""
DEEPEST = 6
"""Below this depth a recursive schema gets its shortest value."""


class RandomPolicy(Policy):
    """`random`: a tool drawn uniformly, with arguments drawn by its JSON schema.

    Where there are no tools: one to six words, drawn from those the environment used and a few common ones.
    """

    name = "random"

    def __init__(self, argument: str = "", options: PolicyOptions | None = None) -> None:
        if argument:
            raise ConfigError(
                f"the policy random takes no argument, not {argument!r}", fix="say just `random`"
            )
        if options is not None:
            options.only("random")

    async def act(self, messages: Sequence[Message], spec: SessionSpec, state: PolicyState) -> Action:
        """Never fails: every schema gets some value."""
        rng = state.rng
        if not spec.tools:
            return random_text(rng, messages)
        function = rng.choice(spec.tools)["function"]
        schema = function.get("parameters") or {"type": "object"}
        arguments = random_value(schema, rng)
        call = {
            "id": f"call_{len(state.messages)}",
            "type": "function",
            "function": {"name": function["name"], "arguments": json.dumps(arguments)},
        }
        return {"role": "assistant", "content": None, "tool_calls": [call]}


def random_text(rng: random.Random, messages: Sequence[Message]) -> str:
    """One to six words."""
    said = re.findall(r"\w+", " ".join(text_of(m) for m in messages))
    vocabulary = [*said, *WORDS]
    return " ".join(rng.choice(vocabulary) for _ in range(rng.randint(1, 6)))


def random_value(
    schema: Any, rng: random.Random, *, root: Mapping[str, Any] | None = None, depth: int = 0
) -> Any:
    """A value that a JSON schema allows, as far as types, enums, bounds, items and properties say.

    Args:
        schema: a JSON schema; `True` and schemas without a type allow anything.
        rng: the only source of chance.
        root: the schema in which `$ref` is looked up; the outermost one by default.
    """
    if not isinstance(schema, Mapping):
        return rng.choice(WORDS)
    root = schema if root is None else root
    if "$ref" in schema:
        if depth > DEEPEST:
            return None
        return random_value(_lookup(root, str(schema["$ref"])), rng, root=root, depth=depth + 1)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return rng.choice(list(schema["enum"]))
    for key in ("anyOf", "oneOf"):
        if schema.get(key):
            return random_value(rng.choice(list(schema[key])), rng, root=root, depth=depth + 1)
    if schema.get("allOf"):
        merged: dict[str, Any] = {k: v for k, v in schema.items() if k != "allOf"}
        for part in schema["allOf"]:
            merged.update(part)
        return random_value(merged, rng, root=root, depth=depth + 1)
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = rng.choice(kind) if kind else None
    if kind is None:
        kind = "object" if "properties" in schema else "array" if "items" in schema else "string"
    return _of_kind(kind, schema, rng, root, depth)


def _of_kind(
    kind: str, schema: Mapping[str, Any], rng: random.Random, root: Mapping[str, Any], depth: int
) -> Any:
    if kind == "null":
        return None
    if kind == "boolean":
        return rng.random() < 0.5
    if kind in ("integer", "number"):
        return _number(kind, schema, rng)
    if kind == "array":
        low = int(schema.get("minItems", 0))
        high = max(low, min(int(schema.get("maxItems", low + 3)), low + 3))
        count = low if depth > DEEPEST else rng.randint(low, high)
        items = schema.get("items", {})
        return [random_value(items, rng, root=root, depth=depth + 1) for _ in range(count)]
    if kind == "object":
        properties = schema.get("properties") or {}
        required = set(schema.get("required", ()))
        return {
            name: random_value(part, rng, root=root, depth=depth + 1)
            for name, part in properties.items()
            if name in required or (depth <= DEEPEST and rng.random() < 0.5)
        }
    return _string(schema, rng)


def _number(kind: str, schema: Mapping[str, Any], rng: random.Random) -> int | float:
    low, high = schema.get("minimum"), schema.get("maximum")
    step = 1 if kind == "integer" else 1e-9
    if "exclusiveMinimum" in schema:
        low = schema["exclusiveMinimum"] + step
    if "exclusiveMaximum" in schema:
        high = schema["exclusiveMaximum"] - step
    if low is None:
        low = -SPAN if high is None else min(-SPAN, high - SPAN)
    if high is None:
        high = max(SPAN, low + SPAN)
    if kind == "number":
        return round(rng.uniform(float(low), float(high)), 6)
    first, last = -int(-low // 1), int(high // 1)
    return rng.randint(first, max(first, last))


def _string(schema: Mapping[str, Any], rng: random.Random) -> str:
    text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 3)))
    low, high = int(schema.get("minLength", 0)), schema.get("maxLength")
    text = text.ljust(low, "x")
    return text if high is None else text[: int(high)]


def _lookup(root: Mapping[str, Any], pointer: str) -> Any:
    found: Any = root
    for part in pointer.removeprefix("#").strip("/").split("/"):
        part = part.replace("~1", "/").replace("~0", "~")
        found = found.get(part, {}) if isinstance(found, Mapping) else {}
    return found
