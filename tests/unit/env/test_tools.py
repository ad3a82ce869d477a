"""Tools: schemas from type hints, and every malformed call told apart."""

from __future__ import annotations

import enum
import json
import pickle
from typing import Any, Literal, Optional

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiderl.env.schemas import kind_of, sample
from tiderl.env.tools import (
    MARK,
    Tool,
    ToolFault,
    bind,
    call_tool,
    collect,
    parse_arguments,
    sample_call,
    schema_of,
    tool,
)
from tiderl.errors import EnvironmentFault


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Box:
    @tool
    def everything(
        self,
        a: int,
        b: float,
        c: str,
        d: bool,
        e: list[int],
        f: dict,
        g: Literal["x", "y"],
        h: Optional[int],  # noqa: UP045 - the old spelling must work too
        i: Colour,
        j: int | str = 3,
        k: Level = Level.LOW,
        l: list[list[str]] = [],  # noqa: B006, E741 - only its schema is looked at
        m: dict[str, float] | None = None,
        n: tuple[int, ...] = (),
        o: Any = None,
    ):
        """Take one of each."""
        return (a, b, c, d, e, f, g, h, i, j, k, l, m, n, o)

    @tool(name="go-to", description="Walk there.")
    def walk(self, place: str, fast: bool = False):
        """Not this text."""

    @tool
    def google(self, x: int, y: int = 0):
        """Move the
        cursor.

        More words.

        Args:
            x: the column,
                from the left.
            y (int): the row.

        Returns:
            Nothing: of use.
        """

    @tool
    def sphinx(self, x: int, y: int = 0):
        """Move the cursor.

        :param x: the column,
            from the left.
        :param int y: the row.
        :returns: nothing
        """


def made(name: str) -> Tool:
    return getattr(getattr(Box, name), MARK)


def test_schema_of_every_kind_of_hint():
    schema = schema_of(Box.everything)
    assert schema["type"] == "function"
    function = schema["function"]
    assert function["name"] == "everything"
    assert function["description"] == "Take one of each."
    properties = function["parameters"]["properties"]
    assert properties == {
        "a": {"type": "integer"},
        "b": {"type": "number"},
        "c": {"type": "string"},
        "d": {"type": "boolean"},
        "e": {"type": "array", "items": {"type": "integer"}},
        "f": {"type": "object"},
        "g": {"type": "string", "enum": ["x", "y"]},
        "h": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "i": {"type": "string", "enum": ["red", "blue"]},
        "j": {"anyOf": [{"type": "integer"}, {"type": "string"}], "default": 3},
        "k": {"type": "integer", "enum": [1, 2], "default": 1},
        "l": {"type": "array", "items": {"type": "array", "items": {"type": "string"}}, "default": []},
        "m": {
            "anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}],
            "default": None,
        },
        "n": {"type": "array", "items": {"type": "integer"}, "default": []},
        "o": {"default": None},
    }
    assert function["parameters"]["required"] == list("abcdefghi")
    json.dumps(schema)


def test_schemas_share_nothing():
    first, second = schema_of(Box.everything), schema_of(Box.everything)
    first["function"]["parameters"]["properties"]["a"]["type"] = "changed"
    assert second["function"]["parameters"]["properties"]["a"]["type"] == "integer"


def test_values_arrive_with_their_python_types():
    raw = {
        "a": 1, "b": 2, "c": "s", "d": True, "e": [1], "f": {"x": [1]}, "g": "y", "h": None, "i": "blue",
        "j": "text", "k": 2, "l": [["a"]], "m": {"q": 1}, "n": [1, 2],
    }  # fmt: skip
    out = bind(made("everything"), json.dumps(raw))
    assert out["b"] == 2.0
    assert type(out["b"]) is float
    assert out["i"] is Colour.BLUE
    assert out["k"] is Level.HIGH
    assert out["n"] == (1, 2)
    assert out["m"] == {"q": 1.0}
    assert "o" not in out
    assert call_tool(Box(), collect(Box), {"function": {"name": "everything", "arguments": raw}})[0] == 1


@pytest.mark.parametrize(
    ("hint", "given_value", "taken"),
    [
        (int, "12", 12), (int, 5.0, 5), (int, " -3 ", -3), (float, "1.5", 1.5), (float, 2, 2.0),
        (str, 12, "12"), (bool, "True", True), (bool, "false", False), (Literal["left"], "LEFT", "left"),
        (Literal[1, 2], "2", 2), (Colour, "RED", Colour.RED), (int | str, "7", "7"), (str | int, 7, 7),
        (int | None, "7", 7), (list, [1, "a"], [1, "a"]),
    ],
)  # fmt: skip
def test_near_misses_are_taken(hint: Any, given_value: Any, taken: Any):
    found = kind_of(hint, "here").take(given_value, "x")
    assert found == taken
    assert type(found) is type(taken)


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (int, True), (int, 1.5), (int, "one"), (int, None), (int, [1]), (int, 1e400), (float, False),
        (float, "nan"), (float, "inf"), (float, "1e999"), (float, 10**400), (str, None), (str, ["a"]),
        (str, True), (bool, 1), (bool, "yes"), (list[int], "12"), (list[int], [1, "x"]), (dict, []),
        (dict[str, int], {"a": "b"}), (Literal["a"], "b"), (Literal[1], True), (Colour, "green"),
        (int | None, "x"), (None, 0),
    ],
)  # fmt: skip
def test_wrong_types_are_faults_that_name_the_argument(hint: Any, value: Any):
    with pytest.raises(ToolFault, match="speed"):
        kind_of(hint if hint is not None else type(None), "here").take(value, "speed")


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        ('{"place": "a"', "JSON"),
        ('{"place": "a"} extra', "JSON"),
        ("[1, 2]", "object"),
        ('"text"', "object"),
        ("3", "object"),
        ('{"place": "a", "place": "b"}', "twice"),
        ('{"place": {"a": 1, "a": 2}}', "twice"),
        ('{"place": NaN}', "NaN"),
        ("[" * 100_000, "JSON"),
        (b"{}", "object"),
        (7, "object"),
        ('{"where": "a"}', "where.*place"),
        ("{}", "place"),
        ("", "place"),
        (None, "place"),
        ('{"place": ["a"]}', "string"),
        ("1" * 300_000, "longer"),
    ],
)
def test_t56_malformed_arguments_are_told_apart(raw: Any, word: str):
    with pytest.raises(ToolFault, match=word):
        bind(made("walk"), raw)


@pytest.mark.parametrize("raw", ["", "  ", None, "{}", {}])
def test_no_arguments_may_be_spelled_in_many_ways(raw: Any):
    assert parse_arguments(raw) == {}


@given(st.one_of(st.text(), st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
       lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)))  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_no_call_of_any_shape_escapes_as_another_error(value: Any):
    tools = collect(Box)
    for call in (
        value,
        {"function": value},
        {"function": {"name": value, "arguments": "{}"}},
        {"function": {"name": "walk", "arguments": value}},
        {"function": {"name": "walk", "arguments": json.dumps({"place": value})}},
        {"function": {"name": "everything", "arguments": json.dumps({"a": value, "j": value})}},
    ):
        try:
            call_tool(Box(), tools, call)
        except ToolFault as fault:
            assert str(fault)


def test_unknown_tools_name_the_known_ones():
    with pytest.raises(ToolFault, match="go-to.*did you mean 'go-to'"):
        call_tool(Box(), collect(Box), {"function": {"name": "go_to", "arguments": "{}"}})
    with pytest.raises(ToolFault, match="no tools"):
        call_tool(Box(), {}, {"function": {"name": "x", "arguments": "{}"}})


@pytest.mark.parametrize("name", ["google", "sphinx"])
def test_docstrings_become_descriptions(name: str):
    function = schema_of(getattr(Box, name))["function"]
    assert function["description"].startswith("Move the cursor.")
    assert "Args" not in function["description"]
    assert ":param" not in function["description"]
    properties = function["parameters"]["properties"]
    assert properties["x"]["description"] == "the column, from the left."
    assert properties["y"]["description"] == "the row."


def test_name_and_description_can_be_given():
    function = schema_of(Box.walk)["function"]
    assert function["name"] == "go-to"
    assert function["description"] == "Walk there."


def test_faults_at_class_definition():
    with pytest.raises(EnvironmentFault, match="speed.*no type hint.*drive"):

        class _A:
            @tool
            def drive(self, speed):
                """Drive."""

    with pytest.raises(EnvironmentFault, match="by name"):

        class _B:
            @tool
            def drive(self, *speeds: int):
                """Drive."""

    with pytest.raises(EnvironmentFault, match="asynchronous"):

        class _C:
            @tool
            async def drive(self, speed: int):
                """Drive."""

    with pytest.raises(EnvironmentFault, match="not a tool name"):

        class _D:
            @tool(name="drive fast")
            def drive(self, speed: int):
                """Drive."""

    with pytest.raises(EnvironmentFault, match="not a tool"):
        schema_of(len)


def test_hints_without_a_schema_are_faults():
    class A:
        @tool
        def drive(self, speed: set[int]):
            """Drive."""

        @tool
        def fly(self, to: Nowhere):  # type: ignore[name-defined]  # noqa: F821
            """Fly."""

    with pytest.raises(EnvironmentFault, match=r"set\[int\].*drive"):
        schema_of(A.drive)
    with pytest.raises(EnvironmentFault, match="Nowhere"):
        schema_of(A.fly)


def test_local_types_in_string_annotations_are_found():
    class Local(enum.Enum):
        A = "a"

    class Holder:
        @tool
        def use(self, which: Local):
            """Use one."""

    assert schema_of(Holder.use)["function"]["parameters"]["properties"]["which"]["enum"] == ["a"]


def test_inheritance_overrides_and_removes():
    class Child(Box):
        sphinx = None

        @tool
        def google(self, z: str):
            """Another."""

    found = collect(Child)
    assert list(found) == ["everything", "go-to", "google"]
    assert list(found["google"].parameters) == ["z"]
    with pytest.raises(EnvironmentFault, match="go-to"):

        class _Twice(Box):
            @tool(name="go-to")
            def other(self, place: str):
                """Clash."""

        collect(_Twice)


def test_sampled_calls_are_well_formed():
    tools = collect(Box)
    schemas = [one.schema for one in tools.values()]
    rng = np.random.default_rng(0)
    for number in range(200):
        call = sample_call(schemas, rng, f"c{number}")
        bind(tools[call["function"]["name"]], call["function"]["arguments"])


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_sampled_values_are_taken(seed: int):
    for hint in (int, float, str, bool, list[list[int]], dict[str, int], Colour, int | None, Any):
        kind = kind_of(hint, "here")
        kind.take(sample(kind.schema, np.random.default_rng(seed)), "x")


def test_marked_methods_can_be_pickled():
    assert pickle.loads(pickle.dumps(Box().walk)).__name__ == "walk"
