"""The groups of one update, taken as they become ready.

Invariants: a group is judged against the staleness bound at the moment it is taken, at the trainer's version;
a group of which too little is left is not trained, and its loss is counted; whatever was taken and not
trained is given back.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tiderl.trajectory.staleness import Shipment, StalePolicy, may_publish, ship

if TYPE_CHECKING:
    from tiderl.config import RunConfig
    from tiderl.rollout.driver import Rollout
    from tiderl.training.replica import Replica
    from tiderl.trajectory.group import Group


class Intake:
    """Collects the groups of the update that starts at `version`."""

    def __init__(self, rollout: Rollout, replica: Replica, config: RunConfig, version: int) -> None:
        self.rollout, self.replica, self.version = rollout, replica, version
        self.wanted = config.rollout.groups_per_update
        self.groups: list[Group] = []
        """What is trained on."""
        self.taken: list[Group] = []
        """As they were sampled."""
        self.shipments: list[Shipment] = []
        """What the staleness bound made of them."""
        self._bound = config.rollout.max_staleness
        self._policy = StalePolicy(config.rollout.stale)
        self._n_min = config.rollout.min_group_size
        self._together = config.rollout.policy == "sync"

    @property
    def complete(self) -> bool:
        """Enough groups are there, and after the step none would be out that is too old to wait for."""
        if len(self.taken) < self.wanted:
            return False
        return self._policy is not StalePolicy.WAIT or may_publish(
            self.version + 1, self.rollout.oldest_versions, self._bound
        )

    async def take(self) -> list[Group]:
        """The next ready groups, after the bound was applied (it may leave none of them)."""
        missing = self.wanted - len(self.taken)
        if missing > 0:
            count = missing if self._together else max(1, min(missing, self.rollout.ready))
        else:
            count = 1  # under `wait`: whatever is done next, until nothing too old is out
        taken = await self.rollout.take(count)
        self.taken += taken
        shipments = [
            ship(group, version=self.version, bound=self._bound, policy=self._policy, n_min=self._n_min)
            for group in taken
        ]
        self.shipments += shipments
        groups = [s.group for s in shipments if s.group is not None]
        self.groups += groups
        await asyncio.sleep(0)
        return groups

    def give_back(self) -> None:
        """The update does not take place."""
        self.rollout.give_back(self.taken)

    def metrics(self) -> dict[str, Any]:
        """What is out and what is waiting beside the groups of this update."""
        return {
            "groups_ready": self.rollout.ready,
            "groups_in_flight": self.rollout.in_flight,
        }
