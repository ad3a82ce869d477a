"""A side in a process of its own: watched, and gone when the call is over."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from tiderl.bench import sides
from tiderl.bench.sides import cpu_seconds, end_tree, machine, run_side, short_folder, side_environment
from tiderl.errors import ResourceError, TideError

WRITE = """
import json, sys, time
for update in range(1, {count} + 1):
    with open("metrics.jsonl", "a") as file: file.write(json.dumps({{"update": update}}) + "\\n")
    time.sleep(0.3)
"""
CHILD = "import subprocess, time; p = subprocess.Popen(['sleep', '60'])"


def run(folder: Path, code: str, updates: int = 2, seen: list[int] | None = None) -> list[dict[str, object]]:
    return run_side(
        "the side",
        [sys.executable, "-c", code],
        folder=folder,
        metrics=folder / "metrics.jsonl",
        updates=updates,
        on_update=(seen if seen is not None else []).append,
    )


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_rows_come_back_and_progress_is_told(tmp_path: Path) -> None:
    seen: list[int] = []
    rows = run(tmp_path, WRITE.format(count=2), seen=seen)
    assert [row["update"] for row in rows] == [1, 2]
    assert all(row["cpu_s"] is None or isinstance(row["cpu_s"], float) for row in rows)
    assert seen[-1] == 2


def test_a_side_that_fails_says_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(TideError, match=r"the side ended with code 1 after 0 of 2 updates.*no such thing"):
        run(tmp_path, "raise SystemExit('no such thing')")


def test_a_side_without_progress_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "START_TIMEOUT", 1.0)
    code = f"{CHILD}; open('pid', 'w').write(str(p.pid)); time.sleep(60)"
    with pytest.raises(ResourceError, match="no progress"):
        run(tmp_path, code)
    assert not alive(int((tmp_path / "pid").read_text()))


def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    code = f"{CHILD}; open('pid', 'w').write(str(p.pid)); time.sleep(60)"

    def interrupt() -> None:
        deadline = time.monotonic() + 10
        while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.1)
        os.kill(os.getpid(), 2)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, code)
    thread.join(10)
    assert not alive(int((tmp_path / "pid").read_text()))


def test_both_sides_get_the_same_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    found = side_environment(tmp_path / "t")
    assert found["OMP_WAIT_POLICY"] == "passive"
    assert "PYTHONPATH" not in found
    assert Path(found["TMPDIR"]) == tmp_path / "t"
    assert (tmp_path / "t").is_dir()


def test_temporary_folder_is_short_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with short_folder("x-") as folder:
        assert len(str(folder)) <= sides.LONGEST_BASE + 20
        (folder / "file").touch()
    assert not folder.exists()


def test_ending_what_has_ended_is_fine() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(20)
    end_tree(process)


def test_cpu_seconds_count_the_children() -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass\ntime.sleep(30)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        deadline = time.monotonic() + 20
        while (cpu_seconds(process.pid) or 0.0) < 0.3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (cpu_seconds(process.pid) or 0.0) >= 0.3
    finally:
        end_tree(process)
    assert cpu_seconds(process.pid) is None


def test_machine_is_described() -> None:
    assert machine()["cores"] >= 1
    assert machine()["cpu"]
