"""Random legal snapshots, and a small world that applies plans and lets time pass."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from tiderl.scheduling.decisions import Admit, Plan, Policy, Release, Resume
from tiderl.scheduling.views import KV, EngineView, Snapshot, State, Task
from tiderl.scheduling.waits import Waits

KINDS = ("web", "code")
EIGHTHS = st.integers(0, 800).map(lambda n: n / 8)
"""Times that floating point keeps exactly, so that shifting them loses nothing."""


@st.composite
def engines(draw: st.DrawFn, accepting: bool | None = None) -> dict[str, EngineView]:
    block = draw(st.sampled_from([1, 16, 32]))
    return {
        f"engine-{i}": EngineView(
            f"engine-{i}",
            capacity=block * draw(st.integers(1, 40)),
            slots=draw(st.integers(1, 6)),
            block=block,
            prefill_s=draw(st.sampled_from([0.0, 0.0005, 0.01])),
            turn_s=draw(st.sampled_from([0.0, 0.25])),
            lost=draw(st.integers(0, 500)),
            preemptions=draw(st.integers(0, 2)),
            accepting=draw(st.booleans()) if accepting is None else accepting,
        )
        for i in range(draw(st.integers(1, 3)))
    }


@st.composite
def snapshots(
    draw: st.DrawFn, states: tuple[State, ...] | None = None, accepting: bool | None = None
) -> Snapshot:
    """Any snapshot that a conductor could hand out."""
    views = draw(engines(accepting))
    now = 100 + draw(EIGHTHS)
    wanted = states or (State.QUEUED, State.ADMITTED, State.READY, State.RUNNING, State.PAUSED)
    orders = draw(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), unique=True, max_size=24))
    by: dict[State, list[Task]] = {state: [] for state in State}
    for order in sorted(orders):
        state = draw(st.sampled_from(wanted))
        since = now - draw(EIGHTHS)
        task = Task(
            key=f"{order[0]}.{order[1]}",
            order=order,
            kind=draw(st.sampled_from(KINDS)),
            state=state,
            new=draw(st.integers(1, 80)),
            growth=draw(st.integers(1, 40)),
            remaining=draw(st.sampled_from([0, 50, 400])),
            since=since,
            queued=since - draw(EIGHTHS),
        )
        if state is not State.QUEUED:
            view = views[draw(st.sampled_from(sorted(views)))]
            task = replace(task, engine=view.name)
            if state in (State.READY, State.RUNNING, State.PAUSED) and draw(st.booleans()):
                task = replace(task, context=draw(st.integers(1, 300)), turn=1, kv=KV.CACHED)
            if state is State.PAUSED:
                task = replace(
                    task, new=0, turn=1, wait="web/click", context=max(task.context, 1), kv=KV.CACHED
                )
            kv = draw(st.sampled_from([KV.HELD, KV.CACHED, KV.COLD])) if task.turn else KV.NONE
            if state is State.RUNNING:
                kv = KV.HELD
            tokens = view.blocks(task.peak if state is State.RUNNING else task.context)
            if kv is KV.HELD:
                if view.sessions < view.slots and view.promised + tokens <= view.capacity:
                    views[view.name] = replace(
                        view,
                        promised=view.promised + tokens,
                        sessions=view.sessions + 1,
                        running=view.running + (state is State.RUNNING),
                    )
                elif state is State.RUNNING:
                    continue
                else:
                    kv = KV.CACHED
            task = replace(task, kv=kv)
        by[state].append(task)
    waits = Waits()
    for seconds in draw(st.lists(st.sampled_from([0.05, 0.5, 3.0, 40.0]), max_size=6)):
        waits = waits.seen(seconds)
    flying = sum(len(by[s]) for s in (State.ADMITTED, State.READY, State.RUNNING, State.PAUSED))
    return Snapshot(
        now,
        tuple(views.values()),
        *(tuple(by[s]) for s in (State.QUEUED, State.ADMITTED, State.READY, State.RUNNING, State.PAUSED)),
        waits={"web/click": waits} if waits.count else {},
        allowed=draw(st.integers(1, 8)),
        barrier=draw(st.integers(1, 8)),
        concurrency=draw(st.sampled_from([1 << 62, flying + draw(st.integers(0, 8))])),
        target_mix=draw(st.sampled_from([{}, {"web": 0.7, "code": 0.3}, {"web": 1.0}])),
        shipped=draw(st.sampled_from([{}, {"web": 5}, {"web": 3, "code": 8}])),
    )


def shifted(snapshot: Snapshot, by: float) -> Snapshot:
    """Every time later by `by`."""

    def later(tasks: tuple[Task, ...]) -> tuple[Task, ...]:
        return tuple(replace(t, since=t.since + by, queued=t.queued + by) for t in tasks)

    return replace(
        snapshot,
        now=snapshot.now + by,
        queued=later(snapshot.queued),
        admitted=later(snapshot.admitted),
        ready=later(snapshot.ready),
        running=later(snapshot.running),
        paused=later(snapshot.paused),
    )


def tasks_of(snapshot: Snapshot) -> dict[str, Task]:
    groups = (snapshot.queued, snapshot.admitted, snapshot.ready, snapshot.running, snapshot.paused)
    return {task.key: task for tasks in groups for task in tasks}


def applied(plan: Plan, snapshot: Snapshot) -> dict[str, Task]:
    """The tasks after `plan`; asserts that each decision is legal in the state the ones before it leave."""
    tasks = tasks_of(snapshot)
    views = {view.name: view for view in snapshot.engines}
    promised = {view.name: view.promised for view in snapshot.engines}
    sessions = {view.name: view.sessions for view in snapshot.engines}
    flying = snapshot.in_flight
    for decision in plan.decisions:
        task = tasks[decision.key]
        if isinstance(decision, Release):
            assert task.kv is KV.HELD
            assert task.state in (State.PAUSED, State.READY)
            promised[task.engine] -= views[task.engine].blocks(task.context)
            sessions[task.engine] -= 1
            tasks[task.key] = replace(task, kv=KV.CACHED)
            continue
        view = views[decision.engine]
        assert view.accepting
        if isinstance(decision, Admit):
            assert task.state is State.QUEUED
            assert task.order[0] < snapshot.allowed
            flying += 1
            assert flying <= snapshot.concurrency
            assert view.blocks(task.peak) <= view.capacity, "admitted what can never run there"
            tasks[task.key] = replace(task, state=State.ADMITTED, engine=view.name, since=snapshot.now)
            continue
        assert isinstance(decision, Resume)
        assert task.state is State.READY
        assert task.kv is not KV.HELD or task.engine == view.name, "still holds KV elsewhere"
        if task.kv is KV.HELD:
            promised[view.name] -= view.blocks(task.context)
        else:
            sessions[view.name] += 1
        promised[view.name] += view.blocks(task.peak)
        assert promised[view.name] <= view.capacity
        assert sessions[view.name] <= view.slots
        tasks[task.key] = replace(task, state=State.RUNNING, kv=KV.HELD, engine=view.name, since=snapshot.now)
    return tasks


@dataclass
class World:
    """Engines and tasks of known lengths. `step` asks the policy, then lets one thing happen."""

    policy: Policy
    rng: random.Random
    groups: int = 4
    members: int = 3
    count: int = 2
    capacity: int = 640
    slots: int = 3
    concurrency: int = 1 << 62
    now: float = 0.0
    tasks: dict[str, Task] = field(default_factory=dict)
    turns: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    waits: Waits = field(default_factory=Waits)
    accepting: dict[str, bool] = field(default_factory=dict)
    memory: Any = None

    def __post_init__(self) -> None:
        self.memory = self.policy.start()
        for group in range(self.groups):
            for member in range(self.members):
                key = f"{group}.{member}"
                self.turns[key] = [
                    (self.rng.randint(5, 60), self.rng.randint(1, 40)) for _ in range(self.rng.randint(1, 6))
                ]
                self.tasks[key] = Task(
                    key, (group, member), KINDS[group % 2], State.QUEUED, new=40, growth=40, remaining=120
                )
        self.accepting = {f"engine-{i}": True for i in range(self.count)}

    def snapshot(self) -> Snapshot:
        views = []
        for name in self.accepting:
            view = EngineView(
                name, self.capacity, self.slots, block=16, prefill_s=0.001, turn_s=0.2,
                accepting=self.accepting[name],
            )  # fmt: skip
            mine = [t for t in self.tasks.values() if t.engine == name and t.kv is KV.HELD]
            runs = [t for t in mine if t.state is State.RUNNING]
            promised = sum(view.blocks(t.peak if t in runs else t.context) for t in mine)
            views.append(replace(view, promised=promised, sessions=len(mine), running=len(runs)))
        ordered = sorted(self.tasks.values(), key=lambda t: t.order)
        finished = Counter(self.tasks_kind(key) for key in self.done)
        whole = [
            g for g in range(self.groups) if sum(k.startswith(f"{g}.") for k in self.done) == self.members
        ]
        return Snapshot(
            self.now,
            tuple(views),
            *(
                tuple(t for t in ordered if t.state is s)
                for s in (State.QUEUED, State.ADMITTED, State.READY, State.RUNNING, State.PAUSED)
            ),
            waits={"web/step": self.waits},
            barrier=len(whole) + 1 if whole == list(range(len(whole))) else len(whole) + 2,
            concurrency=self.concurrency,
            shipped=dict(finished),
        )

    def tasks_kind(self, key: str) -> str:
        return KINDS[int(key.split(".")[0]) % 2]

    def step(self) -> Plan:
        """One decision and one event; asserts that something can still happen."""
        snapshot = self.snapshot()
        plan = self.policy.decide(snapshot, self.memory)
        self.memory = plan.memory
        self.tasks = applied(plan, snapshot)
        moving = (State.ADMITTED, State.RUNNING, State.PAUSED)
        events = sorted(key for key, task in self.tasks.items() if task.state in moving)
        self.now += self.rng.choice([0.0, 0.01, 0.25, 2.0])
        if not events:
            closed = [name for name, accepts in self.accepting.items() if not accepts]
            if closed and self.tasks:
                self.accepting[closed[0]] = True
                return plan
            assert not self.tasks or plan.wake is not None, f"stands still: {snapshot}"
            if plan.wake is not None:
                self.now = max(self.now, plan.wake)
            return plan
        if self.rng.random() < 0.05:
            name = self.rng.choice(sorted(self.accepting))
            self.accepting[name] = not self.accepting[name]
        self._happen(self.tasks[self.rng.choice(events)])
        return plan

    def _happen(self, task: Task) -> None:
        observation, reply = self.turns[task.key][min(task.turn, len(self.turns[task.key]) - 1)]
        if task.state is State.RUNNING:
            context = task.context + task.new + reply
            if task.turn + 1 == len(self.turns[task.key]):
                del self.tasks[task.key]
                self.done.append(task.key)
            else:
                self.tasks[task.key] = replace(
                    task, state=State.PAUSED, context=context, new=0, turn=task.turn + 1, since=self.now,
                    wait="web/step", remaining=max(task.remaining - 30, 0),
                )  # fmt: skip
            return
        if task.state is State.PAUSED:
            self.waits = self.waits.seen(self.now - task.since)
        self.tasks[task.key] = replace(task, state=State.READY, new=observation, since=self.now)
