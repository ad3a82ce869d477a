"""What a scheduling policy answers: decisions with their reason and their prediction.

Invariant: a plan is applied in its order; each decision is legal in the state the ones before it leave.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tiderl.scheduling.views import Snapshot

UpdateMode = Literal["keep", "recompute", "wait"]


@dataclass(frozen=True, slots=True)
class Admit:
    """QUEUED -> ADMITTED: open its environment; `engine` is where its first turn is expected to run."""

    key: str
    engine: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Resume:
    """READY -> RUNNING on `engine`; when its KV is elsewhere, everything is computed again there."""

    key: str
    engine: str
    why: str = ""
    predicted: float | None = None  # tokens that will have to be computed again


@dataclass(frozen=True, slots=True)
class Release:
    """HELD -> CACHED, of a PAUSED or READY task: its blocks and its slot are free at once."""

    key: str
    why: str = ""
    predicted: float | None = None  # seconds until it would have come back


Decision = Admit | Resume | Release


@dataclass(frozen=True, slots=True)
class Plan:
    """A policy's answer."""

    decisions: tuple[Decision, ...] = ()
    memory: Any = None  # handed back with the next snapshot; a policy keeps nothing of its own
    wake: float | None = None
    """When to ask again at the latest (same clock as `Snapshot.now`); events ask by themselves."""


class Policy(Protocol):
    """Decides who runs where and whose KV is kept. Pure: equal snapshot and memory, equal plan.

    Whoever applies a plan checks it: the tokens promised on an engine, in whole blocks, never pass
    its capacity, nor sessions its slots. A `Resume` of a HELD task on its own engine adds
    `blocks(peak) - blocks(context)`; of any other task `blocks(peak)` and a slot. After a turn a task
    is HELD and its promise shrinks to `blocks(context)`, until it is released.
    """

    name: str
    update_mode: UpdateMode

    def start(self) -> Any:
        """The memory to begin with."""
        ...

    def decide(self, snapshot: Snapshot, memory: Any) -> Plan:
        """What to do now."""
        ...
