"""Continuous Task Batching: asks the policy, does what it says, and keeps the task table.

Invariants: only this file's code moves tasks in the table; a plan is applied whole before the next one is
asked for, except for tasks that ended meanwhile; an engine's promises never pass its capacity or its slots;
nothing waits for ever: a rollout in which nothing moves stops with its task table.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from tiderl.env.ends import EndReason
from tiderl.rollout.fleet import Fleet, Spawn
from tiderl.rollout.history import History
from tiderl.rollout.lockstep import resume_together
from tiderl.rollout.pool import EnginePool, Member
from tiderl.rollout.publishing import publish
from tiderl.rollout.table import TaskTable
from tiderl.rollout.telling import Teller
from tiderl.rollout.turns import TaskHandle, TaskTurns
from tiderl.rollout.watch import Watch
from tiderl.scheduling.decisions import Admit, Decision, Plan, Policy, Release, Resume
from tiderl.scheduling.views import KV, EngineView, Snapshot, State, Task

if TYPE_CHECKING:
    import torch

    from tiderl.engine.base import TurnOutput
    from tiderl.telemetry.decisions import DecisionLog
    from tiderl.telemetry.rollout_meter import RolloutMeter

log = logging.getLogger(__name__)

_POLL_S = 0.1


class Conductor:
    """Runs tasks on the engines of a pool as a policy decides.

    Args:
        concurrency: most tasks in flight.
        lockstep: decide only when every task in flight has a turn to send, and send them in one engine
            step; the same seed then gives the same batches, so the same bits.
        decisions, meter: where moves and decisions are told.
        spawn: starts a new engine in place of a dead one; None: what is left must do.
        strict: an accounting that differs from the engine's is an error, not a warning.
        stall_s: seconds without any move after which the rollout is given up.
    """

    def __init__(
        self,
        policy: Policy,
        pool: EnginePool,
        *,
        concurrency: int = 1 << 30,
        lockstep: bool = False,
        decisions: DecisionLog | None = None,
        meter: RolloutMeter | None = None,
        spawn: Spawn | None = None,
        strict: bool = False,
        stall_s: float = 900.0,
        prompt_guess: int = 256,
    ) -> None:
        self.policy, self.pool, self.concurrency, self.lockstep = policy, pool, concurrency, lockstep
        self.teller = Teller(decisions, meter)
        self.history = History()
        self.table = TaskTable(self._moved)
        self.watch = Watch(strict=strict, stall_s=stall_s)
        self.allowed = self.barrier = 1 << 62
        self.target_mix: dict[str, float] = {}
        self.fleet = Fleet(self, spawn)
        self._prompt_guess = prompt_guess
        self._memory = policy.start()
        self._began = time.monotonic()
        self._turns: dict[str, TaskTurns] = {}
        self._grants: dict[str, asyncio.Future[str]] = {}
        self._contexts: dict[str, list[int]] = {}
        self._causes: dict[str, str] = {}
        self._open: dict[str, tuple[int, float | None]] = {}
        self._shipped: Counter[str] = Counter()
        self._wanted = asyncio.Event()
        self._step = asyncio.Event()
        self._applying = asyncio.Lock()
        self._stopped = 0
        self._error: BaseException | None = None
        self._loop: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Conductor:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def stopped(self) -> bool:
        """No decision is made now (weights, an evaluation)."""
        return self._stopped > 0

    def now(self) -> float:
        """Seconds since the rollout began."""
        return time.monotonic() - self._began

    def start(self) -> None:
        """Begin to decide. Called by the first task, too."""
        if self._loop is None:
            self._loop = asyncio.create_task(self._run(), name="conductor")

    async def close(self) -> None:
        """Stop deciding. Tasks are ended by those who run them, engines closed by those who own them."""
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.wait([self._loop], timeout=30)
        self._loop = None
        await self.fleet.close()
        self.teller.close()

    # -- tasks

    @asynccontextmanager
    async def task(self, key: str, order: tuple[int, int], kind: str) -> AsyncIterator[TaskHandle]:
        """Queue a task, wait until it is admitted, and keep it in the table until it ends.

        Raises:
            EngineError: no engine is left.
        """
        self.start()
        self._raise()
        guess = self.history.prompt(kind, self._prompt_guess)
        now = self.now()
        self._contexts[key] = []
        task = Task(key, order, kind, State.QUEUED, new=guess, since=now, queued=now)
        self.table.add(replace(task, remaining=self.history.remaining(kind, 0)))
        try:
            await self.granted(key)
            yield TaskHandle(self, key)
        finally:
            if key in self.table:
                self.table.move(key, State.CANCELLED, self.now())
            stores: tuple[dict[str, Any], ...] = (
                self._grants,
                self._turns,
                self._contexts,
                self._causes,
                self._open,
            )
            for store in stores:
                store.pop(key, None)
            self._wanted.set()

    async def granted(self, key: str) -> str:
        """Wait for the policy: the engine on which the task was admitted or may run its turn."""
        self._raise()
        future = self._grants[key] = asyncio.get_running_loop().create_future()
        self._wanted.set()
        try:
            return await future
        finally:
            if self._grants.get(key) is future:
                del self._grants[key]

    def begin(self, key: str, turns: TaskTurns) -> None:
        """A record begins; a second one only after a fork, with nothing of the first one's KV."""
        self._turns[key] = turns

    def closed(self, key: str, turns: TaskTurns) -> None:
        """A record's session is closed: nothing is held for it any more."""
        if self._turns.get(key) is turns:
            del self._turns[key]
            task = self.table.get(key)
            if task is not None and task.state in (State.PAUSED, State.READY) and task.kv is KV.HELD:
                self.table.change(key, self.now(), kv=KV.CACHED)
            self._wanted.set()

    def ready(self, key: str, context: int, *, new: int, images: int, growth: int) -> None:
        """A turn waits to be sent."""
        task, now = self.table[key], self.now()
        new += images * self.history.image_tokens
        if task.state is State.ADMITTED:
            self.history.saw_prompt(task.kind, new)
        elif task.state is State.PAUSED:
            self.history.waited(task.wait, now - task.since)
            if (opened := self._open.pop(key, None)) is not None:  # was it right to let it go?
                number, back = opened
                self.teller.outcome(number, now, now - task.since)
                if back is not None and now < back and self._causes.get(key) == "evicted":
                    self._causes[key] = "mispredicted"
        changes: dict[str, Any] = {"new": new, "growth": growth, "wait": ""}
        if context == 0 and task.turn:  # after a fork
            changes |= {"kv": KV.NONE, "context": 0}
        self.table.move(key, State.READY, now, **changes)

    def paused(self, key: str, engine: str, context: int, out: TurnOutput) -> None:
        """A turn ended; the environment's turn begins."""
        task, now = self.table[key], self.now()
        member = self.pool.get(engine)
        cause = self._causes.pop(key, "evicted") if out.reprefilled else ""
        if member is not None:
            member.turn.add(now - task.since)
            if cause in ("evicted", "mispredicted"):
                member.lost += out.reprefilled
        self._causes.pop(key, None)
        self.teller.turn(task, out, cause, now)
        turn = task.turn + 1
        self._contexts[key].append(context)
        held = self._turns[key].engine == engine and getattr(self._turns[key]._session, "held", False)
        self.table.move(
            key,
            State.PAUSED,
            now,
            cause,
            kv=KV.HELD if held else KV.COLD,
            turn=turn,
            context=context,
            new=0,
            growth=0,
            wait=f"{task.kind}/",
            remaining=self.history.remaining(task.kind, turn),
            version=task.version if task.version >= 0 else out.versions[0],
        )
        self._wanted.set()

    def acting(self, key: str, tool: str) -> None:
        """What the environment was asked to do, once the reply was read."""
        task = self.table[key]
        self.table.change(key, self.now(), wait=f"{task.kind}/{tool}")

    def ended(self, key: str, end: EndReason, tokens: int) -> None:
        """An episode has ended by itself, by a limit or by a failure around it."""
        if key not in self.table:
            return
        task = self.table[key]
        self._shipped[task.kind] += end.valid
        if end.valid and len(self._contexts[key]) == task.turn:
            first = self._contexts[key][0] - tokens if self._contexts[key] else 0
            self.history.ended(task.kind, [max(0, first), *self._contexts[key]])
        self.table.move(key, State.DONE if end.valid else State.FAILED, self.now(), end.value)

    # -- turns that did not come to their end

    def refused(self, key: str, engine: str, why: str) -> None:
        """An engine had less room than the table says: ask again."""
        self.watch.drift(f"{engine} refused a turn of {key}: {why}")
        task = self.table[key]
        session = self._turns[key]._session
        kv = KV.NONE if not task.turn else KV.HELD if getattr(session, "held", False) else KV.CACHED
        self.table.move(key, State.READY, self.now(), "refused", kv=kv)

    def lost_turn(self, key: str, engine: str) -> None:
        """The engine died under a turn: it is sent again, from the replay payload."""
        task = self.table[key]
        self._causes[key] = "engine_died"
        self.table.move(
            key, State.READY, self.now(), "engine_died", kv=KV.COLD if task.turn else KV.NONE, engine=""
        )

    # -- engines

    def poke(self) -> None:
        """Something has changed: ask the policy again."""
        self._wanted.set()

    def lose_kv(self, task: Task, cause: str) -> None:
        """A task that is not running has no KV any more, anywhere."""
        self._causes[task.key] = cause
        self.table.change(task.key, self.now(), cause, kv=KV.COLD if task.turn else KV.NONE, engine="")

    async def drop_kv(self, key: str, cause: str) -> None:
        """A task's KV is given up for good; its next turn is computed from the replay payload."""
        if (turns := self._turns.get(key)) is not None:
            await turns.leave()
        task = self.table.get(key)
        if task is not None and task.state in (State.PAUSED, State.READY):
            self.lose_kv(task, cause)

    # -- standing still

    async def publish(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> float:
        """New weights for every engine; see `tiderl.rollout.publishing`. Returns the seconds it took."""
        return await publish(self, weights, version)

    def all_fresh(self) -> None:
        """No task's next request may read KV computed before now."""
        for turns in self._turns.values():
            turns.fresh_next = True

    async def release_all(self, *, fresh: bool = False) -> None:
        """Let go of all KV of tasks that are not running; `fresh`: it must not be read again either."""
        cause = "weights" if fresh else ""

        async def one(task: Task) -> None:
            if (turns := self._turns.get(task.key)) is not None and task.kv is KV.HELD:
                await turns.let_go(fresh=fresh)
            now = self.table.get(task.key)
            if now is not None and now.state in (State.PAUSED, State.READY):
                if fresh:
                    self._causes[task.key] = cause
                self.table.change(task.key, self.now(), cause, kv=KV.COLD if fresh else KV.CACHED)

        held = (KV.HELD, KV.CACHED) if fresh else (KV.HELD,)
        tasks = [t for t in self.table.within(State.PAUSED, State.READY) if t.kv in held]
        await asyncio.gather(*(one(task) for task in tasks))

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """Nothing runs and nothing is held inside, so that the engines serve somebody else."""
        async with self.still("evaluation"):
            await self.until_none_runs()
            await self.release_all()
            yield

    async def settled(self) -> None:
        """The plan that is being applied now, if any, is applied when this returns."""
        async with self._applying:
            pass

    @asynccontextmanager
    async def still(self, by: Literal["weights", "evaluation"]) -> AsyncIterator[None]:
        """No decision is made inside; turns that run go on."""
        self._stopped += 1
        try:
            await self.settled()
            self.teller.occupied(by, self.now())
            yield
        finally:
            self._stopped -= 1
            if not self._stopped:
                self.teller.occupied("", self.now())
            self._wanted.set()

    async def until_none_runs(self, engine: str | None = None) -> None:
        """Wait for the end of every turn that runs (on one engine). Raises TimeoutError."""
        timeout = max((m.engine.settings.turn_timeout for m in self.pool), default=60.0)
        async with asyncio.timeout(timeout + 5):
            while any(engine in (None, t.engine) for t in self.table.within(State.RUNNING)):
                self._step.clear()
                await self._step.wait()

    # -- deciding

    def snapshot(self) -> Snapshot:
        """What the policy sees now."""
        table = self.table
        return Snapshot(
            now=self.now(),
            engines=tuple(self.view(member) for member in self.pool),
            queued=table.within(State.QUEUED),
            admitted=table.within(State.ADMITTED),
            ready=table.within(State.READY),
            running=table.within(State.RUNNING),
            paused=table.within(State.PAUSED),
            waits=dict(self.history.waits),
            allowed=self.allowed,
            barrier=self.barrier,
            concurrency=self.concurrency,
            target_mix=self.target_mix,
            shipped=self._shipped,
        )

    def view(self, member: Member) -> EngineView:
        """One engine with what it has promised."""
        view = member.view()
        tokens, sessions, running = self.table.promised(view)
        return replace(view, promised=tokens, sessions=sessions, running=running)

    async def _run(self) -> None:
        wake: float | None = None
        while True:
            pause = _POLL_S if wake is None else min(_POLL_S, max(0.0, wake - self.now()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wanted.wait()
            self._wanted.clear()
            try:
                self.fleet.look()
                self.teller.engines([self.view(m) for m in self.pool], self.now(), self._limit())
                self.watch.look(self)
                if self._stopped or not self._may_decide():
                    continue
                async with self._applying:
                    plan = self.policy.decide(self.snapshot(), self._memory)
                    self._memory, wake = plan.memory, plan.wake
                    if plan.decisions:
                        await self._apply(plan)
            except Exception as error:  # told to everybody who waits
                log.debug("the conductor stops", exc_info=True)
                self.fail(error)
                return

    def _limit(self) -> int:
        return min(self.allowed, self.barrier) if self.policy.name == "sync" else self.allowed

    def _may_decide(self) -> bool:
        if not len(self.table):
            return False
        return not self.lockstep or not self.table.count(State.ADMITTED, State.RUNNING, State.PAUSED)

    async def _apply(self, plan: Plan) -> None:
        decisions = plan.decisions
        if self.lockstep and any(isinstance(d, Admit) for d in decisions):
            decisions = tuple(d for d in decisions if not isinstance(d, Resume))
        releases = [d for d in decisions if isinstance(d, Release)]
        moves = [d for d in decisions if isinstance(d, Resume) and self._elsewhere(d)]
        await asyncio.gather(
            *(self._release(d) for d in releases),
            *(self.drop_kv(d.key, "moved") for d in moves),
        )
        resumes: list[Resume] = []
        for decision in decisions:
            if isinstance(decision, Admit) and self._is(decision.key, State.QUEUED):
                self._log(decision)
                self.table.move(decision.key, State.ADMITTED, self.now(), engine=decision.engine)
                self._grant(decision.key, decision.engine)
            elif isinstance(decision, Resume):
                resumes.append(decision)
        if self.lockstep and resumes:
            await resume_together(self, resumes)
            return
        for decision in resumes:
            self.resume(decision)

    def _elsewhere(self, decision: Resume) -> bool:
        task = self.table.get(decision.key)
        return task is not None and bool(task.engine) and task.engine != decision.engine and task.turn > 0

    def resume(self, decision: Resume) -> None:
        """Send a turn, unless its task has ended or its engine has died since that was decided."""
        member = self.pool.get(decision.engine)
        if member is None or not self._is(decision.key, State.READY):
            return
        task, view = self.table[decision.key], self.view(member)
        held = task.kv is KV.HELD and task.engine == decision.engine
        need = view.blocks(task.peak) - (view.blocks(task.context) if held else 0)
        if view.promised + need > view.capacity or view.sessions + (not held) > view.slots:
            self.watch.drift(f"policy {self.policy.name} overbooked {decision.engine} with {task.key}")
            return
        self._log(decision)
        self.table.move(decision.key, State.RUNNING, self.now(), kv=KV.HELD, engine=decision.engine)
        self._grant(decision.key, decision.engine)

    async def _release(self, decision: Release) -> None:
        key = decision.key
        turns = self._turns.get(key)
        if turns is None or key not in self.table or self.table[key].kv is not KV.HELD:
            return
        back = None if decision.predicted is None else self.now() + decision.predicted
        self._open[key] = (self._log(decision), back)
        self._causes[key] = "evicted"
        await turns.let_go()
        if key in self.table and self.table[key].kv is KV.HELD:
            self.table.change(key, self.now(), "released", kv=KV.CACHED)

    def _is(self, key: str, state: State) -> bool:
        return key in self.table and self.table[key].state is state and key in self._grants

    def _grant(self, key: str, engine: str) -> None:
        future = self._grants.pop(key, None)
        if future is not None and not future.done():
            future.set_result(engine)

    def _moved(self, before: Task | None, after: Task, at: float, cause: str) -> None:
        self.watch.moved(at)
        self._step.set()
        self.teller.moved(before, after, at, cause)

    def _log(self, decision: Decision) -> int:
        member = self.pool.get(getattr(decision, "engine", ""))
        view = self.view(member) if member is not None else None
        return self.teller.decided(decision, self.table.get(decision.key), view, self.table, self.now())

    # -- failure

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def fail(self, error: BaseException) -> None:
        """The rollout cannot go on: everybody who waits, now or later, gets `error`."""
        self._error = self._error or error
        for future in self._grants.values():
            if not future.done():
                future.set_exception(error)
