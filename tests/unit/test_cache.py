"""The cache folder and the locks of its entries, held against other processes."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tiderl.bench.venv import ensure_venv
from tiderl.cache import cache_folder, locked, make_room
from tiderl.errors import ResourceError

ROOT = Path(__file__).resolve().parents[2]

HOLDS = """
import sys, time
from pathlib import Path
from tiderl.cache import locked
with locked(Path(sys.argv[1]), timeout=20, doing="holding it"):
    print("held", flush=True)
    time.sleep(60)
"""

COUNTS = """
import sys, time
from pathlib import Path
from tiderl.cache import locked
counter = Path(sys.argv[1])
for _ in range(5):
    with locked(counter, timeout=60, doing="counting"):
        before = int(counter.read_text()) if counter.exists() else 0
        time.sleep(0.01)
        counter.write_text(str(before + 1))
"""


def holder(entry: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(entry)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_lock_is_waited_for_with_a_deadline_and_goes_with_its_holder(tmp_path: Path) -> None:
    entry = tmp_path / "models" / "m"
    with holder(entry) as process:
        began = time.monotonic()
        with (
            pytest.raises(ResourceError, match=r"another process has been making it for more than 0.5 s"),
            locked(entry, timeout=0.5, doing="making it"),
        ):
            pytest.fail("the lock is another process's")
        assert 0.5 <= time.monotonic() - began < 5.0
        with locked(tmp_path / "models" / "other", timeout=0.0, doing="making it"):
            pass  # each entry has a lock of its own
        process.send_signal(signal.SIGKILL)
        with locked(entry, timeout=20.0, doing="making it"):
            pass
    with locked(entry, timeout=0.0, doing="making it"):
        pass


def test_processes_that_lock_lose_no_update(tmp_path: Path) -> None:
    counter = tmp_path / "n"
    started = [subprocess.Popen([sys.executable, "-c", COUNTS, str(counter)], cwd=ROOT) for _ in range(4)]
    assert [process.wait(60) for process in started] == [0] * 4
    assert counter.read_text() == "20"


def test_an_error_inside_gives_the_lock_back(tmp_path: Path) -> None:
    with pytest.raises(KeyError), locked(tmp_path / "e", timeout=0.0, doing="making it"):
        raise KeyError
    with locked(tmp_path / "e", timeout=0.0, doing="making it"):
        pass


def test_a_folder_that_cannot_be_used_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TIDERL_CACHE", str(tmp_path / "file"))
    entry = cache_folder() / "models" / "m"
    with pytest.raises(ResourceError, match="set TIDERL_CACHE"):
        make_room(entry)
    with pytest.raises(ResourceError, match="set TIDERL_CACHE"), locked(entry, timeout=0.0, doing="x"):
        pytest.fail("there is no such folder")
    with pytest.raises(ResourceError, match="set TIDERL_CACHE"):
        ensure_venv("trl", ["nothing==1"], print)


def test_the_cache_is_found_and_locks_are_waited_for_in_one_place() -> None:
    """No second reading of TIDERL_CACHE, and no second loop around a lock."""
    wrong = []
    for path in sorted((ROOT / "tiderl").rglob("*.py")):
        text = path.read_text()
        reads = any(
            isinstance(node, ast.Constant) and node.value == "TIDERL_CACHE"
            for node in ast.walk(ast.parse(text))
        )
        if path.name != "cache.py" and (reads or ("fcntl.flock" in text and "sleep(" in text)):
            wrong.append(str(path.relative_to(ROOT)))
    assert wrong == []
