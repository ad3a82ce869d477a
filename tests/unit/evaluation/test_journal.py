"""The journal: torn lines, foreign folders, other configurations, other processes, full disks."""

from __future__ import annotations

import errno
import json
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from tiderl.env.ends import EndReason
from tiderl.errors import ResourceError, RunExists
from tiderl.evaluation.journal import CONFIGURATION, JOURNAL, Journal, differences, read_journal, write_atomic
from tiderl.evaluation.result import EpisodeResult

CONFIG = {"env": "demo/X-v0", "seed": 0, "policy": {"name": "oracle"}}


def record(index: int, **changes: Any) -> EpisodeResult:
    values: dict[str, Any] = {
        "index": index,
        "task": f"t{index}",
        "seed": index,
        "end": EndReason.SUCCESS,
        "success": True,
        "reward": 1.0,
        "rewards": (0.0, 1.0),
        "turns": 2,
        "model_calls": 2,
        "latencies": (0.1, 0.2),
    }
    return EpisodeResult(**(values | changes))


def test_a_record_survives_the_round_trip(tmp_path: Path) -> None:
    wanted = record(3, end=EndReason.TIME, success=False, error='é\n"x', forks=1, seconds=1.5, at=2.5)
    with Journal(tmp_path / "e", CONFIG) as journal:
        journal.append(wanted)
    with Journal(tmp_path / "e", CONFIG) as journal:
        assert journal.records == {3: wanted}
        assert journal.process == 2
    assert read_journal(tmp_path / "e") == {3: wanted}


def test_t75_one_truncated_flag_an_episode(tmp_path: Path) -> None:
    with Journal(tmp_path, CONFIG) as journal:
        journal.append(record(0, rewards=(0.0, 0.0, 0.0), end=EndReason.MAX_TOKENS, success=False))
    line = json.loads((tmp_path / JOURNAL).read_text())
    assert line["truncated"] is True
    assert len(line["rewards"]) == 3


def test_t82_a_line_torn_at_any_byte_is_dropped_and_the_rest_kept(tmp_path: Path) -> None:
    with Journal(tmp_path, CONFIG) as journal:
        for i in range(3):
            journal.append(record(i))
    path = tmp_path / JOURNAL
    whole = path.read_bytes()
    second = whole.index(b"\n", whole.index(b"\n") + 1) + 1
    for cut in sorted({second, *random.Random(0).sample(range(second, len(whole)), 12), len(whole) - 1}):
        path.write_bytes(whole[:cut])
        assert sorted(read_journal(tmp_path)) == [0, 1]
        with Journal(tmp_path, CONFIG) as journal:
            assert sorted(journal.records) == [0, 1]
            journal.append(record(2))
        assert sorted(read_journal(tmp_path)) == [0, 1, 2]


def test_a_damaged_line_inside_is_named(tmp_path: Path) -> None:
    with Journal(tmp_path, CONFIG) as journal:
        for i in range(3):
            journal.append(record(i))
    lines = (tmp_path / JOURNAL).read_bytes().splitlines(keepends=True)
    lines[1] = b'{"index": 1}\n'
    (tmp_path / JOURNAL).write_bytes(b"".join(lines))
    with pytest.raises(RunExists, match="line 2"):
        Journal(tmp_path, CONFIG)


def test_t85_the_later_record_of_an_index_counts(tmp_path: Path) -> None:
    with Journal(tmp_path, CONFIG) as journal:
        journal.append(record(0, end=EndReason.INFRASTRUCTURE, success=False, reward=0.0))
        assert not journal.records[0].valid
        journal.append(record(0))
        assert journal.records[0].valid
    assert read_journal(tmp_path)[0].valid


def test_c12_another_configuration_is_refused_and_named(tmp_path: Path) -> None:
    with Journal(tmp_path, CONFIG) as journal:
        journal.append(record(0))
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(RunExists) as caught:
        Journal(tmp_path, {"env": "demo/X-v0", "seed": 7, "policy": {"name": "random"}})
    assert "seed: 0 there, 7 now" in str(caught.value)
    assert 'policy.name: "oracle" there, "random" now' in str(caught.value)
    assert "--fresh" in str(caught.value)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_fresh_drops_the_old_evaluation_and_nothing_else(tmp_path: Path) -> None:
    with Journal(tmp_path, CONFIG) as journal:
        journal.append(record(0))
    (tmp_path / "episodes").mkdir()
    (tmp_path / "episodes" / "x.jsonl").write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    with Journal(tmp_path, {**CONFIG, "seed": 1}, resume=False) as journal:
        assert journal.records == {}
    assert json.loads((tmp_path / CONFIGURATION).read_text())["configuration"]["seed"] == 1
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "episodes").exists()


@pytest.mark.parametrize("resume", [True, False])
def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "config.yaml").write_text("a training run")
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(RunExists, match=r"config\.yaml"):
        Journal(tmp_path, CONFIG, resume=resume)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.yaml", "summary.json"]


def test_t82_killed_before_the_configuration_was_written(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_bytes(b"")
    (tmp_path / f".{CONFIGURATION}.4711").write_text("{ torn")
    with Journal(tmp_path, CONFIG) as journal:
        journal.append(record(0))
    assert sorted(p.name for p in tmp_path.iterdir()) == [CONFIGURATION, JOURNAL]


def test_out_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ResourceError, match="not a folder"):
        Journal(tmp_path / "file", CONFIG)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with Journal(tmp_path, CONFIG):
        with pytest.raises(RunExists, match="another process"):
            Journal(tmp_path, CONFIG)
    Journal(tmp_path, CONFIG).__exit__()


def test_appends_of_many_threads_do_not_mix(tmp_path: Path) -> None:
    with Journal(tmp_path, CONFIG) as journal:
        threads = [
            threading.Thread(target=lambda k=k: [journal.append(record(10 * k + i)) for i in range(10)])
            for k in range(8)
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join(20)
    assert sorted(read_journal(tmp_path)) == list(range(80))


def test_a_full_disk_leaves_no_part_of_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    with Journal(tmp_path, CONFIG) as journal:
        journal.append(record(0))

        def full(fd: int, data: Any) -> int:
            if len(data) > 40:
                return real(fd, bytes(data)[:40])
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(
            os, "write", lambda fd, data: full(fd, data) if len(data) > 40 else full(fd, b"x")
        )
        with pytest.raises(ResourceError, match="no space"):
            journal.append(record(1))
        monkeypatch.undo()
        journal.append(record(2))
    assert sorted(read_journal(tmp_path)) == [0, 2]


def test_after_close_nothing_is_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path, CONFIG)
    journal.__exit__()
    journal.append(record(0))
    assert read_journal(tmp_path) == {}


def test_a_failed_start_leaves_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "e", CONFIG)
    journal.discard()
    journal.discard()
    journal.__exit__()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    journal = Journal(tmp_path / "mine", CONFIG)
    journal.discard()
    journal.__exit__()
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]


def test_write_atomic_refuses_nan_and_keeps_the_old(tmp_path: Path) -> None:
    write_atomic(tmp_path / "s.json", {"a": 1})
    with pytest.raises(ValueError):
        write_atomic(tmp_path / "s.json", {"a": float("nan")})
    assert json.loads((tmp_path / "s.json").read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["s.json"]


def test_differences_name_nested_and_missing_keys() -> None:
    assert differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}}) == [
        "a.b: 1 there, 3 now",
        "c: 2 there, null now",
    ]
