"""Fixtures of the evaluation's unit tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def direct() -> ModuleType:
    """The module `direct.py` beside this file, loaded once: loading it registers an environment."""
    spec = importlib.util.spec_from_file_location("evaltest_direct", Path(__file__).with_name("direct.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
