"""Settings for the tests of training."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny products on several threads only wait for each other."""
    torch.set_num_threads(1)
