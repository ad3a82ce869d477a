"""`python -m tiderl.hub.worker`: a process that hosts sessions, with its watchdog.

Invariant: the process splits before anything heavy is imported and while it has one thread; from then
on the first process only watches and the second only serves.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from tiderl.hub import launch, watchdog
from tiderl.hub.deadlines import DeadlineTable


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve sessions until the hub says stop or is gone."""
    parser = argparse.ArgumentParser(prog="python -m tiderl.hub.worker", description=__doc__)
    parser.add_argument("--endpoint", required=True, help="ipc:// address to bind")
    parser.add_argument("--parent", type=int, required=True, help="process id of the hub; its end is ours")
    parser.add_argument("--capacity", type=int, default=64, help="most sessions at a time")
    parser.add_argument("--note", type=Path, required=True, help="file to write how this worker ended")
    options = parser.parse_args(arguments)
    table = DeadlineTable(options.capacity)
    first_process = os.getpid()
    child = os.fork()
    if child:
        folder = options.note.parent
        watchdog.watch(child, table, parent=options.parent, note=options.note, folder=folder)
    launch.apply()
    from tiderl.hub import host  # only the serving half pays for these imports

    host.run(options.endpoint, table, first_process)


if __name__ == "__main__":
    main()
