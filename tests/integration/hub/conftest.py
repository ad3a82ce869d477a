"""Registers the environments of `cases.py` and gives the tests small tools."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _load_cases() -> None:
    if "hub_cases" not in sys.modules:
        found = importlib.util.spec_from_file_location("hub_cases", HERE / "cases.py")
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules["hub_cases"] = module
        found.loader.exec_module(module)


_load_cases()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def alive() -> Callable[[int], bool]:
    """Whether a process runs (a zombie does not)."""
    return _alive


@pytest.fixture
def gone() -> Callable[[int, float], bool]:
    """Whether a process ends within some seconds."""

    def wait(pid: int, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while _alive(pid):
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

    return wait
