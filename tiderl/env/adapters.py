"""Families: one adapter that makes AgentEnvs of many foreign environments, by namespace.

Invariant: a family owns its namespace; `namespace/Name` always goes to the family's factory, and the
core knows nothing of what is behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tiderl.errors import EnvironmentFault


@dataclass(frozen=True)
class Family:
    """All environments of a namespace.

    Attributes:
        namespace: what stands before the slash.
        factory: `factory(name, **kwargs)` makes the `AgentEnv` for what stands after the slash; it
            raises `UnknownEnvironment` for a name it does not know.
        names: the names to list (not all that work need be listed).
        package: the distribution or module that brought it.
    """

    namespace: str
    factory: Callable[..., Any]
    names: Callable[[], Iterable[str]]
    package: str


_families: dict[str, Family] = {}


def register_family(
    namespace: str,
    factory: Callable[..., Any],
    names: Callable[[], Iterable[str]],
    package: str | None = None,
) -> Family:
    """Give a namespace to an adapter; doing it again replaces the same adapter only."""
    known = _families.get(namespace)
    package = package or factory.__module__.split(".")[0]
    if known is not None and known.package != package:
        raise EnvironmentFault(
            f"the namespace {namespace!r} belongs to {known.package}", where=package, fix="use another one"
        )
    _families[namespace] = family = Family(namespace, factory, names, package)
    return family


def family_of(env_id: str) -> Family | None:
    """The family that owns the namespace of an id, or None."""
    return _families.get(env_id.partition("/")[0])


def families() -> list[Family]:
    """All families, by namespace."""
    return [_families[name] for name in sorted(_families)]
