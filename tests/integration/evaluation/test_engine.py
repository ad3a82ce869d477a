"""`run:` and `hf:` policies in a real engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tiderl.config import RunConfig
from tiderl.config.load import dump_config
from tiderl.engine.tiny import make_tiny_model
from tiderl.errors import PromptTooLong
from tiderl.evaluation.engine_policy import EnginePolicy
from tiderl.evaluation.plan import EvaluationPlan
from tiderl.evaluation.policies import load_policy
from tiderl.evaluation.runner import evaluate
from tiderl.trajectory.store import EpisodeStore

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("installed"), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder as training leaves it, with random weights."""
    folder = tmp_path_factory.mktemp("runs") / "demo"
    make_tiny_model(folder / "checkpoints" / "final", seed=1)
    config = RunConfig.model_validate(
        {
            "name": "demo",
            "model": {"path": "m", "max_length": 1024},
            "environment": {"id": "evalrun/Word-v0", "workers": 1},
            "agent": {"format": "hermes"},
            "rollout": {"max_turn_tokens": 8, "max_episode_tokens": 1024, "deterministic": True},
            "engine": {"kv_tokens": 8192, "max_sessions": 8, "threads": 1},
            "evaluation": {"episodes": 5, "temperature": 1.0},
        }
    )
    (folder / "config.yaml").write_text(dump_config(config))
    return folder


def replies(out: Path) -> list[list[str]]:
    found = sorted(EpisodeStore(out / "episodes").iterate(latest=True), key=lambda t: t.ordinal)
    return [[str(m["content"]) for m in t.messages if m["role"] == "assistant"] for t in found]


async def test_a_runs_policy_plays_the_same_twice(run: Path, tmp_path: Path) -> None:
    """Equal plans are equal episodes, reply by reply; a first prompt that never fits is an error."""
    plan = EvaluationPlan("evalrun/Word-v0", f"run:{run}", 5, workers=1, out=tmp_path / "one")
    policy = load_policy(plan)
    assert isinstance(policy, EnginePolicy)
    try:
        await policy.start()
        first = await evaluate(plan, policy=policy)
        assert first.valid == 5
        assert all(e.completion_tokens >= e.turns > 0 for e in first.episodes)
        assert all(len(e.latencies) == e.model_calls for e in first.episodes)
        assert first.configuration["policy"]["model"] == "demo/final"
        again = await evaluate(
            EvaluationPlan("evalrun/Word-v0", f"run:{run}", 5, workers=1, out=tmp_path / "two"), policy=policy
        )
        short = replace(policy.limits, max_episode_tokens=64)
        with pytest.raises(PromptTooLong):
            await evaluate(
                EvaluationPlan("evalrun/Word-v0", "short", 3, workers=1, out=tmp_path / "three"),
                policy=EnginePolicy(policy.engine, policy.agent, short, gate=policy.gate),
            )
        assert not (tmp_path / "three").exists()
    finally:
        await policy.close()
    assert replies(tmp_path / "one") == replies(tmp_path / "two")
    assert [(e.task, e.seed, e.prompt_tokens) for e in first.episodes] == [
        (e.task, e.seed, e.prompt_tokens) for e in again.episodes
    ]


def test_hf_from_the_command_line(run: Path, tmp_path: Path, cli) -> None:  # type: ignore[no-untyped-def]
    """Starts an engine, plays, writes; a second call with nothing left to do starts none."""
    arguments = (
        "eval --env evalrun/Word-v0 --workers 1 -n 3 --max-tokens 8 --json --out e "
        f"--policy-arg max_length=600 --policy-arg threads=1 --policy hf:{run / 'checkpoints' / 'final'}"
    ).split()
    done = cli(*arguments, timeout=300)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["valid"], summary["policy"]) == (3, f"hf:{run / 'checkpoints' / 'final'}")
    assert summary["tokens"]["completion"] > 0
    assert "vllm" in " ".join(summary["versions"])
    again = cli(*arguments, timeout=60)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) == summary


def test_a_checkpoint_without_a_chat_template(run: Path, tmp_path: Path, cli) -> None:  # type: ignore[no-untyped-def]
    model = make_tiny_model(tmp_path / "model")
    (model / "chat_template.jinja").unlink(missing_ok=True)
    told = model / "tokenizer_config.json"
    data = json.loads(told.read_text())
    data.pop("chat_template", None)
    told.write_text(json.dumps(data))
    done = cli("eval", "--env", "evalrun/Word-v0", "--policy", f"hf:{model}", "--out", "e")
    assert done.returncode == 2
    assert "no chat template" in done.stderr
    assert len(done.stderr.strip().splitlines()[-1].split(". ")) == 1
    assert not (tmp_path / "e").exists()
