"""Random arguments fit their schema, and cover it."""

from __future__ import annotations

import enum
import random
from typing import Any, Literal

import pytest

from tiderl.agents.random import random_text, random_value
from tiderl.env.messages import user


def draws(schema: Any, n: int = 300) -> list[Any]:
    return [random_value(schema, random.Random(i)) for i in range(n)]


@pytest.mark.parametrize(
    ("schema", "check"),
    [
        ({"type": "integer", "minimum": 3, "maximum": 5}, lambda v: v in (3, 4, 5)),
        ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5}, lambda v: v == 4),
        ({"type": "integer", "minimum": 1000}, lambda v: isinstance(v, int) and v >= 1000),
        ({"type": "integer", "maximum": -1000}, lambda v: isinstance(v, int) and v <= -1000),
        ({"type": "integer", "minimum": 0.5, "maximum": 1.5}, lambda v: v == 1),
        ({"type": "number", "minimum": 0, "maximum": 1}, lambda v: isinstance(v, float) and 0 <= v <= 1),
        ({"type": "boolean"}, lambda v: v in (True, False)),
        ({"type": "null"}, lambda v: v is None),
        ({"enum": ["a", 1, None]}, lambda v: v in ("a", 1, None)),
        ({"const": "x"}, lambda v: v == "x"),
        ({"type": "string", "minLength": 30, "maxLength": 31}, lambda v: 30 <= len(v) <= 31),
        ({"type": "string", "maxLength": 0}, lambda v: v == ""),
        ({"type": ["integer", "null"]}, lambda v: v is None or isinstance(v, int)),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, lambda v: v is None or isinstance(v, int)),
        (
            {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 2},
            lambda v: 1 <= len(v) <= 2 and set(v) <= {1, 2},
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
                "required": ["a"],
            },
            lambda v: "a" in v and set(v) <= {"a", "b"},
        ),
        ({"$defs": {"c": {"enum": ["red"]}}, "$ref": "#/$defs/c"}, lambda v: v == "red"),
        ({"allOf": [{"type": "integer"}, {"minimum": 4, "maximum": 4}]}, lambda v: v == 4),
    ],
)
def test_values_fit_the_schema(schema: dict[str, Any], check: Any) -> None:
    assert all(check(v) for v in draws(schema))


def test_every_choice_comes_up() -> None:
    assert {v for v in draws({"enum": list("abcd")})} == set("abcd")
    assert {v for v in draws({"type": "integer", "minimum": 0, "maximum": 4})} == set(range(5))
    assert {len(v) for v in draws({"type": "object", "properties": {"a": {}, "b": {}}})} == {0, 1, 2}


def test_recursive_schema_ends() -> None:
    node = {
        "type": "object",
        "properties": {"next": {"$ref": "#"}, "all": {"type": "array", "items": {"$ref": "#"}}},
    }
    schema = node | {"required": ["next"]}
    assert all(isinstance(v, dict) for v in draws(schema, 30))


def test_odd_schemas_get_some_value() -> None:
    for schema in (True, {}, {"type": "mystery"}, {"type": []}, {"$ref": "#/nowhere"}):
        random_value(schema, random.Random(0))


def test_arguments_suit_a_real_tool() -> None:
    import tiderl
    from tiderl.env.tools import call_tool

    class Size(enum.Enum):
        S = "s"
        L = "l"

    class Shop(tiderl.AgentEnv):
        @tiderl.tool
        def buy(
            self, n: int, size: Size, how: Literal["now", "later"], tags: list[str], gift: bool = False
        ) -> str:
            """Buy."""
            return f"{n} {size.value} {how} {tags} {gift}"

    env = Shop()
    schema = env.tools[0]["function"]["parameters"]
    assert callable(call_tool)
    env.reset(seed=0)
    for i in range(15):
        import json

        arguments = json.dumps(random_value(schema, random.Random(i)))
        call = {"id": "c", "type": "function", "function": {"name": "buy", "arguments": arguments}}
        _, _, _, _, info = env.step({"role": "assistant", "content": None, "tool_calls": [call]})
        assert "invalid_action" not in info, arguments


def test_text_uses_the_environments_words() -> None:
    texts = [random_text(random.Random(i), [user("go xylophone")]) for i in range(200)]
    assert any("xylophone" in t for t in texts)
    assert all(1 <= len(t.split()) <= 6 for t in texts)
