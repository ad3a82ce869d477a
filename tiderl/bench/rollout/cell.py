"""One policy on one workload in one round: drive it, and read the counters at both ends of a window.

Invariants: every policy gets the same tasks and seeds in a round, engines whose KV of before cannot be read,
and a history that knows nothing; when a cell has ended, no episode is in flight.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tiderl.bench.rollout.figures import Count, Edge, figures
from tiderl.bench.rollout.sizes import ENVIRONMENT
from tiderl.bench.sides import cpu_seconds
from tiderl.errors import ConfigError, ResourceError

if TYPE_CHECKING:
    from tiderl.bench.rollout.setup import Bench
    from tiderl.bench.rollout.trace import Recorder
    from tiderl.rollout.conductor import Conductor
    from tiderl.rollout.driver import Rollout
    from tiderl.trajectory.group import Group
    from tiderl.trajectory.trajectory import Trajectory

COLOCATED = frozenset({"sync"})
"""Policies whose trainer has no hardware of its own: rollouts stand still while it works."""
_SETTLE_S = 60.0
_LOOK_S = 0.25

Tell = Callable[[float, str], None]
"""(seconds done of the cell's, what is going on)."""


class Cell:
    """Args:

    seed: of the tasks; the same for all policies of a round.
    recorder: writes finished episodes down; None: nobody does.
    """

    def __init__(
        self, bench: Bench, policy: str, *, seed: int, tell: Tell, recorder: Recorder | None = None
    ) -> None:
        self.bench, self.policy, self.seed, self.tell = bench, policy, seed, tell
        self.workload = bench.plan.workload
        self.recorder = recorder
        self.count = Count()
        self.colocated = policy in COLOCATED
        self._ended = 0
        self._base = 0
        self._began = self._since = time.monotonic()
        self._part = "waiting"
        self._updated = asyncio.Event()
        self._conductor: Conductor
        self._rollout: Rollout

    async def run(self) -> dict[str, Any]:
        """The figures of the window.

        Raises:
            ConfigError: the policy or one of its options is unknown.
            ResourceError: the window was not done within `measure.timeout_s`.
            EngineError, InfrastructureError: what ended the rollout.
        """
        from tiderl.rollout.conductor import Conductor
        from tiderl.rollout.driver import Rollout, RolloutSettings
        from tiderl.rollout.episode import EpisodeLimits
        from tiderl.rollout.pool import EnginePool
        from tiderl.rollout.tasks import TaskStream
        from tiderl.telemetry.rollout_meter import RolloutMeter

        load, plan = self.workload.load, self.bench.plan
        policy = policy_of(self.policy, self.workload.policies.get(self.policy, {}))
        load_before = list(os.getloadavg())
        await self.bench.refresh()
        self._base = self.bench.version
        pool = EnginePool()
        for number, engine in enumerate(self.bench.engines):
            await pool.add(f"engine-{number}", engine)
        self.meter = RolloutMeter()
        self._conductor = Conductor(
            policy,
            pool,
            concurrency=load.concurrency,
            meter=self.meter if self.recorder is None else self.recorder.over(self.meter),
        )
        self._rollout = Rollout(
            RolloutSettings(
                env_id=ENVIRONMENT,
                split="train",
                seed=self.seed,
                group_size=load.group_size,
                groups_per_update=load.groups_per_update,
                max_staleness=load.max_staleness,
                min_valid=1,
                env_kwargs=plan.arguments,
            ),
            conductor=self._conductor,
            hub=self.bench.hub,
            agent=plan.agent,
            tasks=TaskStream(plan.tasks, self.seed),
            limits=EpisodeLimits(
                max_turn_tokens=self.workload.episodes.reply_tokens[1],
                max_episode_tokens=plan.sizes.longest,
                ignore_eos=True,
            ),
            on_episode=self._finished,
        )
        try:
            first, last = await self._measured()
        finally:
            await self._rollout.close()
            await self._conductor.close()
            await self._settled()
        return figures(first, last, engines=len(self.bench.engines), colocated=self.colocated) | {
            "policy": self.policy,
            "seed": self.seed,
            "load_before": load_before,
            "drifts": self._conductor.watch.drifts,
        }

    async def _measured(self) -> tuple[Edge, Edge]:
        measure = self.workload.measure
        self._began = time.monotonic()
        self._rollout.advance(0)
        trainer = asyncio.create_task(self._train(), name="bench-trainer")
        trainer.add_done_callback(lambda _: self._updated.set())
        try:
            await self._until(self._began + measure.warmup_s, trainer, "warming up", least=1)
            first = self._edge()
            least = first.count.updates + measure.updates if self.colocated else 0
            await self._until(time.monotonic() + measure.seconds, trainer, "measuring", least=least)
            return first, self._edge()
        finally:
            trainer.cancel()
            await asyncio.wait([trainer], timeout=_SETTLE_S)

    async def _until(self, when: float, trainer: asyncio.Task[None], doing: str, least: int = 0) -> None:
        """Wait until `when`; where rollout and trainer take turns, until the next end of an update."""
        while True:
            now = time.monotonic()
            if now - self._began > self.workload.measure.timeout_s:
                raise ResourceError(
                    f"policy {self.policy} was still {doing} after {now - self._began:.0f} s, with "
                    f"{self.count.updates} updates done",
                    where=f"workload {self.workload.name}",
                    fix="raise measure.timeout_s, or make the workload smaller",
                )
            self.tell(
                now - self._began, f"{doing} · {self.count.groups} groups · {self.count.updates} updates"
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(min(_LOOK_S, max(0.001, when - now)) if now < when else _LOOK_S):
                    await self._updated.wait()
            ended = self._updated.is_set()
            self._updated.clear()
            if trainer.done():
                trainer.result()
            whole = ended or not self.colocated
            if time.monotonic() >= when and whole and self.count.updates >= least:
                return

    async def _train(self) -> None:
        """The simulated trainer: take, sleep, publish, let the rollout go on."""
        load, trainer, count = self.workload.load, self.workload.trainer, self.count
        published = -1e9
        while True:
            self._now("waiting")
            groups = await self._rollout.take(load.groups_per_update)
            self._note_trained(groups)
            self._now("training")
            await asyncio.sleep(trainer.update_s)
            self._now("publishing")
            if time.monotonic() - published >= trainer.publish_every_s:
                published = time.monotonic()
                version = self._base + count.updates + 1
                await self._conductor.publish(self.bench.weights(version), version)
                count.publishes += 1
            count.updates += 1
            self._rollout.advance(count.updates)
            self._updated.set()

    def _now(self, part: str) -> None:
        """The trainer goes over to `part`."""
        now = time.monotonic()
        spent = self.count.trainer_s
        spent[self._part] = spent.get(self._part, 0.0) + now - self._since
        self._part, self._since = part, now

    def _note_trained(self, groups: Sequence[Group]) -> None:
        """The groups of an update, at the version that the trainer has now."""
        count, now = self.count, self._base + self.count.updates
        for group in groups:
            for member in group.valid_members:
                age = member.staleness(now)
                count.staleness[age] = count.staleness.get(age, 0) + 1
                count.trained += member.loss_tokens
                count.trained_episodes += 1
                if age <= self.workload.load.max_staleness:
                    count.trained_fresh += member.loss_tokens

    def _finished(self, trajectory: Trajectory) -> None:
        """A member of a group that is whole."""
        count = self.count
        self._ended += 1
        count.groups = self._ended // self.workload.load.group_size
        if trajectory.valid:
            count.episodes += 1
            count.generated += trajectory.loss_tokens
            count.turns += trajectory.turns
        else:
            count.invalid += 1
        if self.recorder is not None:
            self.recorder.finished(trajectory)

    def _edge(self) -> Edge:
        self._now(self._part)
        self.meter.engines(
            [self._conductor.view(member) for member in self._conductor.pool],
            self._conductor.now(),
            allowed=self._conductor.allowed,
        )
        engines = self.bench.engines
        spent = [cpu_seconds(engine.pid) or 0.0 for engine in engines]
        cpu_s = {"engines": sum(spent), "driver": time.process_time()}
        stats = [engine.stats() for engine in engines]
        return Edge.of(time.monotonic(), self.count, self.meter.snapshot(), stats, cpu_s)

    async def _settled(self) -> None:
        """Wait until the engines hold nothing of this cell."""
        end = time.monotonic() + _SETTLE_S
        for engine in self.bench.engines:
            while (stats := engine.stats()).running or stats.held or stats.waiting:
                if time.monotonic() > end:
                    raise ResourceError(
                        f"an engine still holds {stats.held} sessions and runs {stats.running} after policy "
                        f"{self.policy} was stopped",
                        where=f"workload {self.workload.name}",
                    )
                await asyncio.sleep(0.02)


def policy_of(name: str, options: dict[str, Any]) -> Any:
    """The policy. Raises ConfigError for what `make_policy` does not know."""
    from tiderl.scheduling import make_policy

    try:
        return make_policy(name, **options)
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error), where=f"policy {name}", fix="see docs/scheduling.md") from error
