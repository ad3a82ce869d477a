"""The process in which a registered environment is checked: `python -m tiderl.env.checker.child FD`.

Invariant: it ends with its parent: when standard input closes, it and all below it are killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

from tiderl.env.checker.context import Context
from tiderl.env.checker.driver import Driver
from tiderl.env.checker.events import PipeSender
from tiderl.env.checker.hang import make_known
from tiderl.env.checker.process import adopt_orphans, kill_tree
from tiderl.env.checker.run import serve


def main() -> None:
    """Read the order from standard input, run the check, write events to the descriptor."""
    sender = PipeSender(int(sys.argv[1]))
    order = json.loads(sys.stdin.readline())
    sys.path[:] = order["path"] + [entry for entry in sys.path if entry not in order["path"]]
    adopt_orphans()
    threading.Thread(target=_end_with_parent, name="tiderl-check-parent", daemon=True).start()
    env_id, entry, kwargs = order["env_id"], order["entry"], order["kwargs"]
    driver = Driver(lambda: make_known(env_id, entry, **kwargs), sender, order["timeout"])
    context = Context(driver, env_id, True, order["tasks"], kwargs=kwargs, entry=entry, pause=order["pause"])
    serve(context, sender)


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    kill_tree(os.getpid())
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
