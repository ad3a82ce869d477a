"""A training run from its first evaluation to its summary.

Invariants: an update is rollout, optimizer step, publish, log, in this order; what stands in a checkpoint
is whole (weights, optimizer, task cursor, counters) and belongs to one update; an interrupt between two
updates loses none, and within one loses only that one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from tiderl.config import RunConfig
from tiderl.errors import TideError
from tiderl.telemetry.curve import draw_curves
from tiderl.telemetry.memory import MemoryWatch, give_back, memory_mb
from tiderl.telemetry.metrics import MetricsLog, write_json
from tiderl.telemetry.progress import RunProgress
from tiderl.training.clock import ShareClock
from tiderl.training.folder import RunFolder
from tiderl.training.intake import Intake
from tiderl.training.metrics import LengthBias, rollout_metrics
from tiderl.training.parts import Parts, open_parts
from tiderl.training.totals import EngineCounters, Totals

if TYPE_CHECKING:
    from tiderl.evaluation.result import EvaluationResult
    from tiderl.trajectory.store import EpisodeStore
    from tiderl.trajectory.trajectory import Trajectory

T = TypeVar("T")

MAX_EMPTY_UPDATES = 20
"""Updates in a row without any learning signal after which a run gives up (C-79)."""

GIVE_BACK_EVERY = 10
"""Updates between two returns of freed memory to the system, whose next touch costs an update 2 s."""


class Interrupted(Exception):
    """The user asked the run to stop; what was done is saved."""

    def __init__(self, folder: RunFolder, update: int, saved: bool) -> None:
        self.folder, self.update, self.saved = folder, update, saved
        super().__init__(f"stopped after update {update}")


class TrainingRun:
    """Runs one configuration. `stop` may be set at any time, from the same event loop."""

    def __init__(self, config: RunConfig, progress: RunProgress, *, fresh: bool = False) -> None:
        self.config, self.progress, self.fresh = config, progress, fresh
        self.folder = RunFolder(config)
        self.stop = asyncio.Event()
        self.totals = Totals()
        self.clock = ShareClock()
        self.memory = MemoryWatch()
        self.saved_at: int | None = None
        self._began = time.monotonic()
        self._wall_before = 0.0
        self._counters = EngineCounters()
        self._metered: dict[str, Any] = {}
        self.bias = LengthBias()
        self._lengths: list[int] = []
        self._torch = ThreadPoolExecutor(1, thread_name_prefix="trainer")

    async def execute(self) -> dict[str, Any]:
        """The whole run; returns the content of `summary.json`.

        Raises:
            TideError: something the user can mend; nothing half-written stays behind.
            Interrupted: `stop` was set.
        """
        resume = self.folder.inspect(fresh=self.fresh)
        config = self.config
        self.progress.say(
            f"training {config.model.path} on {config.environment.id} in {self.folder.path}: at most "
            f"{config.training.updates} updates; the engine takes some seconds to start"
        )
        try:
            with self.memory:
                async with open_parts(self, resume) as parts:
                    return await self._with(parts, resume)
        except BaseException:
            self.folder.discard_if_empty()
            raise
        finally:
            self.folder.close()
            self._torch.shutdown(wait=True)

    def note_episode(self, store: EpisodeStore) -> Callable[[Trajectory], None]:
        """What to do with each episode of a group that is complete."""

        def note(trajectory: Trajectory) -> None:
            store.append(trajectory)
            if trajectory.valid:
                self._lengths.append(trajectory.sampled_tokens)

        return note

    def _take_lengths(self) -> list[int]:
        lengths, self._lengths = self._lengths, []
        return lengths

    async def in_trainer(self, call: Callable[..., T], *args: Any) -> T:
        """Run `call` in the one thread that owns the trainer's tensors."""
        return await asyncio.get_running_loop().run_in_executor(self._torch, lambda: call(*args))

    async def _with(self, parts: Parts, resume: int | None) -> dict[str, Any]:
        if resume is not None:
            state = self.folder.read_state(resume)
            self.totals = Totals.from_json(state["totals"])
            if "length_bias" in state:
                self.bias.restore(state["length_bias"])
            self.clock.seconds.update(self.totals.shares_s)
            self._wall_before, self.saved_at = self.totals.wall_s, resume
            parts.rollout.restore(state["tasks"])
            await self.in_trainer(parts.replica.load_state, self.folder.step_path(resume) / "state")
            await self._publish(parts)
            self.progress.say(f"resuming '{self.config.name}' after update {resume}")
        parts.engines.newest = lambda: self._newest(parts)
        metrics = MetricsLog(self.folder.path, keep=resume)
        try:
            if self.totals.evaluation_before is None and self.config.evaluation.episodes:
                before = await self._evaluate(parts)
                self.totals.evaluation_before = before.to_json()
                self.progress.say(f"before training: {before.line()}")
            await self._updates(parts, metrics)
            return await self._finish(parts)
        except Interrupted as stop:
            if self.totals.updates and self.saved_at != self.totals.updates:
                await self._save_step(parts)
                stop.saved = True
            raise
        finally:
            metrics.close()

    async def _updates(self, parts: Parts, metrics: MetricsLog) -> None:
        training = self.config.training
        self.progress.start_at(self.totals.updates)
        began, before = time.monotonic(), self.totals.training_s
        evaluated = 0.0
        while self.totals.updates < training.updates:
            started = time.monotonic()
            parts.rollout.advance(self.totals.updates)
            values = await self._one_update(parts)
            self.totals.training_s = before + time.monotonic() - began - evaluated
            values |= self._run_values(parts, time.monotonic() - started)
            metrics.write(self.totals.updates, values)
            self.progress.update(self.totals.updates, values)
            if (why := self._good_enough()) is not None:
                self.progress.say(why)
                break
            every = self.config.checkpoint.every
            if every and self.totals.updates % every == 0:
                await self._save_step(parts)
            every = self.config.evaluation.every
            if every and self.totals.updates % every == 0 and self.totals.updates < training.updates:
                clock = time.monotonic()
                result = await self._evaluate(parts)
                evaluated += time.monotonic() - clock
                metrics.write(self.totals.updates, {"evaluation_success": result.success})
                self.progress.say(f"after update {self.totals.updates}: {result.line()}")

    async def _one_update(self, parts: Parts) -> dict[str, Any]:
        intake = Intake(parts.rollout, parts.replica, self.config, self.totals.version)
        try:
            await self._gather(parts, intake)
            values = rollout_metrics(
                intake.taken,
                self.totals.version,
                shipments=intake.shipments,
                bias=self.bias,
                generated=self._take_lengths(),
            )
            values |= intake.metrics()
            self.progress.status(f"update {self.totals.updates + 1}: step · success {values['success']}")
            with self.clock.within("training"):
                stats = await self.in_trainer(parts.replica.step)
                if (self.totals.updates + 1) % GIVE_BACK_EVERY == 0:
                    await self.in_trainer(give_back)
        except BaseException:
            intake.give_back()
            raise
        totals = self.totals
        totals.updates += 1
        totals.episodes += values["episodes"]
        totals.episodes_masked += values["episodes_masked"]
        totals.goodput_tokens += stats.tokens
        totals.max_logprob_gap = max(totals.max_logprob_gap, stats.max_logprob_gap)
        if values["success"] is not None:
            totals.recent_success.append(values["success"])
        if stats.skipped:
            totals.empty_updates += 1
            totals.empty_in_a_row += 1
            self._give_up_without_signal()
        else:
            totals.empty_in_a_row = 0
            if totals.first_update_loss is None:
                totals.first_update_loss = stats.loss
            totals.version += 1
            with self.clock.within("publishing"):
                await self._publish(parts)
            totals.versions_published += 1
        told = stats.to_json()
        told["optimizer_steps"] = told.pop("update")
        return values | told

    async def _showing(self, parts: Parts, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work`, and show what the rollouts do meanwhile."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=1.0)
                self.progress.rollout(parts.meter.snapshot())
            return task.result()
        finally:
            task.cancel()

    async def _gather(self, parts: Parts, intake: Intake) -> None:
        """Take groups as they become ready, and accumulate each at once unless all come together."""
        await self.in_trainer(intake.replica.discard)
        while not intake.complete:
            count = len(intake.groups)
            self.progress.status(f"update {self.totals.updates + 1}: {count} of {intake.wanted} groups")
            with self.clock.within("rollout"):
                groups = await self._unless_stopped(self._showing(parts, intake.take()))
            if groups:
                with self.clock.within("training"):
                    await self.in_trainer(intake.replica.accumulate, groups, intake.version)

    def _run_values(self, parts: Parts, update_s: float) -> dict[str, Any]:
        self._count(parts)
        memory = memory_mb()
        self.totals.peak_memory_mb = max(self.totals.peak_memory_mb, memory, self.memory.peak_mb)
        self.totals.wall_s = self._wall()
        self.totals.shares_s = self.clock.snapshot()
        return {
            "version": self.totals.version,
            "goodput_tokens_per_s": self.totals.goodput,
            "kv_hit_rate": self.totals.kv_hit_rate,
            "reprefilled_tokens": self.totals.reprefilled_tokens,
            "rollouts": self._meter_values(parts),
            "memory_mb": memory,
            "peak_memory_mb": self.totals.peak_memory_mb,
            "update_s": update_s,
            "wall_s": self.totals.wall_s,
            "shares_s": self.totals.shares_s,
        }

    def _meter_values(self, parts: Parts) -> dict[str, Any]:
        """What the rollouts did since the last update."""
        now = parts.meter.snapshot()
        values, self._metered = parts.meter.since(self._metered), now
        return values

    def _count(self, parts: Parts) -> None:
        for member in parts.engines.pool:
            self._counters.add_to(self.totals, member.name, member.engine.stats())

    async def _publish(self, parts: Parts) -> None:
        weights = await self.in_trainer(lambda: list(parts.replica.weights()))
        await parts.conductor.publish(weights, self.totals.version)

    async def _newest(self, parts: Parts) -> tuple[list[Any], int]:
        """For an engine that takes a dead one's place."""
        version = self.totals.version
        return await self.in_trainer(lambda: list(parts.replica.weights())), version

    async def _evaluate(self, parts: Parts) -> EvaluationResult:
        self.progress.status("evaluating")
        with self.clock.within("evaluation"):
            return await self._unless_stopped(parts.evaluate())

    async def _save_step(self, parts: Parts) -> None:
        totals = self.totals
        totals.wall_s, totals.shares_s = self._wall(), self.clock.snapshot()
        self._count(parts)
        path = self.folder.step_path(totals.updates)
        state = {
            "totals": totals.to_json(),
            "tasks": parts.rollout.state(),
            "length_bias": self.bias.to_json(),
        }
        with self.clock.within("checkpoint"):
            await self.in_trainer(parts.replica.save, path)
            write_json(path / "run.json", state)  # last: a folder without it is not a checkpoint
        self.saved_at = totals.updates
        self.folder.prune(self.config.checkpoint.keep)

    async def _finish(self, parts: Parts) -> dict[str, Any]:
        await parts.rollout.close()
        with self.clock.within("checkpoint"):
            await self.in_trainer(parts.replica.save, self.folder.checkpoints / "final")
        after = await self._evaluate(parts) if self.config.evaluation.episodes else None
        self._count(parts)
        self.totals.peak_memory_mb = max(self.totals.peak_memory_mb, self.memory.peak_mb)
        summary = self._summary(after)
        write_json(self.folder.path / "summary.json", summary)
        if self.totals.updates:
            draw_curves([self.folder.path], self.folder.path / "curve.png")
        if after is not None:
            self.progress.say(f"after training:  {after.line()}")
        return summary

    def _summary(self, after: EvaluationResult | None) -> dict[str, Any]:
        totals, shares = self.totals, self.clock.snapshot()
        before = totals.evaluation_before or {}
        spent = sum(shares.values()) or 1.0
        return {
            "name": self.config.name,
            "seed": self.config.seed,
            "environment": self.config.environment.id,
            "model": self.config.model.path,
            "success_before": before.get("success"),
            "success_before_ci95": before.get("ci95"),
            "success_after": after.success if after else None,
            "success_ci95": list(after.ci95) if after else None,
            "evaluation_episodes": after.valid if after else 0,
            "updates": totals.updates,
            "empty_updates": totals.empty_updates,
            "episodes": totals.episodes,
            "episodes_masked": totals.episodes_masked,
            "versions_published": totals.versions_published,
            "wall_s": self._wall(),
            "training_s": totals.training_s,
            "goodput_tokens_per_s": totals.goodput,
            "goodput_is": "loss-carrying tokens trained on within the staleness bound / second of wall clock",
            "kv_hit_rate": totals.kv_hit_rate,
            "reprefilled_tokens": totals.reprefilled_tokens,
            "max_logprob_gap": totals.max_logprob_gap,
            "first_update_loss": totals.first_update_loss,
            "peak_memory_mb": totals.peak_memory_mb,
            "share_of_time": {k: round(v / spent, 4) for k, v in shares.items()},
        }

    def _wall(self) -> float:
        return self._wall_before + time.monotonic() - self._began

    def _good_enough(self) -> str | None:
        rule, totals = self.config.training.stop, self.totals
        limit = self.config.training.max_wall_s
        if limit is not None and self._wall() > limit:
            return f"stopping after update {totals.updates}: training.max_wall_s of {limit:.0f} s has passed"
        if rule is None or totals.updates < max(rule.window, rule.min_updates):
            return None
        recent = totals.recent_success[-rule.window :]
        if len(recent) == rule.window and sum(recent) / rule.window >= rule.success:
            return (
                f"stopping after update {totals.updates}: mean success of the last {rule.window} updates is "
                f"{sum(recent) / rule.window:.3f}"
            )
        return None

    def _give_up_without_signal(self) -> None:
        if self.totals.empty_in_a_row < MAX_EMPTY_UPDATES:
            self.progress.say(
                f"update {self.totals.updates}: every group has equal rewards, nothing to learn from"
            )
            return
        raise TideError(
            f"{MAX_EMPTY_UPDATES} updates in a row had no group with unequal rewards",
            where=self.config.environment.id,
            fix="choose easier tasks, demonstrations, a higher temperature or larger groups",
        )

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work`, or raise `Interrupted` as soon as the user asks to stop."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise Interrupted(self.folder, self.totals.updates, self.saved_at == self.totals.updates)
        finally:
            stop.cancel()
            task.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)
