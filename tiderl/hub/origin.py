"""Where the code of an environment lies, told by the process that knows it to the one that needs it.

Invariant: an id that the parent registered (in a package, a file, or its own `__main__`) is registered
in a worker from the same code, without pickling; ids of installed plug-ins need no origin.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
from typing import Any

from tiderl.errors import EnvironmentFault, UnknownEnvironment
from tiderl.hub.protocol import Origin

_loading = threading.Lock()
_known: set[str] = set()


def origin_of(env_id: str) -> Origin | None:
    """How this process got `env_id`; None when it did not load it, so a worker finds it by itself.

    Raises:
        EnvironmentFault: it was registered from code that no other process can import.
    """
    gymnasium = sys.modules.get("gymnasium")
    known = gymnasium.registry.get(env_id) if gymnasium is not None else None
    if known is None or known.entry_point is None:
        return None
    target = known.entry_point
    if isinstance(target, str):
        module, _, name = target.partition(":")
    else:
        module, name = target.__module__, target.__qualname__
    if "<" in name:
        what = (
            f"{env_id} is registered from {name}, which lies inside a function, so a worker cannot import it"
        )
        raise EnvironmentFault(what, where=module, fix="move it to the top level of a module")
    file = getattr(sys.modules.get(module), "__file__", None)
    path = os.path.abspath(file) if file and file.endswith(".py") else None
    if module == "__main__" and path is None:
        what = f"{env_id} is registered in an interactive session, so a worker cannot import it"
        raise EnvironmentFault(what, fix="put it into a file and import that")
    return Origin(module, name, path, dict(known.kwargs))


def prepare() -> None:
    """Import what every environment needs, so that the first session does not wait for it."""
    importlib.import_module("tiderl.env.registry")


def make(env_id: str, kwargs: dict[str, Any], where: Origin | None) -> Any:
    """A new environment in a worker; safe in many threads. Raises like `tiderl.env.registry.make`."""
    from tiderl.env import registry

    if env_id not in _known:
        # The registry loads plug-ins on demand and is not made for threads: one at a time.
        with _loading:
            if env_id not in _known:
                _register(env_id, where)
                _known.add(env_id)
    return registry.make(env_id, **kwargs)


def _register(env_id: str, where: Origin | None) -> None:
    import gymnasium

    from tiderl.env import registry

    if env_id in gymnasium.registry:
        return
    try:
        if where is None:
            registry.spec(env_id)
            return
        target = registry.load_entry(f"{_importable(where)}:{where.name}")
    except UnknownEnvironment as error:
        fix = f"{error.fix}; a worker finds installed plug-ins and what its parent has imported"
        raise UnknownEnvironment(error.what, where=error.where, fix=fix) from error
    if env_id not in gymnasium.registry:  # its module registers another module's class
        registry.register(env_id, cls=target, **where.kwargs)


def _importable(where: Origin) -> str:
    """The module's name, or its file where the name cannot be imported here."""
    if where.file is None:
        return where.module
    if where.module in ("__main__", "__mp_main__"):
        return where.file
    try:
        found = importlib.util.find_spec(where.module)
    except (ImportError, ValueError):
        found = None
    return where.module if found is not None else where.file
