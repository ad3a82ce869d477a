"""The folder in which TideRL keeps what is costly to make: converted models, virtual environments.

Invariant: at most one process at a time holds the lock of an entry; a lock goes with the process that holds
it, however that ends, and nobody waits for one without a deadline.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tiderl.errors import ResourceError

_POLL = 0.2


def cache_folder() -> Path:
    """$TIDERL_CACHE, else ~/.cache/tiderl."""
    return Path(os.environ.get("TIDERL_CACHE") or Path.home() / ".cache" / "tiderl")


def make_room(entry: Path) -> None:
    """Make the folder that `entry` will stand in.

    Raises:
        ResourceError: it cannot be made.
    """
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(entry.parent, error) from error


@contextmanager
def locked(entry: Path, *, timeout: float, doing: str) -> Iterator[None]:
    """Hold the lock of a cache entry, a file beside it; makes the folder that the entry stands in.

    Args:
        entry: the file or folder that is to be made.
        timeout: seconds to wait for another process that holds the lock.
        doing: what its holder does, such as "converting the model".

    Raises:
        ResourceError: the lock was not free in time, or the folder cannot be written.
    """
    make_room(entry)
    path = entry.parent / f".{entry.name}.lock"
    try:
        file = path.open("w")
    except OSError as error:
        raise _unusable(path, error) from error
    with file:
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise ResourceError(
                        f"another process has been {doing} for more than {timeout:g} s",
                        where=str(entry),
                        fix="end it and run this again",
                    ) from error
                time.sleep(_POLL)
        yield


def _unusable(path: Path, error: OSError) -> ResourceError:
    return ResourceError(
        f"the cache folder cannot be used: {error.strerror}",
        where=str(path),
        fix="set TIDERL_CACHE to a folder that you may write to",
    )
