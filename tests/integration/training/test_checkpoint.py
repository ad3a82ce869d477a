"""Checkpoints load in plain transformers and peft, resume bit for bit, and are whole or absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tiderl.engine.tiny import make_tiny_model
from tiderl.errors import ModelError, ResourceError
from tiderl.training import checkpoint


def parameters(replica: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in replica.model.parameters()]


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_is_what_was_trained(
    lora: bool,
    tied: bool,
    tmp_path: Path,
    make_replica: Any,
    make_groups: Any,
    load_plain: Any,
    plain_logprobs: Any,
) -> None:
    replica = make_replica(make_tiny_model(tmp_path / "model", tied=tied), lora=lora)
    groups = make_groups()
    replica.update(groups, 0)
    live = parameters(replica)
    folder = replica.save(tmp_path / "out" / "step-1")
    assert all(torch.equal(a, b) for a, b in zip(live, parameters(replica), strict=True))
    model = load_plain(folder)
    records = [m.records[0] for g in groups for m in g.members]
    for got, record in zip(replica.logprobs(records), records, strict=True):
        np.testing.assert_allclose(got, plain_logprobs(model, record), atol=1e-5)

    from safetensors import safe_open
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template
    with (
        safe_open(folder / "model.safetensors", "pt") as saved,
        safe_open(tmp_path / "model" / "model.safetensors", "pt") as original,
    ):
        assert set(saved.keys()) == set(original.keys())
        sent = dict(replica.weights())
        assert set(sent) <= set(original.keys())
        for name, tensor in sent.items():
            assert torch.equal(tensor, saved.get_tensor(name))
            assert tensor.dtype == original.get_tensor(name).dtype
        for name in set(saved.keys()) - set(sent):
            assert torch.equal(saved.get_tensor(name), original.get_tensor(name))
    assert len(sent) == (28 if lora else len(set(original_keys(tmp_path / "model"))))


def original_keys(folder: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as original:
        return list(original.keys())


def test_the_adapter_loads_in_peft(
    tmp_path: Path,
    make_replica: Any,
    make_groups: Any,
    model_folder: Path,
    load_plain: Any,
    plain_logprobs: Any,
) -> None:
    from peft import PeftModel

    replica = make_replica()
    groups = make_groups()
    replica.update(groups, 0)
    replica.save(tmp_path / "c")
    model = PeftModel.from_pretrained(load_plain(model_folder), str(tmp_path / "c" / "state" / "adapter"))
    record = groups[0].members[0].records[0]
    np.testing.assert_allclose(replica.logprobs([record])[0], plain_logprobs(model, record), atol=1e-5)


@pytest.mark.parametrize(
    "kind",
    [
        {"lora": True, "kl_coef": 0.1},
        {"lora": False, "kl_coef": 0.1},
        {"lora": False, "model": {"dtype": "bfloat16"}},
        {"lora": True, "model": {"dtype": "bfloat16"}},
    ],
)
def test_two_updates_a_resume_and_two_more_equal_four(
    kind: dict[str, Any], tmp_path: Path, make_replica: Any, make_groups: Any
) -> None:
    batches = [make_groups(seed=s, noise=0.1) for s in range(4)]
    settings = {**kind, "optim": {"warmup": 3}}
    straight = make_replica(**settings)
    want = [straight.update(b, v) for v, b in enumerate(batches)]
    draw = torch.rand(3)

    broken = make_replica(**settings)
    for version in range(2):
        broken.update(batches[version], version)
    broken.save(tmp_path / "c")
    resumed = make_replica(**settings, seed=5)
    resumed.load_state(tmp_path / "c")
    got = [resumed.update(batches[v], v) for v in (2, 3)]
    for a, b in zip(want[2:], got, strict=True):
        assert (a.loss, a.grad_norm, a.learning_rate, a.update) == (
            b.loss,
            b.grad_norm,
            b.learning_rate,
            b.update,
        )
    assert all(torch.equal(a, b) for a, b in zip(parameters(straight), parameters(resumed), strict=True))
    for (name, a), (_, b) in zip(straight.weights(), resumed.weights(), strict=True):
        assert torch.equal(a, b), name
    assert not torch.equal(torch.rand(3), draw)


def test_the_random_state_is_restored(tmp_path: Path, make_replica: Any) -> None:
    replica = make_replica()
    replica.save(tmp_path / "c")
    want = torch.rand(4)
    torch.manual_seed(99)
    replica.load_state(tmp_path / "c")
    assert torch.equal(torch.rand(4), want)


def test_a_full_disk_is_told_before_a_byte_is_written(
    tmp_path: Path, make_replica: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = make_replica()
    with pytest.raises(ResourceError, match="MiB are free"):
        checkpoint.check_space(tmp_path, 1 << 60)
    monkeypatch.setattr(checkpoint, "RESERVE_BYTES", 1 << 60)
    with pytest.raises(ResourceError, match="free some space"):
        replica.save(tmp_path / "run" / "c")
    assert not list((tmp_path / "run").iterdir())


def test_a_failed_save_leaves_the_older_checkpoint_whole(
    tmp_path: Path, make_replica: Any, make_groups: Any, load_plain: Any
) -> None:
    replica = make_replica()
    replica.save(tmp_path / "c")
    first = (tmp_path / "c" / "model.safetensors").read_bytes()
    replica.update(make_groups(), 0)
    source = tmp_path / "source"
    source.mkdir()
    replica.model.folder = source
    (source / "tokenizer.json").symlink_to("/dev/full")
    (source / "sub").mkdir()
    os_error = source / "vocab.txt"
    os_error.write_text("x")
    os_error.chmod(0)
    monkey = pytest.MonkeyPatch()
    monkey.setattr(checkpoint, "_sync", _no_space)
    try:
        with pytest.raises(ResourceError, match="could not be written"):
            replica.save(tmp_path / "c")
    finally:
        monkey.undo()
    assert (tmp_path / "c" / "model.safetensors").read_bytes() == first
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name or "old" in p.name] == []
    load_plain(tmp_path / "c")


def _no_space(_folder: Path) -> None:
    raise OSError(28, "No space left on device")


def test_saving_again_replaces(tmp_path: Path, make_replica: Any, make_groups: Any) -> None:
    replica = make_replica()
    replica.save(tmp_path / "c")
    first = (tmp_path / "c" / "model.safetensors").read_bytes()
    replica.update(make_groups(), 0)
    replica.save(tmp_path / "c")
    assert (tmp_path / "c" / "model.safetensors").read_bytes() != first
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("content", [None, "text"])
def test_missing_or_broken_models_are_named(content: str | None, tmp_path: Path, make_replica: Any) -> None:
    folder = tmp_path / "nothing"
    if content:
        folder.mkdir()
        (folder / "config.json").write_text(content)
    with pytest.raises(ModelError, match="nothing"):
        make_replica(folder)


def test_state_of_another_shape_is_refused(tmp_path: Path, make_replica: Any) -> None:
    make_replica().save(tmp_path / "c")
    with pytest.raises(ModelError, match="shapes"):
        make_replica(lora=False).load_state(tmp_path / "c")
    with pytest.raises(ModelError, match="trainer state"):
        make_replica().load_state(tmp_path)


def test_unknown_adapter_targets_are_named(model_folder: Path) -> None:
    from tiderl.errors import ConfigError
    from tiderl.training import LoraSettings, ModelSettings
    from tiderl.training.replica import Replica

    replica = Replica(ModelSettings(model_folder, lora=LoraSettings(targets=("query",))))
    with pytest.raises(ConfigError, match="q_proj"):
        replica.load()
    with pytest.raises(ModelError, match="load"):
        replica.update([], 0)
