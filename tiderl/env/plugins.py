"""Plug-ins found through entry points.

Invariant: each entry point is loaded at most once, in a thread-safe way and only when asked for; one
that fails, however it fails, is kept with its error and hides no other.
"""

from __future__ import annotations

import importlib.metadata
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from tiderl.errors import TideError

Take = Callable[[str, Any], None]


@dataclass(frozen=True)
class BrokenPlugin:
    """An entry point, or an id one registered, that cannot be used; `error` says why."""

    name: str
    value: str
    package: str
    error: str


class Plugins:
    """The entry points of one group; those of TideRL come first, then by name."""

    def __init__(self, group: str) -> None:
        self.broken: list[BrokenPlugin] = []
        self._group = group
        self._pending: list[importlib.metadata.EntryPoint] | None = None
        self._loading: list[str] = []
        self._lock = threading.RLock()

    @property
    def loading(self) -> str | None:
        """The distribution whose entry point is being loaded now."""
        return self._loading[-1] if self._loading else None

    def load_all(self, take: Take) -> None:
        """Load what is not loaded yet; `take` gets each entry point's name and object."""
        self.load_until(lambda: False, (), take)

    def load_until(self, enough: Callable[[], bool], first: Collection[str], take: Take) -> bool:
        """Load entry points, those named in `first` before the others, until `enough` holds.

        Returns:
            Whether it holds.
        """
        with self._lock:
            pending = self._found()
            for point in sorted(pending, key=lambda point: point.name not in first):
                if enough():
                    return True
                if point in pending:  # not loaded meanwhile by a plug-in that asked for ids itself
                    pending.remove(point)
                    self._load(point, take)
            return enough()

    def note(self, broken: BrokenPlugin) -> None:
        """Keep an error, once per name."""
        if all(one.name != broken.name for one in self.broken):
            self.broken.append(broken)

    def _found(self) -> list[importlib.metadata.EntryPoint]:
        if self._pending is None:
            found = importlib.metadata.entry_points(group=self._group)
            self._pending = sorted(found, key=lambda point: (_package_of(point) != "tiderl", point.name))
        return self._pending

    def _load(self, point: importlib.metadata.EntryPoint, take: Take) -> None:
        package = _package_of(point)
        self._loading.append(package)
        try:
            take(point.name, point.load())
        # A foreign module may raise anything when it is imported; the error is kept and listed.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            text = str(error) if isinstance(error, TideError) else f"{type(error).__name__}: {error}"
            self.note(BrokenPlugin(point.name, point.value, package, text))
        finally:
            self._loading.pop()


def _package_of(point: importlib.metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value.split(".")[0]
