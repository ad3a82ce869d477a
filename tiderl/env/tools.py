"""Tools: methods of an environment that a model can call.

Invariant: whatever a model sends as a call, `bind` either gives keyword arguments of the hinted types
or raises a `ToolFault` whose text says what to send instead; nothing else escapes.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

import numpy as np

from tiderl.env.schemas import Kind, ToolFault, kind_of, sample, shown
from tiderl.errors import EnvironmentFault, nearest

F = TypeVar("F", bound=Callable[..., Any])
MARK = "__tiderl_tool__"
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
MAX_ARGUMENT_CHARS = 200_000

__all__ = ["Tool", "ToolFault", "bind", "call_tool", "collect", "sample_call", "schema_of", "tool"]


@dataclass
class Tool:
    """One tool: its name, what it is for, and its parameters in order."""

    name: str
    attribute: str
    description: str
    function: Callable[..., Any]
    names: Mapping[str, Any]
    notes: dict[str, str] = field(default_factory=dict)
    _kinds: dict[str, Kind] | None = None

    @property
    def where(self) -> str:
        """`module.Class.method`, for error texts."""
        return f"{self.function.__module__}.{self.function.__qualname__}"

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The parameters without `self`, in order."""
        found = dict(inspect.signature(self.function).parameters)
        found.pop("self", None)
        return found

    @property
    def kinds(self) -> dict[str, Kind]:
        """Parameter name to `Kind`, made at first use so that hints may name later classes."""
        if self._kinds is None:
            try:
                hints = typing.get_type_hints(self.function, localns=dict(self.names), include_extras=True)
            except (NameError, TypeError, AttributeError) as error:
                raise EnvironmentFault(
                    f"the type hints of tool {self.name!r} cannot be read: {error}",
                    where=self.where,
                    fix="import or define the named type at module level",
                ) from error
            self._kinds = {name: kind_of(hints[name], f"{self.where}({name})") for name in self.parameters}
        return self._kinds

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as OpenAI's `tools` list wants it; a new object each time."""
        properties: dict[str, Any] = {}
        required = []
        for name, parameter in self.parameters.items():
            properties[name] = json.loads(json.dumps(self.kinds[name].schema))
            if name in self.notes:
                properties[name]["description"] = self.notes[name]
            if parameter.default is inspect.Parameter.empty:
                required.append(name)
            else:
                properties[name]["default"] = _json_default(parameter.default)
        function: dict[str, Any] = {
            "name": self.name,
            "description": self.description,
            "parameters": {"type": "object", "properties": properties, "required": required},
        }
        return {"type": "function", "function": function}


def _json_default(value: Any) -> Any:
    value = getattr(value, "value", value)
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return str(value)


@overload
def tool(function: F) -> F: ...
@overload
def tool(*, name: str | None = None, description: str | None = None) -> Callable[[F], F]: ...


def tool(
    function: F | None = None,
    *,
    name: str | None = None,
    description: str | None = None,
) -> F | Callable[[F], F]:
    """Make a method of an `AgentEnv` a tool that models can call.

    The schema comes from the type hints, the descriptions from the docstring (Google or Sphinx style),
    unless given here.

    Raises:
        EnvironmentFault: at class definition, when a parameter has no type hint or cannot be passed by
            name, or the method is asynchronous.
    """

    def mark(function: F) -> F:
        where = f"{function.__module__}.{function.__qualname__}"
        tool_name = name or function.__name__
        if not NAME.fullmatch(tool_name):
            raise EnvironmentFault(
                f"{tool_name!r} is not a tool name",
                where=where,
                fix="use letters, digits, _ and -, at most 64",
            )
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise EnvironmentFault(
                f"tool {tool_name!r} is asynchronous or a generator", where=where, fix="write a plain method"
            )
        for position, parameter in enumerate(inspect.signature(function).parameters.values()):
            if position == 0 and parameter.name == "self":
                continue
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise EnvironmentFault(
                    f"parameter {parameter} of tool {tool_name!r} cannot be passed by name",
                    where=where,
                    fix="write out the parameters one by one",
                )
            if parameter.annotation is parameter.empty:
                raise EnvironmentFault(
                    f"parameter {parameter.name!r} of tool {tool_name!r} has no type hint",
                    where=where,
                    fix=f"write {parameter.name}: int (or float, str, bool, list[...], Literal[...])",
                )
        text, notes = _docstring(inspect.getdoc(function) or "")
        made = Tool(
            tool_name,
            function.__name__,
            description if description is not None else text,
            function,
            _names_around(function),
            notes,
        )
        setattr(function, MARK, made)
        return function

    return mark if function is None else mark(function)


def _names_around(function: Callable[..., Any]) -> dict[str, Any]:
    """What the words in a method's string annotations mean where its class is being defined.

    Needed where a class inside a function (a test, a notebook cell) hints with a local type; only the
    words that the annotations use are kept.
    """
    hints = [hint for hint in function.__annotations__.values() if isinstance(hint, str)]
    words = {word for hint in hints for word in re.findall(r"[^\W\d]\w*", hint)}
    names: dict[str, Any] = {}
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    for _ in range(2):
        if frame is None or frame.f_locals is frame.f_globals:
            break
        for word in words & frame.f_locals.keys():
            names.setdefault(word, frame.f_locals[word])
        frame = frame.f_back
    return names


_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?):\s*$")
_GOOGLE = re.compile(r"^\s+(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
_SPHINX = re.compile(r"^:param\s+(?:[^:]*\s)?(\w+):\s*(.*)$")


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """A docstring's prose and its notes per parameter, Google or Sphinx style."""
    prose: list[str] = []
    notes: dict[str, str] = {}
    section, current = "", ""
    for line in text.splitlines():
        if match := _SECTION.match(line):
            section, current = match[1], ""
        elif match := _SPHINX.match(line.strip()):
            section, current = "sphinx", match[1]
            notes[current] = match[2].strip()
        elif line.strip().startswith(":"):
            section, current = "sphinx", ""
        elif section.startswith(("Arg", "Param")) and (match := _GOOGLE.match(line)):
            current = match[1]
            notes[current] = match[2].strip()
        elif section and (line.startswith(" ") or not line.strip()):
            if current and line.strip():
                notes[current] = f"{notes[current]} {line.strip()}".strip()
        else:
            section = ""
            prose.append(line)
    return re.sub(r"\s*\n\s*", " ", "\n".join(prose).strip()), notes


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The OpenAI tool schema of a method marked with `tool`."""
    made = getattr(function, MARK, None)
    if made is None:
        raise EnvironmentFault(f"{function!r} is not a tool", fix="decorate it with @tiderl.tool")
    return made.schema


def collect(cls: type) -> dict[str, Tool]:
    """All tools of a class by name, in the order of definition, base classes first."""
    found: dict[str, Tool] = {}
    for base in reversed(cls.__mro__):
        for attribute, value in vars(base).items():
            made = getattr(value, MARK, None)
            if made is None:
                if value is None:
                    found = {name: one for name, one in found.items() if one.attribute != attribute}
                continue
            if made.name in found and found[made.name].attribute != attribute:
                raise EnvironmentFault(
                    f"two methods are tools of the name {made.name!r}",
                    where=f"{cls.__module__}.{cls.__qualname__}",
                    fix="give one of them another name",
                )
            found[made.name] = made
    return found


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ToolFault(f"the argument {key!r} is given twice")
        out[key] = value
    return out


def _refuse_constant(word: str) -> Any:
    raise ToolFault(f"{word} is not a JSON number")


def parse_arguments(raw: Any) -> dict[str, Any]:
    """The arguments of a call as a dict; `raw` is a JSON string or already a dict, "" is {}.

    Raises:
        ToolFault: it is not a JSON object with every key once.
    """
    if isinstance(raw, dict):
        return dict(raw)
    if raw is None:
        return {}
    if not isinstance(raw, str):
        raise ToolFault(f"the arguments must be a JSON object, got {shown(raw)}")
    if not raw.strip():
        return {}
    if len(raw) > MAX_ARGUMENT_CHARS:
        raise ToolFault(f"the arguments are longer than {MAX_ARGUMENT_CHARS} characters")
    try:
        value = json.loads(raw, object_pairs_hook=_no_duplicates, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ToolFault(f"the arguments are not valid JSON ({error}): {shown(raw)}") from error
    if not isinstance(value, dict):
        raise ToolFault(f"the arguments must be a JSON object, got {shown(value)}")
    return value


def bind(made: Tool, raw: Any) -> dict[str, Any]:
    """Keyword arguments of the hinted types for one call.

    Raises:
        ToolFault: bad JSON, an unknown or missing argument, a value of another type.
    """
    given = parse_arguments(raw)
    parameters = made.parameters
    for name in given:
        if name not in parameters:
            known = ", ".join(parameters) or "none"
            raise ToolFault(f"{made.name} has no argument {shown(name)}; its arguments: {known}")
    bound = {}
    for name, parameter in parameters.items():
        if name in given:
            try:
                bound[name] = made.kinds[name].take(given[name], name)
            except RecursionError as error:
                raise ToolFault(f"{name} is nested too deeply") from error
        elif parameter.default is inspect.Parameter.empty:
            raise ToolFault(f"{made.name} needs the argument {name!r}")
    return bound


def call_name(call: Any) -> str | None:
    """The tool name in a call of any shape, or None."""
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and name else None


def call_tool(owner: Any, tools: Mapping[str, Tool], call: Any) -> Any:
    """Execute one call of any shape on `owner` and give what the method returned.

    Raises:
        ToolFault: the call is malformed; nothing was executed.
        Exception: whatever the method itself raised.
    """
    if not isinstance(call, dict):
        raise ToolFault(f"a tool call must be an object, got {shown(call)}")
    name = call_name(call)
    if name is None:
        raise ToolFault(f"the tool call has no function name: {shown(call.get('function'))}")
    made = tools.get(name)
    if made is None:
        if not tools:
            raise ToolFault(f"there is no tool {shown(name)}; this task has no tools")
        near = nearest(name, tools)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ToolFault(f"there is no tool {shown(name)}; the tools are: {', '.join(tools)}{hint}")
    arguments = bind(made, call["function"].get("arguments"))
    return getattr(owner, made.attribute)(**arguments)


def sample_call(schemas: Sequence[dict[str, Any]], rng: np.random.Generator, call_id: str) -> dict[str, Any]:
    """A random well-formed call of one of the tools; optional arguments are left out half of the time."""
    function = schemas[int(rng.integers(len(schemas)))]["function"]
    parameters = function["parameters"]
    arguments = {}
    for name, schema in parameters["properties"].items():
        if name in parameters["required"] or rng.random() < 0.5:
            arguments[name] = sample(schema, rng)
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": function["name"], "arguments": json.dumps(arguments)},
    }
