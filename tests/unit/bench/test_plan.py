"""What both sides of the benchmark are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from tiderl.bench.plan import bench_config, check_comparable, core_requirements, tasks, trl_plan
from tiderl.bench.trl_side import up_to_stop
from tiderl.bench.venv import torch_flags, trl_requirements, venv_folder
from tiderl.config import load_config
from tiderl.engine.tiny import CHAT_TEMPLATE
from tiderl.errors import ConfigError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer of the tiny model: a plan needs no weights."""
    folder = tmp_path_factory.mktemp("tokenizer")
    vocabulary = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    raw = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    raw.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_only_length_and_place_of_the_run_change(tmp_path: Path) -> None:
    config = load_config("quickstart")
    bench = bench_config(config, runs_dir=tmp_path, model=tmp_path, updates=4, seed=7)
    assert (bench.training.updates, bench.training.stop, bench.evaluation.episodes) == (4, None, 0)
    assert bench.rollout == config.rollout
    assert bench.engine == config.engine
    assert bench.training.model_copy(update={"updates": 40, "stop": None}) == config.training.model_copy(
        update={"updates": 40, "stop": None}
    )


def test_plan_is_the_quickstart_in_trls_words(tmp_path: Path, model: Path) -> None:
    config = bench_config(load_config("quickstart"), runs_dir=tmp_path, model=model, updates=2, seed=0)
    plan = json.loads(json.dumps(trl_plan(config, folder=tmp_path)))
    groups = config.rollout.groups_per_update
    assert (plan["groups"], plan["group_size"]) == (groups, config.rollout.group_size)
    assert len(plan["tasks"]) == 2 * groups
    assert plan["lora"] == {"rank": 16, "alpha": 32.0}
    assert (plan["dtype"], plan["max_turn_tokens"]) == ("float32", config.rollout.max_turn_tokens)
    assert plan["loss"]["loss_type"] == "dapo"
    assert plan["format"] == "tiderl.agents.lines:LinesFormat"
    assert all((Path(folder) / "__init__.py").is_file() for folder in plan["packages"].values())


def test_rounds_with_the_same_seed_have_the_same_tasks(tmp_path: Path, model: Path) -> None:
    def of(seed: int) -> list[dict[str, object]]:
        config = load_config("quickstart")
        return tasks(bench_config(config, runs_dir=tmp_path, model=model, updates=1, seed=seed))

    assert of(0) == of(0)
    assert of(0) != of(1)


@pytest.mark.parametrize(
    "override", ["training.loss.kind=gspo", "training.advantage.kind=rloo", "rollout.max_staleness=1"]
)
def test_what_trl_would_do_otherwise_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        check_comparable(load_config("quickstart", [override]))


def test_requirements_are_pinned_and_name_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDERL_CACHE", str(tmp_path))
    pins = trl_requirements()
    assert "trl==1.16.0" in pins
    assert all("==" in pin for pin in pins + core_requirements())
    assert venv_folder("trl", pins) == venv_folder("trl", pins[::-1])
    assert venv_folder("trl", pins) != venv_folder("trl", pins[1:])
    assert venv_folder("trl", pins).parent == tmp_path / "venvs"


def test_torch_comes_from_the_local_wheels_where_they_hold_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UV_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert torch_flags() == ["--torch-backend", "cpu"]
    (tmp_path / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl").touch()
    assert torch_flags() == ["--find-links", str(tmp_path)]


def test_padding_behind_the_first_stop_token_is_no_reply() -> None:
    assert up_to_stop([5, 6, 2, 2, 2], {2}) == [5, 6, 2]
    assert up_to_stop([5, 6, 7], {2}) == [5, 6, 7]
    assert up_to_stop([2], {2}) == [2]
