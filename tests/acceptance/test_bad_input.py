"""Bad input to `tiderl train` and `tiderl eval`: one sentence, exit code 2, no traceback, nothing left."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.timeout(200)]


@pytest.fixture
def refused(cli: Any, config: Path, environ: dict[str, str], tmp_path: Path) -> Any:
    """Run `tiderl train` on the tiny configuration with overrides; returns the error's text."""

    def run(*arguments: str, command: tuple[str, ...] | None = None) -> str:
        before = sorted(tmp_path.rglob("*"))
        done = cli(*(command or ("train", str(config))), *arguments, env=environ, timeout=150)
        assert done.returncode == 2, done.stdout + done.stderr
        error = done.stderr.strip().splitlines()[-1]
        assert error.startswith("error: ")
        assert "Traceback" not in done.stderr
        assert sorted(tmp_path.rglob("*")) == before
        return str(error)

    return run


def test_unknown_key(refused: Any) -> None:
    assert "did you mean 'training.updates'" in refused("training.update=3")


def test_wrong_type(refused: Any) -> None:
    assert "training.updates" in refused("training.updates=many")


def test_missing_model_folder(refused: Any) -> None:
    assert "no-such-model" in refused("model.path=./no-such-model")


def test_checkpoint_without_a_chat_template(refused: Any, tiny: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny, bare)
    (bare / "chat_template.jinja").unlink()
    assert "chat template" in refused(f"model.path={bare}")


def test_unknown_environment(refused: Any) -> None:
    assert "tide/Calculator-v0" in refused("environment.id=tide/Calculater-v0")


def test_unknown_split(refused: Any) -> None:
    assert "train" in refused("environment.split=tarin")


def test_unreachable_endpoint(refused: Any) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ("eval", "--env", "tide/Safe-v0", "--policy", f"openai:http://127.0.0.1:{port}/v1#m")
    assert str(port) in refused("--episodes", "2", command=command)


def test_prompt_longer_than_the_limit(refused: Any) -> None:
    assert "max_episode_tokens" in refused("rollout.max_episode_tokens=32")


def test_finished_run(cli: Any, config: Path, environ: dict[str, str], refused: Any, tmp_path: Path) -> None:
    finished = tmp_path / "runs" / "done"
    finished.mkdir(parents=True)
    (finished / "config.yaml").write_text("name: done\n")
    (finished / "summary.json").write_text("{}")
    error = refused("name=done")
    assert "finished run" in error
    assert "--fresh" in error


def test_port_in_use(refused: Any) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        error = refused("--tensorboard", str(port))
    assert str(port) in error
    assert "another port" in error


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)],
        check=True,
        timeout=20,
        capture_output=True,
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


def test_no_free_disk(refused: Any, small_disk: Path) -> None:
    assert "disk" in refused(f"runs_dir={small_disk}")
