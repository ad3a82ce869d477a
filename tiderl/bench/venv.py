"""TRL's own virtual environment: made once, kept in TideRL's cache folder.

Invariants: a folder with its `complete` file holds exactly the pinned packages of its name's hash; an
attempt that fails or is interrupted leaves no folder; two processes never make one at the same time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

from tiderl.cache import cache_folder, locked, make_room
from tiderl.errors import ResourceError

COMPLETE = "complete"
INSTALL_TIMEOUT = 1800.0
LOCK_TIMEOUT = 1900.0
NEEDED_BYTES = 2_500_000_000


def trl_requirements() -> list[str]:
    """The pinned packages of TRL's side (`requirements/bench-trl.txt`)."""
    text = resources.files("tiderl.bench").joinpath("trl-requirements.txt").read_text()
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def venv_folder(name: str, requirements: Sequence[str]) -> Path:
    """The folder for these requirements and this Python; other pins get another folder."""
    text = "\n".join([*sorted(requirements), sys.version])
    return cache_folder() / "venvs" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def ensure_venv(name: str, requirements: Sequence[str], say: Callable[[str], None]) -> Path:
    """The Python of a virtual environment with exactly `requirements`; makes it at the first call.

    Raises:
        ResourceError: uv is missing, the disk is too full, or a package cannot be installed.
    """
    folder = venv_folder(name, requirements)
    python = folder / "bin" / "python"
    if (folder / COMPLETE).exists():
        return python
    uv = _uv()
    make_room(folder)
    free = shutil.disk_usage(folder.parent).free
    if free < NEEDED_BYTES:
        raise ResourceError(
            f"{name}'s virtual environment needs {NEEDED_BYTES / 1e9:.1f} GB of disk, "
            f"but {free / 1e9:.1f} GB are free",
            where=str(folder.parent),
            fix="free some, or set TIDERL_CACHE to a folder on another disk",
        )
    with locked(folder, timeout=LOCK_TIMEOUT, doing="making the virtual environment"):
        if (folder / COMPLETE).exists():
            return python
        say(f"making {name}'s own virtual environment, once: {folder}")
        try:
            _run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)], name)
            flags = torch_flags()
            _run([uv, "pip", "install", "--quiet", "--python", str(python), *flags, *requirements], name)
            (folder / COMPLETE).write_text("\n".join(requirements) + "\n")
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return python


def torch_flags() -> list[str]:
    """Where torch's CPU build comes from: a folder of wheels that holds it, else PyTorch's own index."""
    for place in (os.environ.get("UV_FIND_LINKS"), os.environ.get("PIP_FIND_LINKS")):
        if place and any(Path(place).glob("torch-*+cpu-*.whl")):
            return ["--find-links", place]
    return ["--torch-backend", "cpu"]


def _uv() -> str:
    beside = Path(sys.executable).parent / "uv"
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        raise ResourceError(
            "the program uv is needed to make TRL's virtual environment", fix="pip install uv"
        )
    return found


def _run(command: list[str], name: str) -> None:
    kept = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    try:
        done = subprocess.run(
            command,
            env=kept,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=INSTALL_TIMEOUT,
        )
    except subprocess.TimeoutExpired as error:
        raise ResourceError(
            f"{name}'s virtual environment was not ready after {INSTALL_TIMEOUT:.0f} s",
            fix="check the network and run it again",
        ) from error
    if done.returncode:
        said = " ".join(line.strip(" │├─▶╰×") for line in done.stderr.strip().splitlines()[-6:])
        raise ResourceError(
            f"{name}'s virtual environment could not be made; uv says: {said}",
            fix="check the network, or set PIP_FIND_LINKS to a folder that holds the wheels",
        )
