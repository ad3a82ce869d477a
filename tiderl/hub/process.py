"""A worker process as its hub sees it: started in a group of its own, reaped by a thread of its own.

Invariants: when `on_exit` runs, every process of the worker has been killed; the end is noticed
by the operating system's word (`waitid`), not by a time-out.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tiderl.errors import ResourceError
from tiderl.hub import launch
from tiderl.processes import kill_below

_TAIL_LINES = 20
_TAIL_BYTES = 4000


@dataclass(frozen=True)
class WorkerExit:
    """How a worker ended: exit code (negative: signal), the watchdog's note, the end of its log."""

    pid: int
    code: int | None
    late_session: str | None
    """The session that passed its deadline, when the watchdog ended the worker for that."""
    limit: float
    """That session's limit in seconds."""
    log: str

    def describe(self) -> str:
        """One sentence with the exit code and the last lines of the log."""
        if self.late_session is not None:
            text = (
                f"worker {self.pid} was stopped because a session in it passed its limit of {self.limit:g} s"
            )
        elif self.code is None:
            text = f"worker {self.pid} is gone"
        elif self.code < 0 or self.code > 128:
            number = -self.code if self.code < 0 else self.code - 128
            name = signal.Signals(number).name if number in {s.value for s in signal.Signals} else str(number)
            text = f"worker {self.pid} was killed by {name}"
        else:
            text = f"worker {self.pid} exited with code {self.code}"
        return f"{text}; end of its log:\n{self.log}" if self.log and self.late_session is None else text


class WorkerProcess:
    """Starts `python -m tiderl.hub.worker` and tells the event loop when it has ended.

    Raises:
        ResourceError: the interpreter is missing or the system refuses another process.

    Args:
        name: unique within `folder`; names the socket, the log and the note.
        folder: private folder of the hub (mode 0700).
        on_exit: called once in `loop`, unless the loop is closed by then.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        python: str,
        capacity: int,
        environ: Mapping[str, str],
        loop: asyncio.AbstractEventLoop,
        on_exit: Callable[[WorkerExit], None],
    ) -> None:
        self.endpoint = f"ipc://{folder / name}"
        self._log, self._note = folder / f"{name}.log", folder / f"{name}.end"
        self._loop, self._on_exit = loop, on_exit
        self._reaping = threading.Lock()
        self.exited = asyncio.Event()
        self.serving: int | None = None
        """Process id of the serving half, once it has told."""
        command = [python, "-P", "-m", "tiderl.hub.worker", "--endpoint", self.endpoint]
        command += ["--parent", str(os.getpid()), "--capacity", str(capacity), "--note", str(self._note)]
        try:
            with open(self._log, "ab", opener=_private) as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=launch.variables(python, environ),
                    start_new_session=True,
                )
        except OSError as error:
            fix = "give the path of a Python interpreter that has tiderl, and free memory and process slots"
            raise ResourceError(f"a worker cannot be started with {python}: {error}", fix=fix) from error
        self.pid = self._process.pid
        self._thread = threading.Thread(target=self._reap, name=f"reap-{name}", daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """Kill every process of the worker; safe at any time, also after its end."""
        with self._reaping:
            if self._process.returncode is not None:
                return
            # Not reaped yet: the process id, and so the group's, cannot belong to anybody else.
            kill_below(self.pid)
            if self.serving is not None and _group_of(self.serving) == self.pid:
                kill_below(self.serving)  # the first process is gone, and those below it moved away
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                return

    def _reap(self) -> None:
        try:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            pass  # somebody else in this process has waited for it
        self.kill()
        with self._reaping:
            try:
                code: int | None = self._process.wait()
            except ChildProcessError:
                code = None
        result = self._result(code)
        try:
            self._loop.call_soon_threadsafe(self._ended, result)
        except RuntimeError:
            return  # the loop is closed: nobody waits for this worker any more

    def _ended(self, result: WorkerExit) -> None:
        self.exited.set()
        self._on_exit(result)

    def _result(self, code: int | None) -> WorkerExit:
        try:
            note = json.loads(self._note.read_text())
        except (OSError, ValueError):
            note = {}
        late = note.get("session") if note.get("reason") == "deadline" else None
        return WorkerExit(self.pid, code, late, float(note.get("limit", 0.0)), tail(self._log))


def tail(log: Path) -> str:
    """The last lines of a log file; empty when there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-_TAIL_LINES:])


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:
        return None


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
