"""Keeps episodes in flight and hands over whole groups.

Invariants: a group is handed over once, with every member it started, valid or not; groups are started
in the order of the task stream, and never so far ahead that the staleness bound could be broken;
`close()` ends every episode in flight and frees what it held.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tiderl.env.ends import EndReason
from tiderl.errors import InfrastructureError
from tiderl.rollout.admission import Admission
from tiderl.rollout.episode import EpisodeLimits, EpisodeSpec, new_trajectory, run_episode
from tiderl.rollout.gate import FreeGate, TurnGate
from tiderl.rollout.tasks import TaskStream, derive_seed
from tiderl.scheduling.admission import WaitingEpisode
from tiderl.trajectory.group import Group

if TYPE_CHECKING:
    from tiderl.agent.chat import ChatAgent
    from tiderl.engine.base import Engine
    from tiderl.hub.base import Hub
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
    retries: int = 1
    max_failures: int = 16
    env_kwargs: dict[str, Any] = field(default_factory=dict)


class Rollout:
    """Runs groups of episodes of a task stream, at most `max_staleness` versions ahead of the trainer."""

    def __init__(
        self,
        settings: RolloutSettings,
        *,
        engine: Engine,
        hub: Hub,
        agent: ChatAgent,
        tasks: TaskStream,
        limits: EpisodeLimits,
        admission: Admission,
        gate: TurnGate | None = None,
        on_episode: Callable[[Trajectory], None] | None = None,
    ) -> None:
        self.settings, self.engine, self.hub, self.agent = settings, engine, hub, agent
        self.tasks, self.limits, self.admission = tasks, limits, admission
        self.gate = gate or FreeGate()
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
        """`updates` are done: let groups start up to the staleness bound, and start them."""
        per_update = self.settings.groups_per_update
        self._allowed = (updates + 1 + self.settings.max_staleness) * per_update
        while self._started() < self._allowed:
            while self._next in self._done:
                self._next += 1
            ordinal, self._next = self._next, self._next + 1
            task = asyncio.create_task(self._run_group(ordinal), name=f"group-{ordinal}")
            self._running[ordinal] = task
            task.add_done_callback(functools.partial(self._finished, ordinal))

    def _started(self) -> int:
        return len(self._done) + len(self._ready) + len(self._running)

    async def take(self, count: int) -> list[Group]:
        """The next `count` finished groups, lowest ordinals first; they count as trained from now on.

        With `max_staleness` 0 these are exactly the groups of this version. Raises whatever made a
        group impossible (a dead engine, a broken environment, too many infrastructure failures).
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
        taken = [self._ready.pop(o) for o in sorted(self._ready)[:count]]
        self._done.update(g.ordinal for g in taken)
        return taken

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
        item = self.tasks.item(ordinal)
        specs = [
            EpisodeSpec(
                episode_id=f"g{ordinal:06d}m{member:02d}",
                env_id=self.settings.env_id,
                task=item.task,
                split=self.settings.split,
                seed=item.seed,
                sampling_seed=derive_seed(self.settings.seed, "sampling", ordinal, member),
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
        waiting = WaitingEpisode(spec.episode_id, spec.order, self.limits.max_episode_tokens)
        try:
            async with (
                self.admission.place(waiting),
                self.hub.session(self.settings.env_id, **self.settings.env_kwargs) as env,
            ):
                return await run_episode(spec, env, self.engine, self.agent, self.limits, gate=self.gate)
        except InfrastructureError as error:
            failed = new_trajectory(spec)
            failed.end, failed.note = EndReason.INFRASTRUCTURE, str(error)
            return failed

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
