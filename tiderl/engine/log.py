"""Where the engine process writes.

Invariant: never the terminal; with no file asked for, a memory file that vanishes with its processes.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_EXCEPTION = re.compile(r"[\w.]*(Error|Exception): .")


class EngineLog:
    """The log of one engine; `cause` is quoted in errors."""

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

    def cause(self) -> str:
        """What the log says went wrong: its last exception, else its last lines, on one line."""
        try:
            with open(self.path, "rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - 20000))
                text = file.read().decode(errors="replace")
        except OSError:
            return "there is no log"
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        for line in reversed(lines):
            if _EXCEPTION.match(line):
                return f"its log says {line[:400]}"
        return "its log ends: " + (" | ".join(lines)[-400:] if lines else "(empty)")

    def close(self) -> None:
        """Give the memory back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
