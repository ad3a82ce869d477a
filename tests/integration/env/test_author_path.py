"""The path of an author: four commands from nothing to an evaluated environment of one's own.

Once in an environment that borrows this one's packages, offline; once word for word in a bare one that
holds TideRL's core dependencies only.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
HEAVY = ("torch", "vllm", "transformers", "peft", "safetensors")
IN_MEMORY = """
import importlib.util, sys
import tiderl, tiderl.agent, tiderl.cli.main, tiderl.env, tiderl.evaluation, tiderl.hub, tiderl.trajectory
import tiderl.cli.env, tiderl.cli.eval

found = [name for name in HEAVY if importlib.util.find_spec(name) is not None]
assert not found, f"not bare: {found}"

@tiderl.register("here/Echo-v0")
class Echo(tiderl.AgentEnv):
    '''Say the word.'''
    def tasks(self, split):
        return [{"id": f"{split}-{n}", "prompt": f"Say {split}{n}.", "word": f"{split}{n}"} for n in range(4)]
    def score(self, text):
        return 1.0 if text == self.task["word"] else 0.0
    def oracle(self):
        return self.task["word"]

assert "here/Echo-v0" in [one.id for one in tiderl.list_environments()]
report = tiderl.check_environment("here/Echo-v0", isolate=False)
assert report.ok, str(report)
assert not [name for name in HEAVY if name in sys.modules]
print("bare and good")
"""


def run(words: list[str], folder: Path, environ: dict[str, str] | None = None) -> str:
    """Run a command that must succeed; returns its standard output."""
    done = subprocess.run(
        words, cwd=folder, env=environ or dict(os.environ), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def success_of(folder: Path) -> float:
    """The success in the only summary below a folder."""
    (summary,) = folder.rglob("summary.json")
    return float(json.loads(summary.read_text())["success"])


def test_the_four_commands_offline(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = str(tmp_path / "venv" / "bin" / "python")
    # The new environment sees this one's packages, pip among them, and installs into itself.
    site = tmp_path / "venv" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    packages = sysconfig.get_path("purelib")
    (site / "borrowed.pth").write_text(f"import site; site.addsitedir({packages!r})\n")
    tiderl = [python, "-m", "tiderl.cli.main"]
    text = run([*tiderl, "env", "new", "my-env"], tmp_path)
    assert [line.strip() for line in text.splitlines()[1:]] == [
        "pip install -e my-env",
        "tiderl env check my/Env-v0",
        "tiderl eval --env my/Env-v0 --policy oracle",
    ]
    run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "-e", "my-env"], tmp_path)
    assert "my/Env-v0: all checks passed" in run([*tiderl, "env", "check", "my/Env-v0"], tmp_path)
    run([*tiderl, "eval", "--env", "my/Env-v0", "--policy", "oracle", "--episodes", "16"], tmp_path)
    assert success_of(tmp_path) == 1.0
    tests = run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "my-env"], tmp_path)
    assert "3 passed" in tests


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_bare_environment_is_enough_to_write_check_and_evaluate(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(
        ROOT,
        source,
        ignore=lambda folder, names: [
            name
            for name in names
            if name.startswith(".") or name in ("build", "runs", "tests", "docs", "__pycache__")
        ],
    )
    bare = tmp_path / "bare"
    _install(bare, source)
    environ = {
        **os.environ,
        "PATH": f"{bare / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(bare),
    }
    environ.pop("PYTHONPATH", None)
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "echo.py").write_text(f"HEAVY = {HEAVY!r}\n" + IN_MEMORY)
    assert "bare and good" in run(["python", "echo.py"], folder, environ)
    # Word for word what `tiderl env new` and the documentation say.
    run(["tiderl", "env", "new", "my-env"], folder, environ)
    run(["pip", "install", "-e", "my-env"], folder, environ)
    assert "my/Env-v0: all checks passed" in run(["tiderl", "env", "check", "my/Env-v0"], folder, environ)
    run(["tiderl", "eval", "--env", "my/Env-v0", "--policy", "oracle"], folder, environ)
    assert success_of(folder) == 1.0
    assert "my/Env-v0" in run(["tiderl", "env", "list"], folder, environ)
    report = run(["tiderl", "env", "check", "tide/Calculator-v0", "--tasks", "1"], folder, environ)
    assert "all checks passed" in report


def _install(bare: Path, source: Path) -> None:
    """A new virtual environment with TideRL's core dependencies, by uv where there is one."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if uv is not None:
        run([uv, "venv", "-q", "--seed", "--python", sys.executable, str(bare)], bare.parent)
        run([uv, "pip", "install", "-q", "--python", str(bare / "bin" / "python"), str(source)], bare.parent)
    else:
        venv.create(bare, with_pip=True)
        run([str(bare / "bin" / "pip"), "install", "-q", str(source)], bare.parent)
