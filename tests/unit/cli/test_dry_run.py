"""What `tiderl train` refuses before it starts anything, with `--dry-run` and without, in the same words."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest

from tiderl.cli.main import main

SOURCE = '''
import tiderl


@tiderl.register("dryrun/One-v0")
class One(tiderl.AgentEnv):
    """An environment with splits of its own, one more with an argument."""

    splits = ("easy", "hard")

    def __init__(self, extra: str = "") -> None:
        super().__init__()
        self.splits = (*self.splits, *filter(None, [extra]))

    def tasks(self, split):
        return [{"id": split}]
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a configuration, a checkpoint without data, a file with an environment."""
    (tmp_path / "dryrun_env.py").write_text(SOURCE)
    model = tmp_path / "model"
    model.mkdir()
    config = {"architectures": ["X"], "vocab_size": 7, "max_position_embeddings": 64, "eos_token_id": 3}
    (model / "config.json").write_text(json.dumps(config))
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(24))
    (tmp_path / "run.yaml").write_text(
        "model: {path: ./model, max_length: 64}\n"
        "environment: {id: dryrun_env:dryrun/One-v0, split: easy}\n"
        "rollout: {max_episode_tokens: 64}\n"
        "evaluation: {split: hard}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TIDERL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def train(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["train", "run.yaml", *words])
    said = capsys.readouterr()
    assert isinstance(left.value.code, int)
    return left.value.code, said.out, said.err


BAD = [
    ("model.path=./none", "there is no model folder ./none"),
    ("model.path=none", "there is no model folder none"),
    ("model.path=/no/such/model", "there is no model folder /no/such/model"),
    ("model.path=~/no-such-model", "there is no model folder ~/no-such-model"),
    ("model.path=a/b/c", "there is no model folder a/b/c"),
    ("model.path=.", "the folder has no config.json"),
    ("model.max_length=65", "passes the model's own limit of 64"),
    ("environment.id=tide/Calculater-v0", "did you mean tide/Calculator-v0"),
    ("environment.id=dryrun_env:dryrun/Two-v0", "did you mean dryrun/One-v0"),
    ("environment.id=nofile:dryrun/One-v0", "the module 'nofile'"),
    ("environment.split=train", "environment.split is 'train'"),
    ("evaluation.split=test", "evaluation.split is 'test'"),
    ("environment.kwargs.colour=1", "'colour' (environment.kwargs of dryrun_env:dryrun/One-v0)"),
    ("agent.format=hermas", "no action format called 'hermas'"),
]


@pytest.mark.parametrize(("override", "said"), BAD)
def test_what_is_not_there_is_refused_in_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], override: str, said: str
) -> None:
    before = sorted(folder.rglob("*"))
    code, out, error = train(capsys, "--dry-run", override)
    assert (code, out) == (2, "")
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert said in error
    assert train(capsys, override) == (code, out, error)
    assert sorted(folder.rglob("*")) == before


def test_a_split_that_is_wrong_is_told_with_those_that_there_are(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, error = train(capsys, "--dry-run", "evaluation.split=dev", "environment.kwargs.extra=more")
    assert error.rstrip().endswith("choose one of: easy, hard, more.")
    code, *_ = train(capsys, "--dry-run", "evaluation.split=more", "environment.kwargs.extra=more")
    assert code == 0


def test_what_is_there_passes_and_nothing_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.rglob("*"))
    code, out, error = train(capsys, "--dry-run")
    assert (code, error) == (0, "")
    assert "path: ./model" in out
    assert sorted(folder.rglob("*")) == before


def test_a_model_that_must_be_downloaded_is_told_and_not_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, error = train(capsys, "--dry-run", "model.path=some/model")
    assert code == 0
    assert "path: some/model" in out
    assert error == "note: the model some/model is not on this machine: a run would download it\n"
