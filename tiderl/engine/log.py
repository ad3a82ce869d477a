"""Where an engine's process, and vLLM's part in ours, write.

Invariant: never the terminal; with no file asked for, a memory file that vanishes with its processes.
"""

from __future__ import annotations

import logging
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
        _open_logs.append(self)

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
        if self in _open_logs:
            _open_logs.remove(self)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_open_logs: list[EngineLog] = []


class ParentHandler(logging.Handler):
    """Takes what vLLM logs in this process to the newest open engine's log; drops it when there is none."""

    def emit(self, record: logging.LogRecord) -> None:
        """Append one line."""
        if _open_logs:
            try:
                with open(_open_logs[-1].path, "a") as file:
                    file.write(f"{record.levelname} {record.name}: {self.format(record)}\n")
            except OSError:
                self.handleError(record)


def catch_vllm_logs() -> None:
    """Send vLLM's logger in this process to the engines' logs instead of the terminal."""
    logger = logging.getLogger("vllm")
    if not any(isinstance(handler, ParentHandler) for handler in logger.handlers):
        logger.handlers[:] = [ParentHandler()]
        logger.propagate = False
        logger.setLevel(logging.WARNING)
        # Its error about a dead engine hides the dead engine's own, which comes first in the same log.
        logging.getLogger("vllm.v1.engine.async_llm").setLevel(logging.CRITICAL)
