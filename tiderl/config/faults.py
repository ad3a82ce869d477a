"""What is wrong with a YAML file, in one sentence: the key, what it is, and what to do.

Invariant: an unknown key is named with the nearest known one at its place.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from tiderl.errors import ConfigError, nearest


def config_error(
    error: ValidationError,
    model: type[BaseModel],
    where: Callable[[str], str],
    *,
    tags: Collection[str] = (),
) -> ConfigError:
    """The first fault of `error`, which validating `model` has raised.

    Args:
        where: the file, or whatever a key was given by.
        tags: steps of a place that are the tag of a union, not a key.
    """
    # A misspelt key is a cause, the key that is then missing a consequence.
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    loc = [str(part) for part in first["loc"]]
    key = ".".join(part for part in loc if part not in tags)
    more = f" and {error.error_count() - 1} more fault(s)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        what, fix = f"unknown key '{key}'", _instead(key, _keys_at(model, loc[:-1]))
    elif first["type"] == "missing":
        what, fix = f"key '{key}' is missing", f"set {key}"
    elif first["type"] == "value_error":
        what, fix = str(first["ctx"]["error"]), "change one of the keys named"
    else:
        message = first["msg"][0].lower() + first["msg"][1:]
        what = f"key '{key}' is {first['input']!r}, but {message.replace('input ', 'it ')}"
        fix = f"set {key} accordingly"
    return ConfigError(what + more, where=where(key), fix=fix)


def _instead(key: str, known: Sequence[str]) -> str:
    parent, _, last = key.rpartition(".")
    if near := nearest(last, known, n=1):
        return f"did you mean '{parent + '.' if parent else ''}{near[0]}'?"
    return f"known keys here: {', '.join(known)}" if known else "remove it"


def _keys_at(model: type[BaseModel], loc: Sequence[str]) -> list[str]:
    """The keys known at a place; the tag of a union (a `kind`) is a step of the place, too."""
    here: list[type[BaseModel]] = [model]
    for part in loc:
        tagged = [one for one in here if part in typing.get_args(_kind_of(one))]
        if tagged:
            here = tagged
            continue
        fields = [one.model_fields[part].annotation for one in here if part in one.model_fields]
        here = [inner for annotation in fields for inner in _models_in(annotation)]
    return list(dict.fromkeys(name for one in here for name in one.model_fields))


def _kind_of(model: type[BaseModel]) -> Any:
    field = model.model_fields.get("kind")
    return field.annotation if field else None


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is not None:
        return [found for arg in typing.get_args(annotation) for found in _models_in(arg)]
    return []
