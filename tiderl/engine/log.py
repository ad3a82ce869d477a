"""Where the engine process writes.

Invariant: never the terminal; with no file asked for, a memory file that vanishes with its processes.
"""

from __future__ import annotations

import os
from pathlib import Path


class EngineLog:
    """The log of one engine; `tail` is quoted in errors."""

    def __init__(self, file: str | Path | None) -> None:
        self._file = file
        self._fd = -1
        self.path = ""

    def open(self) -> None:
        """Make the place; an existing file is appended to."""
        if self._file is None:
            self._fd = os.memfd_create("tiderl-engine-log")
            self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        else:
            self.path = os.path.abspath(self._file)
            os.makedirs(os.path.dirname(self.path), exist_ok=True)

    def tail(self, characters: int = 600) -> str:
        """The end of the log on one line."""
        try:
            with open(self.path, "rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - 4 * characters))
                text = file.read().decode(errors="replace")
        except OSError:
            return "(no log)"
        return (
            " | ".join(line.strip() for line in text.splitlines() if line.strip())[-characters:] or "(empty)"
        )

    def close(self) -> None:
        """Give the memory back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
