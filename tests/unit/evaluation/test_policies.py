"""SPECs of policies, plug-ins among them."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from tiderl.agent.policy import Policy, PolicyOptions
from tiderl.agents.oracle import OraclePolicy
from tiderl.agents.random import RandomPolicy
from tiderl.errors import ConfigError, MissingExtra, TideError
from tiderl.evaluation import policies
from tiderl.evaluation.plan import EvaluationPlan
from tiderl.evaluation.policies import list_policies, load_policy, parse_spec


def plan(policy: str, **changes: Any) -> EvaluationPlan:
    return EvaluationPlan(env_id="demo/X-v0", policy=policy, **changes)


def test_built_in_policies_are_plug_ins_like_any_other() -> None:
    assert isinstance(load_policy(plan("oracle")), OraclePolicy)
    assert isinstance(load_policy(plan("random")), RandomPolicy)
    assert set(list_policies()) >= {
        "oracle",
        "random",
        "hf:FOLDER_OR_HUB_NAME",
        "run:RUN_DIR",
        "openai:BASE_URL#MODEL",
    }


def test_argument_is_all_after_the_first_colon() -> None:
    assert parse_spec("openai:http://h:1/v1#a:b") == ("openai", "http://h:1/v1#a:b")
    assert parse_spec("run:runs/x") == ("run", "runs/x")


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("orcale", "did you mean oracle"),
        ("opnai:http://h/v1#m", "did you mean openai:BASE_URL#MODEL"),
        ("zzzzzz", "use one of"),
        ("", "use one of"),
        ("hf", "hf:FOLDER_OR_HUB_NAME"),
        ("run:", "run:RUN_DIR"),
    ],
)
def test_wrong_specs(spec: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_spec(spec)
    assert told in str(caught.value)


def test_a_bare_folder_is_told_its_scheme(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"did you mean hf:{tmp_path}"):
        parse_spec(str(tmp_path))
    (tmp_path / "config.yaml").write_text("name: x")
    with pytest.raises(ConfigError, match=f"did you mean run:{tmp_path}"):
        parse_spec(str(tmp_path))


@pytest.mark.parametrize("spec", ["oracle:x", "random:7"])
def test_policies_without_arguments_refuse_one(spec: str) -> None:
    with pytest.raises(ConfigError, match="no argument"):
        load_policy(plan(spec))


@pytest.mark.parametrize("spec", ["oracle", "random", "openai:http://127.0.0.1:1/v1#m"])
def test_an_unknown_policy_arg_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="no --policy-arg 'dealine'"):
        load_policy(plan(spec, policy_kwargs={"dealine": 5}))


class Mine(Policy):
    """A user's policy."""

    name = "mine"

    def __init__(self, argument: str, options: PolicyOptions) -> None:
        if argument == "boom":
            raise RuntimeError("cannot")
        self.argument, self.options = argument, options

    async def act(self, messages: Any, spec: Any, state: Any) -> str:
        """Nothing."""
        return ""


def no_policy(argument: str, options: PolicyOptions) -> object:
    return object()


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entry points as installed packages would bring them."""
    here = f"{Mine.__module__}"
    import sys

    monkeypatch.setitem(sys.modules, "evaltest_plugin", sys.modules[here])
    values = {
        "mine": ["evaltest_plugin:Mine"],
        "empty": ["evaltest_plugin:no_policy"],
        "gone": ["evaltest_not_installed:X"],
        "twice": ["evaltest_plugin:Mine", "evaltest_plugin:no_policy"],
    }
    found = EntryPoints(EntryPoint(n, v, policies.GROUP) for n, vs in values.items() for v in vs)
    monkeypatch.setattr(policies, "entry_points", lambda **how: found.select(**how))


@pytest.mark.usefixtures("plugins")
def test_a_users_policy_gets_argument_and_options() -> None:
    found = load_policy(plan("mine:a:b", temperature=0.5, max_tokens=9, seed=3))
    assert isinstance(found, Mine)
    assert found.argument == "a:b"
    assert (found.options.temperature, found.options.max_tokens, found.options.seed) == (0.5, 9, 3)


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize(
    ("spec", "error", "told"),
    [
        ("mine:boom", ConfigError, "RuntimeError: cannot"),
        ("empty", ConfigError, "not a tiderl Policy"),
        ("gone", MissingExtra, "evaltest_not_installed"),
        ("twice", ConfigError, "two packages"),
    ],
)
def test_broken_plug_ins(spec: str, error: type[TideError], told: str) -> None:
    with pytest.raises(error, match=told):
        load_policy(plan(spec))
