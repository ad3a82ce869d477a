"""Fixtures that more than one area uses.

Invariant: tests write only below temporary folders, reach no network, and leave no process behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

# Before any import of torch, vLLM or transformers, here or in a process that a test starts.
for key, value in {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_WAIT_POLICY": "passive",
    "NO_COLOR": "1",
    "COLUMNS": "120",
}.items():
    os.environ.setdefault(key, value)
if "PYTEST_XDIST_WORKER" in os.environ:  # one process per core already; spinning threads would fight
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell ignores Ctrl-C for its background jobs, and processes that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine makes an example slow; pytest-timeout bounds whole tests.
hypothesis.settings.register_profile("tiderl", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("tiderl")

ROOT = Path(__file__).resolve().parents[1]

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Run `tiderl ARGUMENTS` as a user does, in a process of its own, in the test's folder.

    `cli("eval", "--env", "x", cwd=..., env={...}, timeout=60)` gives the CompletedProcess with text output.
    """

    def run(
        *arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tiderl.cli.main", *arguments],
            cwd=cwd or tmp_path,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run
