"""A writer of a journal killed at random moments."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from tiderl.evaluation.journal import JOURNAL, Journal, read_journal

WRITER = """
import sys
from pathlib import Path
from tiderl.env.ends import EndReason
from tiderl.evaluation.journal import Journal
from tiderl.evaluation.result import EpisodeResult

with Journal(Path(sys.argv[1]), {"env": "demo"}) as journal:
    print("open", flush=True)
    for index in range(2000):
        if index not in journal.records:
            padding = "x" * (37 * index % 9000)
            journal.append(
                EpisodeResult(index, index, 0, EndReason.SUCCESS, True, 1.0, model_calls=1, error=padding)
            )
print("all", flush=True)
"""


def test_t82_twenty_kills_leave_a_complete_union_without_duplicates(tmp_path: Path) -> None:
    folder, rng, kept = tmp_path / "e", random.Random(1), 0
    for _ in range(20):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "open"
        time.sleep(rng.uniform(0.0, 0.02))
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        process.stdout.close()
        now = len(read_journal(folder)) if (folder / JOURNAL).exists() else 0
        assert now >= kept
        kept = now
    subprocess.run(
        [sys.executable, "-c", WRITER, str(folder)], check=True, timeout=60, stdout=subprocess.PIPE
    )
    indices = [json.loads(line)["index"] for line in (folder / JOURNAL).read_text().splitlines()]
    assert sorted(indices) == list(range(2000))
    with Journal(folder, {"env": "demo"}) as journal:
        assert len(journal.records) == 2000
