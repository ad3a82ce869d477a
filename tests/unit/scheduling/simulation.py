"""A small discrete-event rollout: engines, environments and a conductor, to compare policies on one workload.

Invariant: the same workload and seed give every policy the same tasks, prompts, replies and waits; every
plan is checked before it is applied, so that no simulated policy gets more KV or slots than there are.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

from tiderl.scheduling.decisions import Admit, Policy, Release, Resume
from tiderl.scheduling.views import KV, EngineView, Snapshot, State, Task
from tiderl.scheduling.waits import Waits


@dataclass(frozen=True)
class Workload:
    """What tasks are like, and what serves them."""

    prompt: int = 150
    observation: int = 60
    reply: tuple[int, int] = (8, 32)
    turns: tuple[int, int] = (3, 9)
    wait: tuple[str, float, float] = ("lognormal", 0.2, 1.0)
    """(kind, median or scale, sigma or shape)."""
    reset: float = 0.1
    group: int = 4
    capacity: int = 8192
    slots: int = 32
    engines: int = 1
    block: int = 32
    over: float = 1.0
    """Tasks in flight that the run allows, as a multiple of what the KV holds at their full lengths."""
    prefill: float = 2500.0
    """Tokens a second."""
    step: float = 0.008
    step_turn: float = 0.0005
    chunk: int = 512
    """Most prompt tokens of a step."""
    per_update: int = 4
    """Groups an update takes."""
    train: float = 1.0
    """Seconds of an update."""
    kinds: tuple[str, ...] = ("env",)
    ahead: int = 16
    """Tasks that are always queued."""
    seconds: float = 90.0
    warm: float = 20.0
    seed: int = 0

    @property
    def longest(self) -> int:
        """Expected tokens of a task at its end."""
        turns = sum(self.turns) / 2
        return int(self.prompt + turns * sum(self.reply) / 2 + (turns - 1) * self.observation)

    @property
    def concurrency(self) -> int:
        return max(self.group, round(self.over * self.capacity * self.engines / self.longest))


@dataclass
class Script:
    """How one task will go."""

    prompt: int
    replies: list[int]
    observations: list[int]
    waits: list[float]


@cache
def script(workload: Workload, group: int, member: int) -> Script:
    shared = random.Random(f"{workload.seed}/{group}")
    prompt = max(16, int(workload.prompt * shared.uniform(0.7, 1.3)))
    rng = random.Random(f"{workload.seed}/{group}/{member}")
    turns = rng.randint(*workload.turns)
    kind, a, b = workload.wait
    if kind == "lognormal":
        waits = [a * math.exp(b * rng.gauss(0, 1)) for _ in range(turns)]
    else:
        waits = [min(a * rng.paretovariate(b), 60.0) for _ in range(turns)]
    return Script(
        prompt,
        [rng.randint(*workload.reply) for _ in range(turns)],
        [max(4, int(workload.observation * rng.uniform(0.5, 1.5))) for _ in range(turns)],
        waits,
    )


class Engine:
    """Continuous batching with chunked prefill, blocks and an LRU prefix cache."""

    def __init__(self, name: str, load: Workload) -> None:
        self.name, self.load = name, load
        self.unused = load.capacity // load.block
        self.refs: dict[tuple, int] = {}
        self.cached: OrderedDict[tuple, None] = OrderedDict()
        self.tables: dict[str, list[tuple]] = {}
        self.turns: dict[str, list] = {}  # key -> [prefill left, decode left]
        self.stepping = False
        self.lost = self.turn_s = 0.0
        self.busy = 0.0

    def _take(self) -> None:
        if self.unused:
            self.unused -= 1
        else:
            self.cached.popitem(last=False)

    def _names(self, task: Task, tokens: int, prompt: int) -> list[tuple]:
        block = self.load.block
        return [
            ("g", task.order[0], i) if (i + 1) * block <= prompt else (task.key, i)
            for i in range(-(-tokens // block))
        ]

    def start(self, task: Task, prompt: int, reply: int) -> tuple[int, int]:
        """(prompt tokens computed again, new ones from a sibling); takes blocks for the whole turn."""
        tokens = task.context + task.new
        names = self._names(task, tokens + reply, prompt)
        table = self.tables.get(task.key)
        hit = task.context
        if table is None:
            table = self.tables[task.key] = []
            found = 0
            for name in names[: (tokens - 1) // self.load.block]:
                if name not in self.refs and name not in self.cached:
                    break
                found += 1
            hit = found * self.load.block
        for name in names[len(table) :]:
            if name in self.refs:
                self.refs[name] += 1
            else:
                if name in self.cached:
                    del self.cached[name]
                else:
                    self._take()
                self.refs[name] = 1
            table.append(name)
        again = max(task.context - hit, 0)
        self.lost += again
        self.turns[task.key] = [tokens - hit, reply]
        return again, hit

    def free(self, key: str, context: int) -> None:
        """Blocks go to the prefix cache, tails first; only full ones can be found again."""
        for i, name in reversed(list(enumerate(self.tables.pop(key)))):
            self.refs[name] -= 1
            if not self.refs[name]:
                del self.refs[name]
                if (i + 1) * self.load.block <= context:
                    self.cached[name] = None
                else:
                    self.unused += 1

    def step(self) -> tuple[float, list[str]]:
        """(seconds, turns that are over) of one step."""
        left, decoding, prefilled, over = self.load.chunk, 0, 0, []
        for key, turn in self.turns.items():
            if turn[0] > 0:
                part = min(turn[0], left)
                turn[0] -= part
                left -= part
                prefilled += part
                if turn[0] > 0:
                    continue
            decoding += 1
            turn[1] -= 1
            if turn[1] <= 0:
                over.append(key)
        for key in over:
            del self.turns[key]
        seconds = self.load.step + self.load.step_turn * decoding + prefilled / self.load.prefill
        self.busy += seconds
        return seconds, over


@dataclass
class Result:
    """What came out."""

    tokens: float = 0.0
    """Sampled tokens of finished tasks, a second."""
    hit_rate: float = 1.0
    """Prompt tokens of turns >= 2 that were not computed, over all of them."""
    busy: float = 0.0
    finished: int = 0
    lengths: float = 0.0
    flying: float = 0.0
    decisions: int = 0
    shipped: dict[str, int] = field(default_factory=dict)


class Simulation:
    """One policy on one workload."""

    def __init__(self, policy: Policy, load: Workload) -> None:
        self.policy, self.load = policy, load
        self.memory = policy.start()
        self.now = 0.0
        self.engines = {f"engine-{i}": Engine(f"engine-{i}", load) for i in range(load.engines)}
        self.tasks: dict[str, Task] = {}
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = self.next_group = self.updates = self.ready_groups = 0
        self.training = False
        self.waits: dict[str, Waits] = {}
        self.after: dict[str, list[list[float]]] = {}
        self.lengths: dict[str, list[int]] = {}
        self.members: dict[int, int] = {}
        self.shipped: dict[str, int] = {}
        self.result = Result()
        self.cached = self.asked = 0.0
        self.sampled = 0.0
        self.area = 0.0
        self.wake = math.inf

    def at(self, when: float, what: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (when, self.count, what))

    def put(self, task: Task, **changes: object) -> Task:
        if "state" in changes:
            changes["since"] = self.now
        task = replace(task, **changes)  # type: ignore[arg-type]
        self.tasks[task.key] = task
        return task

    def script(self, task: Task) -> Script:
        return script(self.load, *task.order)

    def remaining(self, kind: str, turn: int) -> int:
        after = self.after.get(kind)
        if not after:
            return 0
        total, number = after[min(turn, len(after) - 1)]
        return round(total / number)

    def queue(self) -> None:
        """Keep the stream ahead of what can start."""
        queued = sum(t.state is State.QUEUED for t in self.tasks.values())
        while queued < self.load.ahead or self.next_group < self.barrier:
            group, kind = self.next_group, self.load.kinds[self.next_group % len(self.load.kinds)]
            self.next_group += 1
            for member in range(self.load.group):
                key = f"{group}.{member}"
                self.tasks[key] = Task(
                    key, (group, member), kind, State.QUEUED, since=self.now, queued=self.now,
                    new=self.load.prompt, growth=self.load.reply[1], remaining=self.remaining(kind, 1),
                )  # fmt: skip
                queued += 1

    @property
    def barrier(self) -> int:
        return (self.updates + 1) * self.load.per_update

    def views(self) -> tuple[EngineView, ...]:
        out = []
        for engine in self.engines.values():
            promised = sessions = running = 0
            view = EngineView(engine.name, self.load.capacity, self.load.slots, block=self.load.block)
            for task in self.tasks.values():
                if task.engine != engine.name:
                    continue
                if task.state is State.RUNNING:
                    promised += view.blocks(task.peak)
                    sessions, running = sessions + 1, running + 1
                elif task.kv is KV.HELD:
                    promised += view.blocks(task.context)
                    sessions += 1
            assert promised <= view.capacity
            assert sessions <= view.slots
            out.append(
                replace(
                    view, promised=promised, sessions=sessions, running=running,
                    prefill_s=1 / self.load.prefill, turn_s=engine.turn_s, lost=int(engine.lost),
                )
            )  # fmt: skip
        return tuple(out)

    def snapshot(self) -> Snapshot:
        by: dict[State, list[Task]] = {state: [] for state in State}
        for task in sorted(self.tasks.values(), key=lambda t: t.order):
            by[task.state].append(task)
        return Snapshot(
            self.now,
            self.views(),
            *(tuple(by[s]) for s in (State.QUEUED, State.ADMITTED, State.READY, State.RUNNING, State.PAUSED)),
            waits=dict(self.waits),
            barrier=self.barrier,
            concurrency=self.load.concurrency,
            shipped=dict(self.shipped),
        )

    def decide(self) -> None:
        self.queue()
        plan = self.policy.decide(self.snapshot(), self.memory)
        self.result.decisions += 1
        self.memory = plan.memory
        for decision in plan.decisions:
            task = self.tasks[decision.key]
            if isinstance(decision, Admit):
                assert task.state is State.QUEUED
                self.put(task, state=State.ADMITTED, engine=decision.engine)
                self.at(self.now + self.load.reset, lambda key=task.key: self.opened(key))
            elif isinstance(decision, Release):
                assert task.kv is KV.HELD
                assert task.state in (State.PAUSED, State.READY)
                self.engines[task.engine].free(task.key, task.context)
                self.put(task, kv=KV.CACHED)
            else:
                assert isinstance(decision, Resume)
                self.send(task, decision.engine)
        if plan.wake is not None and self.now < plan.wake < self.wake:
            self.wake = plan.wake
            self.at(plan.wake, self.woken)

    def woken(self) -> None:
        self.wake = math.inf

    def opened(self, key: str) -> None:
        task = self.tasks[key]
        prompt = self.script(task).prompt
        self.put(task, state=State.READY, new=prompt, remaining=self.remaining(task.kind, 1))

    def send(self, task: Task, name: str) -> None:
        assert task.state is State.READY
        assert task.kv is not KV.HELD or task.engine == name
        engine, plot = self.engines[name], self.script(task)
        kv = task.kv
        task = self.put(task, state=State.RUNNING, kv=KV.HELD, engine=name)
        again, _ = engine.start(task, plot.prompt, plot.replies[task.turn])
        assert kv is not KV.HELD or again == 0
        if task.turn and self.now > self.load.warm:
            self.asked += task.context
            self.cached += task.context - again
        if not engine.stepping:
            engine.stepping = True
            self.at(self.now, lambda: self.step(engine))

    def step(self, engine: Engine) -> None:
        if not engine.turns:
            engine.stepping = False
            return
        seconds, over = engine.step()

        def end() -> None:
            for key in over:
                self.turned(key)
            self.step(engine)

        self.at(self.now + seconds, end)

    def turned(self, key: str) -> None:
        task, plot = self.tasks[key], self.script(self.tasks[key])
        engine = self.engines[task.engine]
        engine.turn_s += (self.now - task.since - engine.turn_s) * 0.1
        reply = plot.replies[task.turn]
        context, turn = task.context + task.new + reply, task.turn + 1
        self.lengths.setdefault(key, []).append(context)
        if turn == len(plot.replies):
            self.finished(task, context)
            return
        wait = f"{task.kind}/step"
        task = self.put(
            task, state=State.PAUSED, context=context, new=0, turn=turn, wait=wait,
            remaining=self.remaining(task.kind, turn),
        )  # fmt: skip
        seconds = plot.waits[turn]
        self.at(self.now + seconds, lambda: self.back(key, seconds))

    def back(self, key: str, seconds: float) -> None:
        task = self.tasks[key]
        self.waits[task.wait] = self.waits.get(task.wait, Waits()).seen(seconds)
        new = self.script(task).observations[task.turn]
        self.put(task, state=State.READY, new=new, remaining=self.remaining(task.kind, task.turn + 1))

    def finished(self, task: Task, context: int) -> None:
        self.engines[task.engine].free(task.key, context)
        del self.tasks[task.key]
        lengths = [0, *self.lengths.pop(task.key)]
        after = self.after.setdefault(task.kind, [])
        for turn, length in enumerate(lengths):
            if turn == len(after):
                after.append([0.0, 0.0])
            after[turn][0] += context - length
            after[turn][1] += 1
        self.shipped[task.kind] = self.shipped.get(task.kind, 0) + 1
        if self.now > self.load.warm:
            self.sampled += sum(self.script(task).replies)
            self.result.finished += 1
            self.result.lengths += context
        group = task.order[0]
        self.members[group] = self.members.get(group, 0) + 1
        if self.members[group] == self.load.group:
            self.ready_groups += 1
            self.train()

    def train(self) -> None:
        if self.training or self.ready_groups < self.load.per_update:
            return
        self.training = True
        self.ready_groups -= self.load.per_update

        def done() -> None:
            self.training = False
            self.updates += 1
            self.train()

        self.at(self.now + self.load.train, done)

    def run(self) -> Result:
        self.decide()
        end = self.load.warm + self.load.seconds
        busy = 0.0
        last = 0.0
        while self.events and self.events[0][0] <= end:
            when = self.events[0][0]
            flying = sum(t.state is not State.QUEUED for t in self.tasks.values())
            if last <= self.load.warm < when:
                busy = sum(e.busy for e in self.engines.values())
            if when > self.load.warm:
                self.area += flying * (when - max(last, self.load.warm))
            last = self.now = when
            while self.events and self.events[0][0] <= when:
                heapq.heappop(self.events)[2]()
            self.decide()
        assert self.events, f"nothing will ever happen again at {self.now}"
        self.result.tokens = self.sampled / self.load.seconds
        self.result.hit_rate = self.cached / self.asked if self.asked else 1.0
        self.result.busy = (
            (sum(e.busy for e in self.engines.values()) - busy) / self.load.seconds / len(self.engines)
        )
        self.result.flying = self.area / self.load.seconds
        self.result.shipped = self.shipped
        if self.result.finished:
            self.result.lengths /= self.result.finished
        return self.result


def simulate(policy: Policy, load: Workload) -> Result:
    """Run `policy` on `load`."""
    return Simulation(policy, load).run()


def grid(seed: int = 0) -> dict[str, Workload]:
    """The twelve workloads: latency x context x over-subscription."""
    out = {}
    for latency, wait in (("short", ("lognormal", 0.1, 1.0)), ("long", ("pareto", 0.6, 1.3))):
        for context, sizes in (
            ("short", {"prompt": 80, "observation": 20, "turns": (3, 7), "capacity": 8192, "slots": 64}),
            ("long", {"prompt": 300, "observation": 60, "turns": (5, 11), "capacity": 16384, "slots": 64}),
        ):
            for over in (0.5, 1.0, 3.0):
                out[f"{latency} wait, {context} context, {over}x"] = Workload(
                    wait=wait,
                    over=over,
                    seed=seed,
                    **sizes,  # type: ignore[arg-type]
                )
    return out
