"""Action formats: what a model writes becomes calls, and nothing it writes is lost or raises."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiderl.agent.formats as formats
from tiderl.agent.formats import ActionFormat, FormatError, UnknownFormat, get_format, list_formats
from tiderl.env import messages as m
from tiderl.env.schemas import ToolFault
from tiderl.env.tools import bind, collect, tool


class Desk:
    """Tools of many shapes."""

    @tool
    def calc(self, expression: str) -> str:
        """Evaluate an expression. It may have brackets."""
        return expression

    @tool
    def answer(self, number: float) -> None:
        """Give the answer."""

    @tool
    def try_code(self, n: int) -> None:
        """Try one code."""

    @tool
    def move(self, x: int, y: int, fast: bool = False) -> None:
        """Move the pointer."""

    @tool
    def look(self) -> None:
        """Look around."""


DESK = collect(Desk)
LINES, HERMES, TEXT = (get_format(name) for name in ("lines", "hermes", "text"))
TOOLS = [made.schema for made in DESK.values()]


def calls(action):
    return [
        (c["id"], c["function"]["name"], json.loads(c["function"]["arguments"]))
        for c in action.get("tool_calls", [])
    ]


@pytest.mark.parametrize("name", ["hermes", "lines", "text"])
def test_built_in_formats_are_found_through_entry_points(name):
    assert name in list_formats()
    made = get_format(name)
    assert isinstance(made, ActionFormat)
    assert made.name == name


def test_unknown_format_names_near_matches():
    with pytest.raises(UnknownFormat, match=r"'herms'.*hermes"):
        get_format("herms")


def test_unknown_format_without_near_match_lists_all():
    with pytest.raises(UnknownFormat, match=r"hermes, lines, text"):
        get_format("qqqqqqq")


def test_broken_format_plug_in_is_an_error_that_names_it(monkeypatch):
    from importlib.metadata import EntryPoint

    bad = EntryPoint("bad", "tiderl_no_such_module:Format", formats.GROUP)
    half = EntryPoint("half", "json:JSONDecoder", formats.GROUP)
    monkeypatch.setattr(formats, "_installed", lambda: {"bad": bad, "half": half})
    with pytest.raises(FormatError, match="tiderl_no_such_module"):
        get_format("bad")
    with pytest.raises(FormatError, match="lacks parts"):
        get_format("half")


# lines ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CALC: 31+14", ("calc", {"expression": "31+14"})),
        ("  calc :  31+14  \n", ("calc", {"expression": "31+14"})),
        ("cALC: (3+4)*2", ("calc", {"expression": "(3+4)*2"})),
        ("ANSWER: 45", ("answer", {"number": 45})),
        ("answer: -2.5", ("answer", {"number": -2.5})),
        ("ANSWER: forty", ("answer", {"number": "forty"})),
        ("Answer: nan", ("answer", {"number": "nan"})),
        ("TRY_CODE: 12", ("try_code", {"n": 12})),
        ("Try code: 12", ("try_code", {"n": 12})),
        ("try-code: 1e3", ("try_code", {"n": "1e3"})),
        ("MOVE: 3, 4", ("move", {"x": 3, "y": 4})),
        ("MOVE: 3, 4, yes", ("move", {"x": 3, "y": 4, "fast": True})),
        ("MOVE: 3", ("move", {"x": 3})),
        ("CALC:", ("calc", {})),
        ("LOOK:", ("look", {})),
        ("look", ("look", {})),
        ("CALC: a: b", ("calc", {"expression": "a: b"})),
    ],
)
def test_lines_reads_a_call(text, expected):
    action = LINES.parse(text, TOOLS, "call_3")
    assert calls(action) == [("call_3_0", *expected)]
    assert action["content"] == ""
    m.validate_message(action)


def test_lines_several_matching_lines_are_parallel_calls_and_the_rest_is_content():
    action = LINES.parse("First I add.\nCALC: 1+1\nthen\nANSWER: 2", TOOLS, "call_0")
    assert calls(action) == [
        ("call_0_0", "calc", {"expression": "1+1"}),
        ("call_0_1", "answer", {"number": 2}),
    ]
    assert action["content"] == "First I add.\nthen"


@pytest.mark.parametrize(
    "text", ["", "the answer is 45", "CALCULATOR: 1", "calc 31+14", ": 3", "look at me: x"]
)
def test_lines_without_a_match_is_plain_text(text):
    assert LINES.parse(text, TOOLS, "call_0") == {"role": "assistant", "content": text}


def test_t54_lines_value_of_the_wrong_type_reaches_the_environment_as_it_was_written():
    action = LINES.parse("TRY_CODE: twelve", TOOLS, "call_0")
    with pytest.raises(ToolFault, match="twelve"):
        bind(DESK["try_code"], action["tool_calls"][0]["function"]["arguments"])


def test_lines_types_enums_unions_lists_and_null():
    schema = {
        "name": "set",
        "parameters": {
            "type": "object",
            "properties": {
                "colour": {"type": "string", "enum": ["Red", "green"]},
                "size": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "many": {"type": ["string", "number"]},
                "items": {"type": "array", "items": {"type": "integer"}},
            },
        },
    }
    found = LINES.parse("SET: RED, none, 2.5, [1, 2]", [schema], "c")
    assert calls(found)[0][2] == {"colour": "Red", "size": None, "many": 2.5, "items": [1, 2]}


def test_lines_result_is_a_user_message_and_keeps_images():
    import numpy as np

    made = LINES
    assert made.render_result(m.tool("call_0_0", "calc", "45")) == {"role": "user", "content": "RESULT: 45"}
    image = np.zeros((2, 3, 3), np.uint8)
    shown = made.render_result(m.tool("call_0_0", "look", "seen", image))
    assert shown["role"] == "user"
    assert m.text_of(shown) == "RESULT: seen"
    assert m.images_of(shown)[0].shape == (2, 3, 3)


def test_lines_instructions_come_from_the_schemas():
    text = LINES.instructions(TOOLS)
    assert "CALC: <expression> - Evaluate an expression." in text
    assert "MOVE: <x>, <y>, <fast>" in text
    assert LINES.instructions([]) is None


def test_lines_refuses_to_write_what_it_could_not_read():
    made = LINES
    with pytest.raises(FormatError, match="calc"):
        made.render_call(m.assistant("", [m.tool_call("calc", expression="1\n2")]))
    with pytest.raises(FormatError, match="move"):
        made.render_call(m.assistant("", [m.tool_call("move", x="1,2", y=3)]))


@given(
    expression=st.text(min_size=1).filter(lambda s: s == s.strip() and "\n" not in s),
    x=st.integers(-(10**9), 10**9),
    y=st.integers(-(10**9), 10**9),
    fast=st.booleans(),
    number=st.floats(allow_nan=False, allow_infinity=False),
)
def test_lines_reads_what_it_writes(expression, x, y, fast, number):
    given_calls = [
        m.tool_call("calc", "call_1_0", expression=expression),
        m.tool_call("move", "call_1_1", x=x, y=y, fast=fast),
        m.tool_call("answer", "call_1_2", number=number),
        m.tool_call("look", "call_1_3"),
    ]
    text = LINES.render_call(m.assistant("", given_calls))
    assert calls(LINES.parse(text, TOOLS, "call_1")) == calls({"tool_calls": given_calls})


# hermes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "try_code", "arguments": {"n": 5}}\n</tool_call>',
        '<tool_call>{"name":"try_code","arguments":{"n":5}}</tool_call>',
        '<tool_call>{"arguments": "{\\"n\\": 5}", "name": "try_code"}</tool_call>',
        '<tool_call>{"name": "try_code", "parameters": {"n": 5}}</tool_call>',
        '<tool_call>{"name": "try_code", "arguments": {"n": 5}}',
        '<think>maybe <tool_call>{"name": "look"}</tool_call></think>\n'
        '<tool_call>{"name": "try_code", "arguments": {"n": 5}}</tool_call>',
        'or <tool_call>{"name": "look"}</tool_call>?</think><tool_call>{"name": "try_code", '
        '"arguments": {"n": 5}}</tool_call>',
    ],
)
def test_hermes_reads_a_call(text):
    action = HERMES.parse(text, TOOLS, "call_0")
    assert calls(action) == [("call_0_0", "try_code", {"n": 5})]
    m.validate_message(action)


def test_hermes_reads_parallel_calls_and_keeps_the_text_around_them():
    text = (
        'I will.\n<tool_call>{"name": "look"}</tool_call>\n'
        '<tool_call>{"name": "answer", "arguments": {"number": 1}}\n'
        '{"name": "look", "arguments": {}}</tool_call>'
    )
    action = HERMES.parse(text, TOOLS, "call_2")
    assert calls(action) == [
        ("call_2_0", "look", {}),
        ("call_2_1", "answer", {"number": 1}),
        ("call_2_2", "look", {}),
    ]
    assert action["content"] == "I will."


def test_hermes_open_thought_is_no_call():
    text = '<think>I might <tool_call>{"name": "look"}</tool_call>'
    assert HERMES.parse(text, TOOLS, "c") == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    "block",
    [
        '{"name": "try_code", "arguments": {"n": 5',  # T54
        '{"arguments": {"n": 5}}',  # T56: no name
        '{"name": "try_code", "arguments": {"n": 5}} and more',  # T56: extra data
        '{"name": "try_code", "arguments": [5]}',  # T56: a list
        '{"name": "", "arguments": {}}',
        '{"name": 7}',
        "try_code(5)",
        "[1, 2]",
        "",
    ],
)
def test_t54_t56_faulty_call_becomes_a_call_the_environment_can_answer(block):
    action = HERMES.parse(f"<tool_call>{block}</tool_call>", TOOLS, "call_0")
    m.validate_message(action)
    function = action["tool_calls"][0]["function"]
    if function["name"]:
        with pytest.raises(ToolFault):
            bind(DESK[function["name"]], function["arguments"])
    else:
        assert function["arguments"] == block


def test_c64_call_cut_by_length_keeps_its_name_and_raw_text():
    text = '<tool_call>\n{"name": "calc", "arguments": {"expression": "for i in ra'
    action = HERMES.parse(text, TOOLS, "call_0")
    function = action["tool_calls"][0]["function"]
    assert function["name"] == "calc"
    with pytest.raises(ToolFault, match="not valid JSON"):
        bind(DESK["calc"], function["arguments"])


def test_hermes_never_sends_what_the_wire_cannot_carry():
    text = r'<tool_call>{"name": "calc", "arguments": {"expression": "\ud800"}}</tool_call>'
    action = HERMES.parse(text, TOOLS, "c")
    json.dumps(action, ensure_ascii=False).encode("utf-8")


@given(st.text())
def test_no_format_raises_or_loses_text(text):
    for made in (HERMES, LINES, TEXT):
        action = made.parse(text, TOOLS, "c")
        m.validate_message(action)
        if not action.get("tool_calls"):
            assert action["content"] == text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8),
        json_values | st.sampled_from(["</tool_call>", "<tool_call>", "a <think>", "</think>"]),
        max_size=3,
    ),
    st.text(max_size=20),
)
def test_hermes_reads_what_it_writes(arguments, said):
    call = {"id": "c_0", "type": "function", "function": {"name": "calc", "arguments": json.dumps(arguments)}}
    text = HERMES.render_call(m.assistant(said.replace("<", ""), [call]))
    assert calls(HERMES.parse(text, TOOLS, "c")) == [("c_0", "calc", arguments)]


@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "look"}', " x "])
    )
)
def test_hermes_reads_any_order_of_tags(pieces):
    text = "".join(pieces)
    action = HERMES.parse(text, TOOLS, "c")
    m.validate_message(action)
    assert action.get("tool_calls") or action["content"] == text


def test_hermes_instructions_hold_the_schemas():
    made = HERMES
    assert '"name": "calc"' in made.instructions(TOOLS)
    assert made.instructions([]) is None


def test_hermes_result_stands_in_tags():
    shown = HERMES.render_result(m.tool("c", "calc", "45"))
    assert shown == {"role": "user", "content": "<tool_response>\n45\n</tool_response>"}


def test_text_format_cannot_write_calls():
    made = TEXT
    assert made.instructions(TOOLS) is None
    assert made.render_result(m.tool("c", "calc", "45")) == {"role": "user", "content": "45"}
    with pytest.raises(FormatError):
        made.render_call(m.assistant("", [m.tool_call("look")]))
