"""A typed line says what was typed, without loss, or is refused."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiderl
from tiderl.cli.play import usage
from tiderl.cli.typed import parse
from tiderl.errors import ConfigError


class Box(tiderl.AgentEnv):
    """Put things into a box."""

    @tiderl.tool
    def put(
        self,
        what: str,
        count: int = 1,
        tags: list[str] | None = None,
        where: dict | None = None,
        note: str | None = None,
    ) -> str:
        """Put something in."""
        return what

    @tiderl.tool
    def send(self, message: dict) -> str:
        """Send an object."""
        return str(message)


TOOLS = Box().tools


def arguments(line: str, name: str = "put") -> dict[str, Any]:
    action = parse(line, TOOLS, 3)
    assert isinstance(action, dict)
    (call,) = action["tool_calls"]
    assert call["id"] == "call_3"
    assert call["function"]["name"] == name
    found = json.loads(call["function"]["arguments"])
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("put what=pen count=2", {"what": "pen", "count": 2}),
        ("put pen 2", {"what": "pen", "count": 2}),
        ("  put\tpen   2  ", {"what": "pen", "count": 2}),
        ("put count=2 pen", {"what": "pen", "count": 2}),
        ("put 'a red pen'", {"what": "a red pen"}),
        ('put "a red pen"', {"what": "a red pen"}),
        ('put what="a = b"', {"what": "a = b"}),
        ("put 'a=b'", {"what": "a=b"}),
        ("put it\\'s", {"what": "it's"}),
        ("put 12", {"what": "12"}),
        ("put count=many", {"count": "many"}),
        ("put", {}),
        ("put no=such", {"no": "such"}),
        ("put what=", {"what": ""}),
        ("put what= count=2", {"what": "", "count": 2}),
        ('put ""', {"what": ""}),
        (r'put "say \"hi\""', {"what": 'say "hi"'}),
        (r'put what="a \"red\" pen" count=2', {"what": 'a "red" pen', "count": 2}),
        ('put pen tags=["a b", "c"] count=2', {"what": "pen", "tags": ["a b", "c"], "count": 2}),
        (
            'put pen 2 ["a b", "c"] {"x y": [1, {"z": "} ]"}]}',
            {
                "what": "pen",
                "count": 2,
                "tags": ["a b", "c"],
                "where": {"x y": [1, {"z": "} ]"}]},
            },
        ),
        ("put pen tags=[] where={}", {"what": "pen", "tags": [], "where": {}}),
        (r'put {"what": "a \"red\" pen", "count": 2}', {"what": 'a "red" pen', "count": 2}),
        ("put {}", {}),
        ('put { "what" : "x" }', {"what": "x"}),
        ('put {"waht": "x"}', {"waht": "x"}),  # a slip: the environment says so
        ('put what={"a": 1}', {"what": '{"a": 1}'}),  # text that looks like JSON stays text
        ('put what=["a", 1]', {"what": '["a", 1]'}),
        ("put what=[draft] count=1", {"what": "[draft]", "count": 1}),
        ("put pen note=12", {"what": "pen", "note": "12"}),
        ("put pen note=true", {"what": "pen", "note": "true"}),
        ("put pen note=null tags=null", {"what": "pen", "note": None, "tags": None}),
        ("put what=null", {"what": "null"}),
    ],
)
def test_a_line_that_begins_with_a_tool_is_a_call(line: str, expected: dict[str, Any]) -> None:
    assert arguments(line) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('send {"to": "x y"}', {"message": {"to": "x y"}}),
        ('send {"message": {"to": "x y"}}', {"message": {"to": "x y"}}),
        ('send message={"to": "x y"}', {"message": {"to": "x y"}}),
    ],
)
def test_an_object_for_a_parameter_that_takes_one(line: str, expected: dict[str, Any]) -> None:
    assert arguments(line, "send") == expected


@pytest.mark.parametrize("line", ["", "hello", "please put it", "puts pen", "it's", '{"what": "pen"}'])
def test_any_other_line_is_a_text(line: str) -> None:
    assert parse(line, TOOLS, 0) == line


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("put 'pen", "close the quotes"),
        ('put "pen', "close the quotes"),
        ("put a 1 [] {} b c", "takes 5 values"),
        ('put pen tags=["a b', "the value of tags is not JSON"),
        ('put pen where={"x": 1}y', "where"),
        ("put pen what=cap", "given what twice"),
    ],
)
def test_a_line_that_cannot_be_read_is_refused(line: str, said: str) -> None:
    try:
        found = parse(line, TOOLS, 0)
    except ConfigError as error:
        assert said in str(error)
    else:
        pytest.fail(f"{line!r} became {found!r}")


SCALARS = st.none() | st.booleans() | st.integers() | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
)


@given(st.text(), st.integers(), st.lists(st.text()), st.dictionaries(st.text(), VALUES))
def test_json_comes_through_whole_in_each_of_the_three_ways(
    what: str, count: int, tags: list[str], where: dict[str, Any]
) -> None:
    given = {"what": what, "count": count, "tags": tags, "where": where}
    in_order = " ".join(map(json.dumps, given.values()))
    by_name = "  ".join(f"{name}={json.dumps(value)}" for name, value in given.items())
    for line in (f"put {json.dumps(given)}", f"put {in_order}", f"put {by_name}"):
        assert arguments(line) == given


@given(st.lists(st.text(min_size=1).filter(lambda word: "\n" not in word), max_size=2))
def test_quoted_as_a_shell_would_quote(words: list[str]) -> None:
    line = "put " + " ".join(
        f"{name}={_quoted(word)}" for name, word in zip(("what", "note"), words, strict=False)
    )
    expected = dict(zip(("what", "note"), words, strict=False))
    if expected.get("note") == "null":
        expected["note"] = None  # type: ignore[assignment]
    assert arguments(line) == expected


def _quoted(word: str) -> str:
    plain = shlex.quote(word)
    return plain if plain.startswith("'") else f"'{plain}'"


@given(st.text() | st.text(alphabet="put what=count{}[]\"':, 1\\"))
def test_no_line_breaks_the_parser(text: str) -> None:
    for line in (text, f"put {text}", f"send {text}"):
        try:
            found = parse(line, TOOLS, 0)
        except ConfigError:
            continue
        assert isinstance(found, (str, dict))


def test_usage_shows_the_kinds_of_a_union() -> None:
    assert "[tags=<array|null>]" in usage(TOOLS[0])
