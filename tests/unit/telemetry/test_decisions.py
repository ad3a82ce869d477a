"""The decision log: what was told is read back, in order, also after a crash or a resume."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.errors import TideError
from tiderl.telemetry.decisions import (
    FLUSH_S,
    DecisionLog,
    Made,
    Move,
    Note,
    Outcome,
    Resumed,
    Turn,
    read_decisions,
)


def test_rows_come_back_typed_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    with DecisionLog(path) as log:
        log.transition(0.1, "g0m0", "", "queued", kv="none", engine="", context=0)
        first = log.decision(
            0.2, "admit", "g0m0", engine="engine-0", why="fits", inputs={"promised": 16, "capacity": 64}
        )
        second = log.decision(0.5, "release", "g0m0", predicted=1.5)
        log.outcome(second, 0.9, 0.4)
        log.turn(
            1.0,
            "g0m0",
            engine="engine-0",
            prompt_tokens=90,
            cached_tokens=64,
            new_tokens=10,
            reprefilled=16,
            sampled=4,
            cause="evicted",
        )
        log.note(1.1, "engine engine-1 died", error="signal 9")
    assert (first, second) == (0, 1)
    assert read_decisions(path) == [
        Move(0.1, "g0m0", "", "queued", "none"),
        Made(0.2, 0, "admit", "g0m0", "engine-0", "fits", None, {"promised": 16, "capacity": 64}),
        Made(0.5, 1, "release", "g0m0", "", "", 1.5, {}),
        Outcome(0.9, 1, 0.4),
        Turn(1.0, "g0m0", "engine-0", 90, 64, 10, 16, 4, "evicted"),
        Note(1.1, "engine engine-1 died", {"error": "signal 9"}),
    ]


@given(
    at=st.floats(0, 1e6),
    text=st.text(max_size=20),
    number=st.one_of(st.floats(), st.integers(-5, 5), st.just(np.float32(0.5))),
)
def test_any_text_and_number_makes_one_whole_line(
    tmp_path_factory: pytest.TempPathFactory, at: float, text: str, number: float
) -> None:
    path = tmp_path_factory.mktemp("log") / "decisions.jsonl"
    with DecisionLog(path) as log:
        log.decision(at, "admit", text, why=text, predicted=float(number), inputs={"x": number})
        log.note(at, text)
    made, note = read_decisions(path)
    assert isinstance(made, Made)
    assert (made.task, made.why, note) == (text, text, Note(round(at, 4), text))
    finite = math.isfinite(number)
    assert made.predicted == (float(number) if finite else None)
    assert made.inputs["x"] == (number if finite else None)
    json.loads(path.read_text().split("\n")[0], parse_constant=pytest.fail)


def test_rows_reach_the_disk_without_further_calls(tmp_path: Path) -> None:
    with DecisionLog(tmp_path / "d.jsonl") as log:
        log.note(0.0, "the last thing before a hang")
        deadline = time.monotonic() + FLUSH_S + 10
        while not read_decisions(log.path) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert read_decisions(log.path) == [Note(0.0, "the last thing before a hang")]


def test_telling_the_same_twice_leaves_one_row(tmp_path: Path) -> None:
    with DecisionLog(tmp_path / "d.jsonl") as log:
        for before, kv, wait, cause in (
            ("running", "held", "", ""),
            ("paused", "held", "", ""),  # nothing new
            ("paused", "held", "env/tool", ""),
            ("paused", "cached", "env/tool", "released"),
            ("paused", "cached", "env/tool", "engine_died"),  # a cause is always new
        ):
            log.transition(1.0, "a", before, "paused", kv=kv, engine="e", context=5, wait=wait, cause=cause)
    rows = read_decisions(tmp_path / "d.jsonl")
    assert [(r.kv, r.wait, r.cause) for r in rows if isinstance(r, Move)] == [
        ("held", "", ""),
        ("held", "env/tool", ""),
        ("cached", "env/tool", "released"),
        ("cached", "env/tool", "engine_died"),
    ]


def test_a_torn_last_line_is_left_out_and_cut_off_by_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    with DecisionLog(path) as log:
        log.decision(1.0, "admit", "a")
        log.decision(2.0, "admit", "b")
    with path.open("a") as file:
        file.write('{"decision":2,"at":3.0,"ki')
    assert len(read_decisions(path)) == 2
    with DecisionLog(path, keep_until=math.inf) as log:
        assert log.decision(0.5, "admit", "c") == 2
    assert read_decisions(path)[2:] == [Resumed(1), Made(0.5, 2, "admit", "c")]


def test_a_resumed_run_drops_only_what_its_checkpoint_does_not_cover(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    for keep, times in ((None, (1.0, 9.0)), (9.0, (1.0, 2.0, 3.0)), (2.0, (0.5,))):
        with DecisionLog(path, keep_until=keep) as log:
            for at in times:
                log.note(at, "x")
    assert [(type(r).__name__, r.at) for r in read_decisions(path)] == [
        ("Note", 1.0),
        ("Note", 9.0),  # of the first part: the second resume does not touch it
        ("Resumed", 0.0),
        ("Note", 1.0),
        ("Note", 2.0),
        ("Resumed", 0.0),
        ("Note", 0.5),
    ]
    assert [r.number for r in read_decisions(path) if isinstance(r, Resumed)] == [1, 2]


def test_a_new_log_replaces_an_old_one(tmp_path: Path) -> None:
    for text in ("old", "new"):
        with DecisionLog(tmp_path / "d.jsonl") as log:
            log.note(0.0, text)
    assert read_decisions(tmp_path / "d.jsonl") == [Note(0.0, "new")]


def test_what_is_told_after_close_is_kept_while_the_folder_is_there(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "d.jsonl")
    log.close()
    log.close()
    log.transition(3.0, "a", "paused", "cancelled", kv="held", engine="e", context=1)
    assert [r.after for r in read_decisions(log.path) if isinstance(r, Move)] == ["cancelled"]
    log.path.unlink()
    log.note(4.0, "nobody is there")
    assert not log.path.exists()


def test_a_missing_or_foreign_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TideError, match="no decision log"):
        read_decisions(tmp_path / "d.jsonl")
    (tmp_path / "d.jsonl").write_text('{"update": 1}\n')
    with pytest.raises(TideError, match="line 1"):
        read_decisions(tmp_path / "d.jsonl")


def test_ten_thousand_rows_cost_little(tmp_path: Path) -> None:
    with DecisionLog(tmp_path / "d.jsonl") as log:
        began = time.process_time()
        for i in range(10_000):
            log.transition(i / 10, f"g{i}", "ready", "running", kv="held", engine="engine-0", context=i)
        spent = time.process_time() - began
    assert len(read_decisions(tmp_path / "d.jsonl")) == 10_000
    assert spent < 2.0
