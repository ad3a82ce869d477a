"""JSON schemas from Python type hints, and values checked against them.

Invariant: a value that `Kind.take` accepts has exactly the Python type that the hint promised; all
else is a `ToolFault` whose text tells a model what was expected.

Hints: int, float, str, bool, None, Any, list[T], tuple[T, ...], dict, dict[str, T], Literal, Optional
and unions, Enum classes.
"""

from __future__ import annotations

import enum
import math
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiderl.errors import EnvironmentFault


class ToolFault(Exception):
    """What is wrong with a tool call, worded for the model; becomes an observation, never an error."""


@dataclass(frozen=True)
class Kind:
    """One type hint: its JSON schema, and how a JSON value becomes the Python value."""

    schema: dict[str, Any]
    take: Callable[[Any, str], Any]


def shown(value: Any) -> str:
    """A JSON value in an error text, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _expected(name: str, what: str, value: Any) -> ToolFault:
    return ToolFault(f"{name} must be {what}, got {shown(value)}")


def _take_int(value: Any, name: str) -> int:
    if isinstance(value, bool):
        raise _expected(name, "an integer", value)
    if isinstance(value, int):
        return value
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    if isinstance(value, str) and len(value) <= 100:
        try:
            return int(value.strip())
        except ValueError:
            pass
    raise _expected(name, "an integer", value)


def _take_float(value: Any, name: str) -> float:
    if not isinstance(value, bool) and (
        isinstance(value, (int, float)) or (isinstance(value, str) and len(value) <= 100)
    ):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise _expected(name, "a number", value)


def _take_str(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise _expected(name, "a string", value)


def _take_bool(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    raise _expected(name, "true or false", value)


def _take_none(value: Any, name: str) -> None:
    if value is not None:
        raise _expected(name, "null", value)


def _take_dict(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _expected(name, "an object", value)
    return value


_PLAIN: dict[Any, Kind] = {
    int: Kind({"type": "integer"}, _take_int),
    float: Kind({"type": "number"}, _take_float),
    str: Kind({"type": "string"}, _take_str),
    bool: Kind({"type": "boolean"}, _take_bool),
    type(None): Kind({"type": "null"}, _take_none),
    dict: Kind({"type": "object"}, _take_dict),
    Any: Kind({}, lambda value, name: value),
    object: Kind({}, lambda value, name: value),
}


def choice(values: list[Any], build: Callable[[Any], Any]) -> Kind:
    """One of some JSON scalars; a string that spells a number or a differently cased word is taken."""
    kinds = {type(value) for value in values}
    json_type = {str: "string", int: "integer", float: "number", bool: "boolean"}
    schema: dict[str, Any] = {"enum": list(values)}
    if len(kinds) == 1 and (only := kinds.pop()) in json_type:
        schema = {"type": json_type[only], "enum": list(values)}
    words = {str(value).lower(): value for value in values}

    def take(value: Any, name: str) -> Any:
        for known in values:
            if type(known) is type(value) and known == value:
                return build(known)
        key = str(value).strip().lower()
        if isinstance(value, (str, int, float)) and len(words) == len(values) and key in words:
            return build(words[key])
        raise _expected(name, "one of " + ", ".join(repr(known) for known in values), value)

    return Kind(schema, take)


def _list(item: Kind, build: Callable[[list[Any]], Any]) -> Kind:
    def take(value: Any, name: str) -> Any:
        if not isinstance(value, list):
            raise _expected(name, "a list", value)
        return build([item.take(one, f"{name}[{index}]") for index, one in enumerate(value)])

    return Kind({"type": "array", "items": item.schema}, take)


def _mapping(item: Kind) -> Kind:
    def take(value: Any, name: str) -> dict[str, Any]:
        return {key: item.take(one, f"{name}.{key}") for key, one in _take_dict(value, name).items()}

    return Kind({"type": "object", "additionalProperties": item.schema}, take)


def _fits(schema: dict[str, Any], value: Any) -> bool:
    """Whether a JSON value is of the schema's own JSON type, before any conversion."""
    found = {
        bool: "boolean",
        int: "integer",
        float: "number",
        str: "string",
        list: "array",
        dict: "object",
        type(None): "null",
    }.get(type(value))
    wanted = schema.get("type")
    return wanted is None or wanted == found or (wanted == "number" and found == "integer")


def _union(kinds: list[Kind]) -> Kind:
    def take(value: Any, name: str) -> Any:
        order = sorted(kinds, key=lambda kind: not _fits(kind.schema, value))
        faults = []
        for kind in order:
            try:
                return kind.take(value, name)
            except ToolFault as fault:
                faults.append(str(fault))
        raise ToolFault(faults[0] if len(order) == 1 else " or ".join(dict.fromkeys(faults)))

    return Kind({"anyOf": [kind.schema for kind in kinds]}, take)


def kind_of(hint: Any, where: str) -> Kind:
    """The `Kind` of a type hint.

    Raises:
        EnvironmentFault: the hint cannot be shown to a model as JSON.
    """
    try:
        if hint in _PLAIN:
            return _PLAIN[hint]
    except TypeError:
        pass
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return kind_of(args[0], where)
    if origin is typing.Literal:
        return choice(list(args), lambda value: value)
    if origin in (typing.Union, types.UnionType):
        return _union([kind_of(arg, where) for arg in args])
    if hint is list or origin is list:
        return _list(kind_of(args[0], where) if args else _PLAIN[Any], lambda items: items)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return _list(kind_of(args[0], where), tuple)
    if origin is dict and args[0] is str:
        return _mapping(kind_of(args[1], where))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        members = {member.value: member for member in hint}
        if members and all(isinstance(value, (str, int, float)) for value in members):
            return choice(list(members), members.__getitem__)
    raise EnvironmentFault(
        f"the type hint {hint!r} cannot be turned into a JSON schema",
        where=where,
        fix="use int, float, str, bool, list[...], dict, Literal, Optional or an Enum of plain values",
    )


def sample(schema: dict[str, Any], rng: np.random.Generator) -> Any:
    """A random JSON value that a schema made here accepts; numbers are within -100..100."""
    if "enum" in schema:
        return schema["enum"][int(rng.integers(len(schema["enum"])))]
    if "anyOf" in schema:
        return sample(schema["anyOf"][int(rng.integers(len(schema["anyOf"])))], rng)
    kind = schema.get("type", "string")
    if kind == "integer":
        return int(rng.integers(-100, 101))
    if kind == "number":
        return round(float(rng.uniform(-100, 100)), 2)
    if kind == "boolean":
        return bool(rng.integers(2))
    if kind == "null":
        return None
    if kind == "array":
        return [sample(schema.get("items", {}), rng) for _ in range(int(rng.integers(3)))]
    if kind == "object":
        named = {name: sample(one, rng) for name, one in schema.get("properties", {}).items()}
        return named
    return "".join(rng.choice(list("abcdefghij 0123456789"), size=int(rng.integers(1, 9))))
