"""`pip install tiderl` without extras: environments and evaluation work with no torch and no vLLM.

The wheel is built as it would be released and installed, with its pinned dependencies, into a bare virtual
environment; everything below runs there, outside the repository.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UV = Path(sys.executable).parent / "uv"

pytestmark = pytest.mark.timeout(400)

MINE = '''
import tiderl

@tiderl.register("bare/Echo-v0")
class Echo(tiderl.AgentEnv):
    """Say the word."""
    max_turns = 1
    def tasks(self, split): return [{"id": w} for w in {"train": ["a", "b"], "test": ["c", "d"]}[split]]
    def start(self, task): return f"Say {task['id']}"
    def score(self, text): return float(text == self.task["id"])
    def oracle(self): return self.task["id"]

report = tiderl.check_environment("bare/Echo-v0")
print(report)
assert report.ok
import sys
assert not {"torch", "vllm", "transformers"} & set(sys.modules)
'''


def run(*command: str | Path, cwd: Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        [str(word) for word in command], cwd=cwd, env=kept, capture_output=True, text=True, timeout=timeout
    )


def must(*command: str | Path, cwd: Path, timeout: float = 120) -> str:
    done = run(*command, cwd=cwd, timeout=timeout)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a virtual environment that holds the wheel and nothing but what it asks for."""
    folder = tmp_path_factory.mktemp("bare")
    source = folder / "source"
    must("git", "clone", "--quiet", "--no-hardlinks", ROOT, source, cwd=folder)
    must(UV, "build", "--quiet", "--wheel", "--out-dir", folder / "dist", source, cwd=folder, timeout=200)
    must(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    wheel = next((folder / "dist").glob("tiderl-*.whl"))
    python = folder / "venv" / "bin" / "python"
    must(UV, "pip", "install", "--quiet", "--python", python, wheel, cwd=folder, timeout=200)
    return folder / "venv" / "bin"


def test_no_training_packages_are_pulled_in(bare: Path, tmp_path: Path) -> None:
    code = "from importlib.metadata import distributions; print([d.name.lower() for d in distributions()])"
    names = must(bare / "python", "-c", code, cwd=tmp_path)
    assert all(name not in names for name in ("torch", "vllm", "transformers", "peft", "pytest"))


def test_data_files_are_in_the_wheel(bare: Path, tmp_path: Path) -> None:
    code = (
        "from importlib.resources import files\n"
        "assert (files('tiderl') / 'py.typed').is_file()\n"
        "assert 'trl==' in (files('tiderl.bench') / 'trl-requirements.txt').read_text()\n"
        "assert (files('tiderl.configs') / 'quickstart.yaml').is_file()"
    )
    must(bare / "python", "-c", code, cwd=tmp_path)


def test_register_and_check(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    must(bare / "python", "mine.py", cwd=tmp_path)


def test_commands(bare: Path, tmp_path: Path) -> None:
    tiderl = bare / "tiderl"
    assert "tide/Calculator-v0" in must(tiderl, "env", "list", cwd=tmp_path)
    must(tiderl, "env", "check", "tide/Calculator-v0", cwd=tmp_path)
    for policy in ("oracle", "random"):
        out = tmp_path / policy
        plan = ("--env", "tide/Calculator-v0", "--policy", policy, "--episodes", "8")
        must(tiderl, "eval", *plan, "--out", out, cwd=tmp_path)
    figures = {
        p: json.loads((tmp_path / p / "summary.json").read_text())["success"] for p in ("oracle", "random")
    }
    assert figures["oracle"] == 1.0
    assert figures["random"] < 1.0


def test_shipped_configuration_and_missing_extra(bare: Path, tmp_path: Path) -> None:
    assert "tide/Calculator-v0" in must(bare / "tiderl", "train", "quickstart", "--dry-run", cwd=tmp_path)
    refused = run(bare / "tiderl", "train", "quickstart", cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: ")
    assert refused.stderr.count("\n") == 1
    assert "tiderl[cpu]" in refused.stderr
    assert not (tmp_path / "runs").exists()


def test_scaffold_is_in_the_wheel(bare: Path, tmp_path: Path) -> None:
    must(bare / "tiderl", "env", "new", "my-env", cwd=tmp_path)
    must(
        UV,
        "pip",
        "install",
        "--quiet",
        "--python",
        bare / "python",
        "--no-deps",
        "-e",
        "my-env",
        cwd=tmp_path,
    )
    must(bare / "tiderl", "env", "check", "my/Env-v0", cwd=tmp_path)
    must(bare / "tiderl", "eval", "--env", "my/Env-v0", "--policy", "oracle", "--episodes", "4", cwd=tmp_path)
