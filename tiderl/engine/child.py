"""What the engine process does before vLLM's own main loop.

Invariant: the process never outlives its parent, never writes to the terminal, never reacts to the
terminal's Ctrl-C and never touches the parent's event loop.

Imports nothing heavy at module level: with `spawn` this module is imported before torch, so that the
environment set here is the one torch's OpenMP reads.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from tiderl.engine.counters import Cell, Counters

vllm_main: Callable[..., None] | None = None
"""vLLM's own main function while the parent has put ours in its place; a forked child inherits it."""

_prepared_pid = 0


@dataclass(frozen=True)
class ChildOptions:
    """Handed to the engine process.

    A spawned process unpickles this first, then vLLM's own arguments, which imports torch and vLLM; arriving
    there, the options prepare the process at once.
    """

    parent_pid: int
    threads: int
    log_path: str
    counters_path: str
    slots: int
    folder: str
    """For the files vLLM makes (sockets, rendezvous); whoever ends last removes it."""
    environment: dict[str, str]

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, tuple(getattr(self, field.name) for field in fields(self))


def _arrive(*values: Any) -> ChildOptions:
    options = ChildOptions(*values)
    if os.getppid() == options.parent_pid:
        _prepare(options)
    return options


def run_engine_core(options: ChildOptions, *args: Any, **kwargs: Any) -> None:
    """Prepare this process, then run vLLM's EngineCore until it is told to stop."""
    _prepare(options)

    import torch
    import torch._dynamo.config as dynamo

    torch.set_num_threads(options.threads)  # a forked process keeps the parent's number otherwise
    if options.environment.get("TORCH_COMPILE_DISABLE") == "1":
        dynamo.disable = True  # read from the environment at import, which a forked process did long ago
    from vllm.v1.engine.core import EngineCoreProc

    (vllm_main or EngineCoreProc.run_engine_core)(*args, **kwargs)


def _prepare(options: ChildOptions) -> None:
    global _prepared_pid
    if _prepared_pid == os.getpid():
        return
    _prepared_pid = os.getpid()
    os.environ.update(options.environment)
    _leave_terminal(options.log_path)
    tempfile.tempdir = options.folder
    _die_with(options.parent_pid, options.folder)
    # Before the parent can time out on us: it kills what this cell names.
    Counters.open(options.counters_path, options.slots)[Cell.PID] = os.getpid()


def _leave_terminal(log_path: str) -> None:
    # A forked child shares the wake-up socket of the parent's event loop: a SIGTERM meant for us would
    # otherwise be delivered to the parent.
    signal.set_wakeup_fd(-1)
    os.setpgid(0, 0)  # out of the terminal's group: Ctrl-C is the parent's to handle
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(null)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)

    import logging

    root = logging.getLogger()
    root.handlers[:] = [logging.StreamHandler(sys.stderr)]
    for name in ("vllm", "tiderl"):
        logger = logging.getLogger(name)
        logger.handlers[:] = []
        logger.propagate = True
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"))


def _die_with(parent_pid: int, folder: str) -> None:
    """Kill this process when the parent ends, also by kill -9.

    PR_SET_PDEATHSIG is no use here: it fires when the *thread* that forked us ends.
    """

    def watch() -> None:
        try:
            handle = os.pidfd_open(parent_pid)
        except OSError:  # already gone, or a kernel before 5.3
            handle = -1
        while os.getppid() == parent_pid:
            if handle >= 0:
                select.select([handle], [], [])
            else:
                time.sleep(0.2)
        shutil.rmtree(folder, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="tiderl-parent-watch", daemon=True).start()
