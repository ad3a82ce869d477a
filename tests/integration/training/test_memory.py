"""Memory stays flat: no graph, no batch and no logits outlive an update."""

from __future__ import annotations

import gc
import os
from typing import Any

import torch


def resident() -> int:
    """Resident set of this process, bytes."""
    with open("/proc/self/statm") as handle:
        return int(handle.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_sixty_updates_keep_the_resident_set(make_replica: Any, make_groups: Any) -> None:
    replica = make_replica(kl_coef=0.1)
    batches = [make_groups(4, 6, seed=s, noise=0.1) for s in range(5)]
    for version in range(10):
        replica.update(batches[version % 5], version)
    gc.collect()
    before, tensors = resident(), _tensors()
    for version in range(60):
        replica.update(batches[version % 5], version)
    gc.collect()
    assert _tensors() <= tensors
    assert resident() - before < 24 << 20


def _tensors() -> int:
    return sum(1 for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter))
