"""The configuration: every fault names key, place and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiderl.config import dump_config, load_config
from tiderl.errors import ConfigError

BASE = "model: {path: m}\nenvironment: {id: tide/Safe-v0}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(BASE)
    return path


def fault(*args: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(*args)  # type: ignore[arg-type]
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_defaults_and_overrides(file: Path) -> None:
    config = load_config(file, ["training.learning_rate=3e-4", "model.lora={rank: 4, alpha: 8}", "seed=7"])
    assert config.training.learning_rate == 3e-4
    assert config.model.lora is not None
    assert config.model.lora.rank == 4
    assert config.seed == 7
    assert load_config(file, ["model.lora=null"]).model.lora is None


def test_quickstart_is_found_by_name_and_round_trips(tmp_path: Path) -> None:
    config = load_config("quickstart")
    assert config.name == "quickstart"
    again = tmp_path / "again.yaml"
    again.write_text(dump_config(config))
    assert load_config(again) == config


def test_unknown_key_names_the_nearest(file: Path) -> None:
    text = fault(file, ["training.learning_rat=1"])
    assert "training.learning_rat" in text
    assert "did you mean 'training.learning_rate'" in text
    assert "command line" in text


def test_unknown_key_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(BASE + "rolout: {group_size: 4}\n")
    text = fault(path)
    assert "'rolout'" in text
    assert "did you mean 'rollout'" in text
    assert str(path) in text


def test_unknown_key_below_an_optional_section(file: Path) -> None:
    assert "did you mean 'model.lora.rank'" in fault(file, ["model.lora.rnak=4"])


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("training.updates=many", "training.updates"),
        ("rollout.temperature=-1", "rollout.temperature"),
        ("model.dtype=float64", "model.dtype"),
        ("training.loss.kl_kind=k9", "training.loss.kl_kind"),
        ("environment.kwargs=3", "environment.kwargs"),
        ("name=a/b", "name"),
    ],
)
def test_wrong_value_names_the_key(file: Path, override: str, key: str) -> None:
    assert f"'{key}'" in fault(file, [override])


def test_missing_key(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("model: {path: m}\n")
    assert "key 'environment' is missing" in fault(path)


@pytest.mark.parametrize("text", ["a: [1", "- 1\n- 2\n", "", "a: b: c"])
def test_files_that_are_no_mapping(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert str(path) in fault(path)


def test_no_such_file() -> None:
    assert "quickstart" in fault("quikstart")


def test_override_without_equals_sign(file: Path) -> None:
    assert "a.b=value" in fault(file, ["seed"])


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("rollout.max_episode_tokens=4096", "model.max_length"),
        ("rollout.group_size=1", "rollout.group_size"),
        ("training.loss.correction=tis_token", "training.loss.old"),
        ("engine.kv_tokens=64", "engine.kv_tokens"),
    ],
)
def test_keys_that_contradict_each_other(file: Path, override: str, names: str) -> None:
    assert names in fault(file, [override])


@pytest.mark.parametrize(
    ("overrides", "kwargs"),
    [
        ([], {"a": 1, "b": {"c": 2}}),
        (["environment.kwargs={}"], {}),
        (["environment.kwargs={}", "environment.kwargs.d=4"], {"d": 4}),
        (["environment.kwargs.b={}"], {"a": 1, "b": {}}),
        (["environment.kwargs={d: 4}"], {"a": 1, "b": {"c": 2}, "d": 4}),
    ],
)
def test_an_empty_mapping_drops_what_the_file_says(
    tmp_path: Path, overrides: list[str], kwargs: dict[str, object]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\nenvironment: {id: tide/Safe-v0, kwargs: {a: 1, b: {c: 2}}}\n")
    assert load_config(path, overrides).environment.kwargs == kwargs


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe\x00", "is not text"),
        (b"\x89PNG\r\n\x1a\n", "is not text"),
        (b"", "is not a mapping"),
        (b"- a\n- b\n", "is not a mapping"),
        (b"a: [\n", "not valid YAML"),
        (b"\x00", "not valid YAML"),
        (b"model: {path: '${nothing}'}\n", "the configuration cannot be resolved"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    text = fault(path)
    assert said in text
    assert str(path) in text


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "run.yaml"
    path.write_text(BASE)
    monkeypatch.setattr(Path, "read_text", refuse)
    assert "cannot be read: Permission denied" in fault(path)


def test_an_override_without_a_key_says_so(file: Path) -> None:
    assert "has no key before its '='" in fault(file, ["=3"])
    assert "has no '='" in fault(file, ["seed"])


@pytest.mark.parametrize(
    ("changes", "told"),
    [(["rollout.policy=fifo"], "fifo"), (["rollout.policy=ctb", "rollout.policy_options.kappa=3"], "kappa")],
)
def test_an_unknown_policy_or_option_is_found_before_a_run(changes: list[str], told: str) -> None:
    from tiderl.config.check import scheduling_policy

    config = load_config("quickstart", ["rollout.deterministic=false", *changes])
    with pytest.raises(ConfigError, match=told):
        scheduling_policy(config)
