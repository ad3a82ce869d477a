"""Trajectories made without an engine."""

from __future__ import annotations

from typing import Any

import pytest

from tiderl.env.ends import EndReason
from tiderl.trajectory.record import TokenRecord
from tiderl.trajectory.trajectory import Trajectory


def trajectory(
    *,
    rewards: tuple[float, ...] = (1.0,),
    end: EndReason = EndReason.SUCCESS,
    version: int = 0,
    tokens: int = 3,
    member: int = 0,
    ordinal: int = 0,
    **more: Any,
) -> Trajectory:
    """One record with a turn a reward; each turn samples `tokens` tokens at `version`."""
    record = TokenRecord()
    for turn, _ in enumerate(rewards):
        record.append_context([1, 2])
        if tokens:
            record.append_sampled([10 + turn] * tokens, [-0.25] * tokens, [version + turn] * tokens)
    return Trajectory(
        episode_id=f"g{ordinal:06d}m{member:02d}",
        task="t0",
        group=f"demo/Safe-v0:{ordinal}",
        ordinal=ordinal,
        member=member,
        seed=7,
        env_id="demo/Safe-v0",
        split="train",
        records=[record],
        rewards=list(rewards),
        end=end,
        success=end is EndReason.SUCCESS,
        turns=len(rewards) if tokens else 0,
        **more,
    )


@pytest.fixture(scope="session")
def make_trajectory() -> Any:
    return trajectory
