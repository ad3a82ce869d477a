"""Keeps episodes in flight and hands over whole groups, without a barrier between updates.

Invariants: a group is handed over once, with every member it started, valid or not; groups are queued in
the order of the task stream, and never more of them than the staleness bound can carry; a group that
stays in flight holds up nobody else's; `close()` ends every episode in flight and frees what it held.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tiderl.env.ends import EndReason
from tiderl.errors import EngineError, InfrastructureError
from tiderl.rollout.episode import EpisodeLimits, EpisodeSpec, new_trajectory, run_episode
from tiderl.rollout.tasks import TaskStream, derive_seed
from tiderl.trajectory.group import Group

if TYPE_CHECKING:
    from tiderl.agent.chat import ChatAgent
    from tiderl.hub.base import Hub
    from tiderl.rollout.conductor import Conductor
    from tiderl.trajectory.trajectory import Trajectory

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutSettings:
    """What a rollout needs to know; sizes in episodes, groups, versions."""

    env_id: str
    split: str
    seed: int
    group_size: int
    groups_per_update: int
    max_staleness: int = 0
    min_valid: int = 2
    """A group with fewer valid members is issued again, `retries` times."""
    retries: int = 1
    max_failures: int = 16
    env_kwargs: dict[str, Any] = field(default_factory=dict)


class Rollout:
    """Runs groups of episodes of a task stream, at most `max_staleness` versions ahead of the trainer."""

    def __init__(
        self,
        settings: RolloutSettings,
        *,
        conductor: Conductor,
        hub: Hub,
        agent: ChatAgent,
        tasks: TaskStream,
        limits: EpisodeLimits,
        on_episode: Callable[[Trajectory], None] | None = None,
    ) -> None:
        self.settings, self.conductor, self.hub, self.agent = settings, conductor, hub, agent
        self.tasks, self.limits = tasks, limits
        self.on_episode = on_episode
        self.failures_in_a_row = 0
        self._done: set[int] = set()
        self._next = 0
        self._allowed = 0
        self._ready: dict[int, Group] = {}
        self._running: dict[int, asyncio.Task[Group]] = {}
        self._changed = asyncio.Event()
        self._error: BaseException | None = None

    @property
    def in_flight(self) -> int:
        """Groups that have started and are not finished."""
        return len(self._running)

    @property
    def ready(self) -> int:
        """Finished groups that nobody has taken yet."""
        return len(self._ready)

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs: the ordinals that were trained (as a floor and what lies above it)."""
        floor = 0
        while floor in self._done:
            floor += 1
        return {
            "floor": floor,
            "above": sorted(o for o in self._done if o > floor),
            "tasks": self.tasks.fingerprint,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on after the groups that were trained; everything else of the stream is issued again."""
        self._done = set(range(state["floor"])) | set(state["above"])
        self._next = state["floor"]

    def advance(self, updates: int) -> None:
        """`updates` are done: queue groups up to the staleness bound.

        At most `(updates + 1 + max_staleness) * groups_per_update` groups are ever started, so what the
        trainer takes is on average no older than that (AReaL's pace); a policy with a step barrier admits
        those of the next update only.
        """
        per_update = self.settings.groups_per_update
        self._allowed = (updates + 1 + self.settings.max_staleness) * per_update
        self.conductor.barrier = self._ordinal_after((updates + 1) * per_update)
        while self._started() < self._allowed:
            while self._next in self._done:
                self._next += 1
            ordinal, self._next = self._next, self._next + 1
            task = asyncio.create_task(self._run_group(ordinal), name=f"group-{ordinal}")
            self._running[ordinal] = task
            task.add_done_callback(functools.partial(self._finished, ordinal))

    def _ordinal_after(self, groups: int) -> int:
        """The ordinal up to which the stream holds `groups` groups that were or may be trained."""
        left = groups - len(self._done)
        if left <= 0:
            return 0
        pending = sorted([*self._ready, *self._running])
        if left <= len(pending):
            return pending[left - 1] + 1
        ordinal, left = self._next, left - len(pending)
        while True:
            left -= ordinal not in self._done
            if left == 0:
                return ordinal + 1
            ordinal += 1

    def _started(self) -> int:
        return len(self._done) + len(self._ready) + len(self._running)

    async def take(self, count: int) -> list[Group]:
        """The next `count` finished groups, first finished first; they count as trained from now on.

        With `max_staleness` 0 and `count` groups an update these are exactly the groups of this version.
        Raises whatever made a group impossible (no engine left, a broken environment, too many
        infrastructure failures).
        """
        while len(self._ready) < count:
            if self._error is not None:
                raise self._error
            if not self._running:
                raise RuntimeError(f"{count} groups were asked for, but none is running; call advance()")
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error
        taken = [self._ready.pop(o) for o in list(self._ready)[:count]]
        self._done.update(g.ordinal for g in taken)
        return sorted(taken, key=lambda g: g.ordinal)

    def give_back(self, groups: Sequence[Group]) -> None:
        """Groups that were taken but not trained: a checkpoint made now issues them again."""
        self._done.difference_update(g.ordinal for g in groups)

    @property
    def oldest_versions(self) -> list[int]:
        """The oldest version in each task in flight and each finished group; -1: none sampled."""
        return [
            *(task.version for task in self.conductor.table.tasks()),
            *(group.oldest_version for group in self._ready.values()),
        ]

    async def close(self) -> None:
        """Cancel what is in flight and wait until it has let go of KV and environments."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=30)

    def _finished(self, ordinal: int, task: asyncio.Task[Group]) -> None:
        self._running.pop(ordinal, None)
        if not task.cancelled():
            if (error := task.exception()) is not None:
                while isinstance(error, BaseExceptionGroup):
                    error = error.exceptions[0]
                self._error = self._error or error
            else:
                self._ready[ordinal] = task.result()
        self._changed.set()

    async def _run_group(self, ordinal: int) -> Group:
        for issue in range(self.settings.retries + 1):
            group = await self._issue(ordinal, issue)
            if len(group.valid_members) >= self.settings.min_valid:
                break
            log.warning(
                "group %d has %d valid members, %d are needed",
                ordinal,
                len(group.valid_members),
                self.settings.min_valid,
            )
        return group

    async def _issue(self, ordinal: int, issue: int) -> Group:
        item = self.tasks.item(ordinal)
        again = f"i{issue}" if issue else ""
        seeds = (
            (self.settings.seed, "sampling", ordinal)
            if not issue
            else (self.settings.seed, "issue", issue, ordinal)
        )
        specs = [
            EpisodeSpec(
                episode_id=f"g{ordinal:06d}m{member:02d}{again}",
                env_id=self.settings.env_id,
                task=item.task,
                split=self.settings.split,
                seed=item.seed,
                sampling_seed=derive_seed(*seeds, member),
                ordinal=ordinal,
                member=member,
            )
            for member in range(self.settings.group_size)
        ]
        async with asyncio.TaskGroup() as group:
            members = [group.create_task(self._run_member(spec)) for spec in specs]
        return Group(task=item.task, ordinal=ordinal, members=[m.result() for m in members])

    async def _run_member(self, spec: EpisodeSpec) -> Trajectory:
        trajectory = await self._run_once(spec)
        for attempt in range(1, self.settings.retries + 1):
            if trajectory.end is not EndReason.INFRASTRUCTURE:
                break
            log.warning("episode %s failed by infrastructure: %s", spec.episode_id, trajectory.note)
            trajectory = await self._run_once(replace(spec, episode_id=f"{spec.episode_id}r{attempt}"))
        self._watch_failures(trajectory)
        if self.on_episode is not None:
            self.on_episode(trajectory)
        return trajectory

    async def _run_once(self, spec: EpisodeSpec) -> Trajectory:
        kind = self.settings.env_id
        try:
            async with self.conductor.task(spec.episode_id, spec.order, kind) as task:
                async with self.hub.session(self.settings.env_id, **self.settings.env_kwargs) as env:
                    trajectory = await run_episode(
                        spec, env, task, self.agent, self.limits, acting=task.acting
                    )
                task.finish(trajectory.end, tokens=trajectory.sampled_tokens)
        except EngineError:
            raise
        except InfrastructureError as error:
            trajectory = new_trajectory(spec)
            trajectory.end, trajectory.note = EndReason.INFRASTRUCTURE, str(error)
        return trajectory

    def _watch_failures(self, trajectory: Trajectory) -> None:
        if trajectory.end is not EndReason.INFRASTRUCTURE:
            self.failures_in_a_row = 0
            return
        self.failures_in_a_row += 1
        if self.failures_in_a_row >= self.settings.max_failures:
            raise InfrastructureError(
                f"{self.failures_in_a_row} episodes in a row failed by infrastructure; the last one: "
                f"{trajectory.note}",
                where=self.settings.env_id,
                fix=f"mend it; `tiderl env check {self.settings.env_id}` shows more",
            )
