"""What a scheduling policy sees: frozen snapshots of tasks and engines.

Invariant: plain values only, made by whoever holds the state; a policy can neither change them nor reach
past them. Times are seconds since the run began, tokens are tokens of context, and an engine's promises
are whole KV blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tiderl.scheduling.waits import Waits


class State(StrEnum):
    """Where a task is on its way. See docs/scheduling.md."""

    QUEUED = "queued"  # known, not started: no environment, no KV
    ADMITTED = "admitted"  # its environment is being opened and reset
    READY = "ready"  # a turn waits to be sent to an engine
    RUNNING = "running"  # an engine works on a turn
    PAUSED = "paused"  # its environment works on the turn's action
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        """No way leads out of it."""
        return self in (State.DONE, State.FAILED, State.CANCELLED)


class KV(StrEnum):
    """Where a task's KV is while it is not running."""

    NONE = "none"  # nothing was computed yet
    HELD = "held"  # its blocks and its slot are reserved; a resume computes new tokens only
    CACHED = "cached"  # let go into the prefix cache: found again unless it was evicted
    COLD = "cold"  # certainly gone: engine dead, weights changed in `recompute`, or moved


@dataclass(frozen=True, slots=True)
class Task:
    """One task (a trajectory in the making)."""

    key: str
    order: tuple[int, int]  # (group ordinal, member): rank in the task stream
    kind: str  # its environment, or task family: what mixes are made of
    state: State
    kv: KV = KV.NONE
    engine: str = ""  # where it runs, or where its KV is or was; empty: nowhere yet
    context: int = 0  # tokens of its record so far
    new: int = 0
    """Tokens its next turn adds before sampling: the observation; QUEUED: the expected first prompt."""
    growth: int = 0  # most tokens its next turn may sample
    remaining: int = 0
    """Expected tokens it will still add after its next turn (observations and replies), from the history."""
    turn: int = 0  # turns done
    since: float = 0.0  # when it entered its state
    queued: float = 0.0  # when it was queued
    wait: str = ""  # PAUSED: key into `Snapshot.waits`, `environment/tool`
    version: int = -1  # policy version of its first sampled token; -1: none sampled

    @property
    def peak(self) -> int:
        """Most tokens of KV its next turn can need."""
        return self.context + self.new + self.growth


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine."""

    name: str
    capacity: int  # tokens of KV
    slots: int  # most sessions at a time
    promised: int = 0
    """Tokens of KV promised, in whole blocks: held contexts, and running turns up to their peak."""
    sessions: int = 0  # sessions that hold a slot now
    running: int = 0  # turns it works on
    block: int = 1  # tokens of a KV block
    prefill_s: float = 0.0  # seconds to compute one token of a prompt, measured
    turn_s: float = 0.0  # seconds a turn takes from being sent to its end, moving average
    preemptions: int = 0  # since the engine started
    lost: int = 0  # tokens computed again since the start because they had been let go or evicted
    version: int = 0
    accepting: bool = True  # false while it leaves, is dead, or loads weights

    def blocks(self, tokens: int) -> int:
        """`tokens` rounded up to whole blocks, in tokens."""
        return -(-tokens // self.block) * self.block


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything a policy may know at one moment. Each tuple is sorted by `Task.order`."""

    now: float
    engines: tuple[EngineView, ...]
    queued: tuple[Task, ...] = ()
    admitted: tuple[Task, ...] = ()
    ready: tuple[Task, ...] = ()
    running: tuple[Task, ...] = ()
    paused: tuple[Task, ...] = ()
    waits: Mapping[str, Waits] = field(default_factory=dict)  # how long environments take, by `Task.wait`
    allowed: int = 1 << 62  # only groups with a lower ordinal may be admitted: the staleness bound, as a pace
    barrier: int = 1 << 62  # end of the current update's groups: what a policy with a step barrier admits
    concurrency: int = 1 << 62  # most tasks in flight (admitted, ready, running, paused) that the run allows
    target_mix: Mapping[str, float] = field(default_factory=dict)
    """Wanted share of each kind in what the trainer gets; empty: as the stream has it."""
    shipped: Mapping[str, int] = field(default_factory=dict)  # finished tasks of each kind so far

    @property
    def in_flight(self) -> int:
        """Tasks that were admitted and have not ended."""
        return len(self.admitted) + len(self.ready) + len(self.running) + len(self.paused)
