"""The trajectories of an evaluation, on disk.

Invariant: a trajectory is written before its episode's record; one that a kill left without a record is
written again when its episode is run again, and the later one counts (`EpisodeStore.iterate(latest=True)`).
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from .journal import EPISODES
from .plan import PlannedEpisode

if TYPE_CHECKING:
    from ..trajectory.trajectory import Trajectory
    from .episode import PlayedEpisode


def trajectory_of(env_id: str, planned: PlannedEpisode, played: PlayedEpisode) -> Trajectory:
    """The played episode as a trajectory; without tokens where the policy keeps no token record."""
    if played.trajectory is not None:
        return played.trajectory
    from ..trajectory.trajectory import Trajectory

    return Trajectory(
        episode_id=f"episode-{planned.index:06d}",
        task=planned.task,
        group=f"{env_id}:{planned.index}",
        ordinal=planned.index,
        member=0,
        seed=planned.seed,
        env_id=env_id,
        split=planned.split,
        rewards=list(played.rewards),
        end=played.end,
        success=played.success and played.end.valid,
        turns=played.model_calls,
        messages=played.messages,
        invalid_actions=played.invalid_actions,
        forks=played.forks,
        seconds={"total": played.seconds, "policy": math.fsum(played.latencies)},
        note=played.error or "",
    )


class EpisodeFolder:
    """`episodes/` under an evaluation's folder; a context manager. Safe to call from any thread."""

    def __init__(self, out: Path) -> None:
        from ..trajectory.store import EpisodeStore

        self.store = EpisodeStore(out / EPISODES)

    def __enter__(self) -> EpisodeFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()

    def append(self, env_id: str, planned: PlannedEpisode, played: PlayedEpisode) -> None:
        """Write one trajectory with its messages and pictures.

        Raises:
            ResourceError: the disk is full.
        """
        part = re.sub(r"[^A-Za-z0-9._-]", "-", planned.split).lstrip("._-") or "episodes"
        self.store.append(trajectory_of(env_id, planned, played), part=part)
