"""Every built-in environment passes the check, in a process of its own and through a hub."""

from __future__ import annotations

import pytest

import tiderl
from tiderl.env.checker import check_environment

BUILT_IN = (
    *("tide/Calculator-v0", "tide/Pointer-v0", "tide/Safe-v0", "tide/Waiting-v0"),
    "gymnasium/FrozenLake-v1",
)


@pytest.mark.parametrize("env_id", BUILT_IN)
def test_t63_a_built_in_passes_and_a_worker_gives_the_same_bits(env_id: str) -> None:
    report = check_environment(env_id)
    assert report.ok, str(report)
    assert report.names("skip") == ([] if tiderl.spec(env_id).tools else ["answers"])
    assert "bit by bit" in report["remote"].detail
    assert "no process of it was left" in report["timeouts"].detail


def test_pictures_are_seen_where_there_are_pictures() -> None:
    report = check_environment("tide/Pointer-v0", tasks=1, isolate=False)
    assert report.ok, str(report)
    assert "images seen, all valid" in report["images"].detail
