"""The process in which a registered environment is checked: `python -m tiderl.env.checker.child FD`.

Invariant: it ends with its parent: when standard input closes, it and all below it are killed and its
folder of temporary files (TMPDIR, made by the parent) is removed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from typing import NoReturn

from tiderl.env.checker.context import Context
from tiderl.env.checker.driver import Driver
from tiderl.env.checker.events import PipeSender
from tiderl.env.checker.hang import make_known
from tiderl.env.checker.run import serve
from tiderl.processes import adopt_orphans, kill_below


def main() -> None:
    """Read the order from standard input, run the check, write events to the descriptor."""
    folder = os.environ["TMPDIR"]
    sender = PipeSender(int(sys.argv[1]))
    line = sys.stdin.readline()
    if not line:
        _end(folder)
    adopt_orphans()
    parent = threading.Thread(
        target=_end_with_parent, args=(folder,), name="tiderl-check-parent", daemon=True
    )
    parent.start()
    order = json.loads(line)
    sys.path[:] = order["path"] + [entry for entry in sys.path if entry not in order["path"]]
    env_id, entry, kwargs = order["env_id"], order["entry"], order["kwargs"]
    driver = Driver(lambda: make_known(env_id, entry, **kwargs), sender, order["timeout"])
    context = Context(driver, env_id, True, order["tasks"], kwargs=kwargs, entry=entry, pause=order["pause"])
    serve(context, sender)
    parent.join(60.0)  # the parent has what it needs and ends us, or it is gone and the thread does


def _end_with_parent(folder: str) -> None:
    while os.read(0, 4096):
        pass
    _end(folder)


def _end(folder: str) -> NoReturn:
    kill_below(os.getpid())
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()
