"""What `run:` and `hf:` read from disk before an engine starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tiderl.config import RunConfig
from tiderl.config.load import dump_config
from tiderl.errors import ConfigError, ModelError
from tiderl.evaluation.plan import EvaluationPlan
from tiderl.evaluation.policies import load_policy
from tiderl.evaluation.policies_engine import weights_digest
from tiderl.evaluation.run_folder import evaluation_defaults, find_weights, read_config


def config(**changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "name": "demo",
        "seed": 5,
        "model": {"path": "m"},
        "environment": {"id": "demo/X-v0", "kwargs": {"size": 4}},
        "evaluation": {"split": "held-out", "episodes": 17},
    }
    return RunConfig.model_validate(values | changes)


def checkpoint(folder: Path, *, whole: bool = True) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x" * 1000)
    if whole:
        (folder / "run.json").write_text("{}")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(dump_config(config()))
    return tmp_path


def test_configuration_is_the_runs_own(run: Path) -> None:
    assert read_config(run) == config()


def test_defaults_are_those_of_the_runs_evaluation(run: Path) -> None:
    assert evaluation_defaults(run, "demo/X-v0") == {
        "seed": 5,
        "split": "held-out",
        "episodes": 17,
        "env_kwargs": {"size": 4},
    }
    assert evaluation_defaults(run, "demo/Other-v0") == {"seed": 5}


def test_final_weights_come_before_the_newest_step(run: Path) -> None:
    with pytest.raises(ModelError, match="no checkpoint"):
        find_weights(run)
    early = checkpoint(run / "checkpoints" / "step-000010")
    late = checkpoint(run / "checkpoints" / "step-000020")
    checkpoint(run / "checkpoints" / "step-000030", whole=False)
    assert find_weights(run) == late != early
    final = checkpoint(run / "checkpoints" / "final", whole=False)
    assert find_weights(run) == final


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run folder"):
        read_config(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"no config\.yaml"):
        read_config(tmp_path)


def test_unknown_option_of_an_engine_policy(run: Path) -> None:
    plan = EvaluationPlan("demo/X-v0", f"run:{run}", policy_kwargs={"max_lenght": 3})
    with pytest.raises(ConfigError, match="max_length"):
        load_policy(plan)


def test_digest_follows_the_weights_and_not_the_folder(tmp_path: Path) -> None:
    one, two = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b")
    assert weights_digest(one) == weights_digest(two)
    (two / "model.safetensors").write_bytes(b"x" * 999 + b"y")
    assert weights_digest(one) != weights_digest(two)
    (one / "config.json").write_text(json.dumps({"vocab_size": 3}))
    assert weights_digest(one) != weights_digest(two)
