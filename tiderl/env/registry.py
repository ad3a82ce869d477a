"""Environments by id: our registry over Gymnasium's, filled by decorators and by entry points.

Invariant: an id names one environment; asking for it imports no more plug-ins than needed, a plug-in
that fails to import is kept with its error and never hides the others, and a spec says how another
process can make the same environment (`entry`).
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import gymnasium
from gymnasium.envs.registration import EnvSpec

from tiderl.env.adapters import families, family_of
from tiderl.env.base import AgentEnv
from tiderl.env.limits import Limits, limits_of
from tiderl.env.plain import place_of
from tiderl.env.plugins import BrokenPlugin, Plugins
from tiderl.errors import EnvironmentFault, TideError, UnknownEnvironment, nearest

GROUP = "tiderl.environments"
MAKE = "tiderl.env.registry:make"
FILE_PREFIX = "tiderl_file_"
ENV_ID = re.compile(r"[A-Za-z0-9_-]+/[A-Za-z0-9_.-]+-v\d+")
T = TypeVar("T")


@dataclass(frozen=True)
class EnvironmentSpec:
    """What is known of an environment without running an episode.

    `entry` is "module:Class" or "/path/file.py:Class" for `load_entry`, or None for a family member,
    which any process makes by its id; `kwargs` are the registered constructor arguments.
    """

    id: str
    description: str
    modality: str
    splits: tuple[str, ...]
    max_turns: int
    reward_range: tuple[float, float]
    package: str
    tools: list[dict[str, Any]]
    entry: str | None
    kwargs: dict[str, Any]
    limits: Limits
    has_oracle: bool
    oracle_maximum: bool


@dataclass
class _Entry:
    id: str
    target: Any
    kwargs: dict[str, Any]
    package: str
    nondeterministic: bool


_entries: dict[str, _Entry] = {}
_plugins = Plugins(GROUP)


def register(id: str, *, cls: Any = None, nondeterministic: bool = False, **kwargs: Any) -> Callable[[T], T]:
    """Register an environment under `namespace/Name-vN`; a decorator, or a call with `cls`.

    Args:
        id: the id.
        cls: an `AgentEnv` class, a function that makes one, or "module:Class" to import it late.
        nondeterministic: the same seed and actions may give other observations (live web, LLM users).
        kwargs: given to the constructor by `make`, before its own.

    Raises:
        EnvironmentFault: a malformed id, an instance instead of a class, or an id that is taken.
    """
    if not ENV_ID.fullmatch(id):
        raise EnvironmentFault(f"{id!r} is not an environment id", fix="name it like 'mine/Maze-v0'")

    def add(target: T) -> T:
        _check_target(id, target)
        name = _plugins.loading or _module_of(target).split(".")[0]
        entry = _Entry(id, target, dict(kwargs), name, nondeterministic)
        known = _entries.get(id)
        if known is not None and _entry_text(known.target) != _entry_text(target):
            raise EnvironmentFault(
                f"the id {id!r} is taken by {_entry_text(known.target)}",
                where=_entry_text(target),
                fix="use another namespace or the next version number",
            )
        if known is not None:
            entry.package = known.package
        _entries[id] = entry
        gymnasium.registry.pop(id, None)
        point, arguments = _gymnasium_entry(id, target, kwargs)
        gymnasium.register(id, entry_point=point, kwargs=arguments, nondeterministic=nondeterministic)
        return target

    if cls is not None:
        add(cls)
    return add


def _check_target(id: str, target: Any) -> None:
    if isinstance(target, str):
        if target.count(":") != 1:
            raise EnvironmentFault(f"{target!r} is no import path", where=id, fix="write 'module:Class'")
    elif isinstance(target, gymnasium.Env):
        raise EnvironmentFault(
            f"{id} was registered with an instance of {type(target).__name__}: all sessions would share it",
            fix="register the class or a function that makes a new one",
        )
    elif inspect.isclass(target) and not issubclass(target, AgentEnv):
        raise EnvironmentFault(
            f"{target.__qualname__} is no AgentEnv", where=id, fix="derive the class from tiderl.AgentEnv"
        )
    elif not callable(target):
        raise EnvironmentFault(f"{target!r} cannot make an environment", where=id, fix="register a class")


def _module_of(target: Any) -> str:
    return target.partition(":")[0] if isinstance(target, str) else target.__module__


def _gymnasium_entry(env_id: str, target: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """How Gymnasium makes it: an import path where another process can import it, else the object."""
    if isinstance(target, str):
        if target.rpartition(":")[0].endswith(".py"):
            return MAKE, {"env_id": env_id, **kwargs}
        return target, dict(kwargs)
    local = target.__module__ == "__main__" or "." in target.__qualname__
    if local or target.__module__.startswith(FILE_PREFIX):
        return target, dict(kwargs)
    return f"{target.__module__}:{target.__qualname__}", dict(kwargs)


def _entry_text(target: Any) -> str:
    """`module:Class`, or `file.py:Class` for a script."""
    if isinstance(target, str):
        return target
    module = target.__module__
    if module == "__main__" or module.startswith(FILE_PREFIX):
        file = getattr(sys.modules.get(module), "__file__", None)
        module = str(Path(file).resolve()) if file else module
    return f"{module}:{target.__qualname__}"


def load_entry(entry: str) -> Any:
    """The class or function that an `EnvironmentSpec.entry` names.

    Raises:
        EnvironmentFault: it cannot be imported; the text carries the cause.
    """
    where, _, name = entry.rpartition(":")
    try:
        if where.endswith(".py"):
            module = _module_from_file(Path(where))
        else:
            module = importlib.import_module(where)
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part)
        return found
    except TideError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentFault(
            f"{entry} cannot be imported: {type(error).__name__}: {error}",
            where=place_of(error),
            fix="repair or install it",
        ) from error


def _module_from_file(path: Path) -> Any:
    main = sys.modules.get("__main__")
    if main is not None and getattr(main, "__file__", None) and Path(str(main.__file__)).resolve() == path:
        return main
    name = FILE_PREFIX + re.sub(r"\W", "_", str(path))
    if name not in sys.modules:
        found = importlib.util.spec_from_file_location(name, path)
        if found is None or found.loader is None:
            raise ImportError(f"{path} is not a Python file")
        module = importlib.util.module_from_spec(found)
        sys.modules[name] = module
        try:
            found.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _take(name: str, found: Any) -> None:
    """What an entry point gave: under an id it is the environment, else a module or what registers them."""
    if ENV_ID.fullmatch(name):
        register(name, cls=found)
    elif callable(found):
        found()


def discover() -> None:
    """Load all plug-ins that are not loaded yet."""
    _plugins.load_all(_take)


def broken_plugins() -> list[BrokenPlugin]:
    """The plug-ins that failed to load, and the ids that cannot be described, with their errors."""
    list_environments()
    return list(_plugins.broken)


def _known() -> Iterator[str]:
    yield from _entries
    for family in families():
        yield from (f"{family.namespace}/{name}" for name in family.names())


def _has(env_id: str) -> bool:
    return env_id in _entries or family_of(env_id) is not None


def _ensure(env_id: str) -> None:
    """Load plug-ins until the id is known: those named like it, ours, then the others.

    Raises:
        UnknownEnvironment: with near matches, and the plug-ins that could not be loaded.
    """
    namespace = env_id.partition("/")[0]
    if _plugins.load_until(lambda: _has(env_id), (env_id, namespace), _take):
        return
    word = env_id.rpartition("/")[2].lower()
    near = nearest(env_id, _known()) or [known for known in _known() if word and word in known.lower()][:3]
    fix = f"did you mean {' or '.join(near)}?" if near else "see: tiderl env list"
    if _plugins.broken:
        broken = "; ".join(f"{one.name} of {one.package} ({one.error})" for one in _plugins.broken)
        fix += f"; plug-ins that could not be loaded: {broken}"
    raise UnknownEnvironment(f"there is no environment {env_id!r}", fix=fix)


def make(env_id: str, **kwargs: Any) -> AgentEnv:
    """A new environment in this process, without wrappers.

    Args:
        env_id: `namespace/Name-vN`; a leading `module:` is imported first, as Gymnasium does.
        kwargs: constructor arguments, over those given at registration.

    Raises:
        UnknownEnvironment: no such id; the text names near matches.
        EnvironmentFault: the class cannot be imported or constructed.
    """
    env_id = _import_prefix(env_id)
    _ensure(env_id)
    if (entry := _entries.get(env_id)) is None:
        family = family_of(env_id)
        assert family is not None
        env = family.factory(env_id.partition("/")[2], **kwargs)
        known = EnvSpec(env_id, entry_point=MAKE, kwargs={"env_id": env_id, **kwargs})
    else:
        target = load_entry(entry.target) if isinstance(entry.target, str) else entry.target
        arguments = entry.kwargs | kwargs
        env = _construct(env_id, target, arguments)
        known = dataclasses.replace(gymnasium.registry[env_id])
        known.kwargs = {**known.kwargs, **kwargs}
    if not isinstance(env, AgentEnv):
        raise EnvironmentFault(
            f"{env_id} made a {type(env).__name__}, which is no AgentEnv", fix="return an AgentEnv"
        )
    env.spec = known
    return env


def _construct(env_id: str, target: Any, arguments: dict[str, Any]) -> Any:
    try:
        inspect.signature(target).bind(**arguments)
    except TypeError as error:
        raise EnvironmentFault(f"{env_id} cannot be made: {error}", fix="check its arguments") from error
    except ValueError:
        pass  # no signature to check against
    try:
        return target(**arguments)
    except TideError:
        raise
    except Exception as error:
        raise EnvironmentFault(
            f"{env_id} cannot be made: {type(error).__name__}: {error}",
            where=place_of(error),
            fix="repair its __init__",
        ) from error


def _import_prefix(env_id: str) -> str:
    """Import the `module` of `module:id`, which may lie in the current folder, and return the id."""
    module, colon, rest = env_id.rpartition(":")
    if not colon:
        return rest
    if not all(part.isidentifier() for part in module.split(".")) or module.endswith(".py"):
        raise UnknownEnvironment(
            f"{module!r} of {env_id!r} is not the name of a module", fix=_as_module(Path(module), rest)
        )
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # at the end: a file here never hides an installed module
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        fix = "install it, or run this in the folder that holds it"
        raise UnknownEnvironment(
            f"the module {module!r} of {env_id!r} cannot be imported: {error}", fix=fix
        ) from error
    except TideError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentFault(
            f"the module {module!r} of {env_id!r} cannot be imported: {type(error).__name__}: {error}",
            where=place_of(error),
            fix="repair it",
        ) from error
    return rest


def _as_module(path: Path, env_id: str) -> str:
    """What to write in place of `folder/file.py:id`."""
    name = path.stem if path.stem.isidentifier() else "safe"
    example = env_id if ENV_ID.fullmatch(env_id) else "demo/Safe-v0"
    folder = "this folder" if path.parent == Path() else f"{str(path.parent)!r}, and go there"
    return f"write {name}:{example} for a file {name}.py in {folder}"


def spec(env_id: str) -> EnvironmentSpec:
    """What is known of an id; raises like `make`."""
    env_id = _import_prefix(env_id)
    _ensure(env_id)
    entry = _entries.get(env_id)
    target: Any = None
    if entry is not None:
        target = load_entry(entry.target) if isinstance(entry.target, str) else entry.target
    if entry is not None and inspect.isclass(target) and not entry.kwargs:
        assert issubclass(target, AgentEnv)
        tools = [made.schema for made in target._tools.values()]
        return _describe(env_id, target, target, tools)
    env = make(env_id)
    try:
        return _describe(env_id, env, type(env), env.tools)
    finally:
        env.close()


def _describe(env_id: str, source: Any, cls: type[AgentEnv], tools: list[dict[str, Any]]) -> EnvironmentSpec:
    entry = _entries.get(env_id)
    family = family_of(env_id)
    text = getattr(source, "description", None) or inspect.cleandoc(cls.__doc__ or "")
    return EnvironmentSpec(
        id=env_id,
        description=" ".join(text.split("\n\n")[0].split()),
        modality=source.modality,
        splits=tuple(source.splits),
        max_turns=source.max_turns,
        reward_range=tuple(source.reward_range),
        package=entry.package if entry else family.package if family else "",
        tools=tools,
        entry=_entry_text(entry.target) if entry else None,
        kwargs=dict(entry.kwargs) if entry else {},
        limits=limits_of(source),
        has_oracle=cls.oracle is not AgentEnv.oracle,
        oracle_maximum=source.oracle_maximum,
    )


def list_environments() -> list[EnvironmentSpec]:
    """The specs of all environments that can be made, by id; see also `broken_plugins`."""
    discover()
    found = []
    for env_id in sorted(set(_known())):
        try:
            found.append(spec(env_id))
        except TideError as error:
            package = _entries[env_id].package if env_id in _entries else env_id.partition("/")[0]
            _plugins.note(BrokenPlugin(env_id, env_id, package, str(error)))
    return found
