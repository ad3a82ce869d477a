"""What a worker inherits from the process that starts it: import path, thread limits.

Invariant: a module that the parent can import by name, the worker can import too; nothing of this
stays in the environment variables that the worker's own children see.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

_VARIABLE = "TIDERL_WORKER_LAUNCH"

_THREAD_LIMITS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)

in_worker = False
"""True in the serving process of a worker."""


def variables(python: str, extra: Mapping[str, str]) -> dict[str, str]:
    """The environment variables to start a worker with under the interpreter `python`."""
    same = os.path.abspath(python) == os.path.abspath(sys.executable)
    content = {
        "path": _import_path(same),
        "pythonpath": os.environ.get("PYTHONPATH"),
    }
    result = {**os.environ, **dict.fromkeys(_THREAD_LIMITS, "1"), "PYTHONUNBUFFERED": "1"}
    if same:  # tiderl itself may be importable here only through a changed sys.path
        root = str(Path(__file__).resolve().parents[2])
        result["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    result[_VARIABLE] = json.dumps(content)
    return {**result, **extra}


def apply() -> None:
    """In a worker: take over the parent's import path."""
    global in_worker
    in_worker = True
    content = json.loads(os.environ.pop(_VARIABLE, "{}"))
    original = content.get("pythonpath")
    os.environ.pop("PYTHONPATH", None)
    if original is not None:
        os.environ["PYTHONPATH"] = original
    first = content.get("path", [])
    sys.path[:] = first + [entry for entry in sys.path if entry not in first]


def _import_path(same_interpreter: bool) -> list[str]:
    entries = [os.path.abspath(entry or os.curdir) for entry in sys.path]
    if same_interpreter:
        return entries
    # Another interpreter has a standard library and packages of its own; only the user's folders go along.
    own = [os.path.abspath(prefix) for prefix in {sys.prefix, sys.base_prefix}]
    return [e for e in entries if not any(e.startswith(prefix + os.sep) for prefix in own)]
