"""Tells the decision log and the meter what the conductor does.

Invariant: it changes nothing, and works with neither of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from tiderl.scheduling.views import State

if TYPE_CHECKING:
    from tiderl.engine.base import TurnOutput
    from tiderl.rollout.table import TaskTable
    from tiderl.scheduling.decisions import Decision
    from tiderl.scheduling.views import EngineView, Task
    from tiderl.telemetry.decisions import DecisionLog
    from tiderl.telemetry.rollout_meter import RolloutMeter


class Teller:
    """Both are optional."""

    def __init__(self, decisions: DecisionLog | None, meter: RolloutMeter | None) -> None:
        self.decisions, self.meter = decisions, meter

    def moved(self, before: Task | None, after: Task, at: float, cause: str) -> None:
        """A task moved in the table, or entered it (before is None)."""
        if self.meter is not None:
            self.meter.moved(before, after, at, cause)
        if self.decisions is not None:
            self.decisions.transition(
                at,
                after.key,
                str(before.state) if before is not None else "",
                str(after.state),
                kv=str(after.kv),
                engine=after.engine,
                context=after.context,
                cause=cause,
                wait=after.wait,
            )

    def decided(
        self, decision: Decision, task: Task | None, view: EngineView | None, table: TaskTable, at: float
    ) -> int:
        """A decision is about to be applied; returns its id in the log, -1 without one."""
        if self.decisions is None:
            return -1
        inputs: dict[str, float | int | str] = {
            "queued": table.count(State.QUEUED),
            "ready": table.count(State.READY),
            "paused": table.count(State.PAUSED),
        }
        if task is not None:
            inputs |= {"context": task.context, "new": task.new, "waited": round(at - task.since, 4)}
        if view is not None:
            inputs |= {"promised": view.promised, "capacity": view.capacity, "running": view.running}
        return self.decisions.decision(
            at,
            type(decision).__name__.lower(),
            decision.key,
            engine=getattr(decision, "engine", ""),
            why=decision.why,
            predicted=getattr(decision, "predicted", None),
            inputs=inputs,
        )

    def outcome(self, decision: int, at: float, actual: float) -> None:
        """What a decision's prediction came to."""
        if self.decisions is not None and decision >= 0:
            self.decisions.outcome(decision, at, actual)

    def turn(self, task: Task, out: TurnOutput, cause: str, at: float) -> None:
        """A turn ended of `task` (as it was when sent); `cause`: why tokens were computed again."""
        counts = {
            "prompt_tokens": out.prompt_tokens,
            "cached_tokens": out.cached_tokens,
            "new_tokens": out.new_tokens,
            "reprefilled": out.reprefilled,
            "sampled": len(out.ids),
        }
        if self.meter is not None:
            self.meter.turn(task, cause=cause, **counts)
        if self.decisions is not None:
            self.decisions.turn(at, task.key, engine=task.engine, cause=cause, **counts)

    def engines(self, views: list[EngineView], at: float, allowed: int) -> None:
        """One look at the engines; groups from `allowed` on may not start yet."""
        if self.meter is not None:
            self.meter.engines(views, at, allowed=allowed)

    def occupied(self, by: Literal["", "weights", "evaluation"], at: float) -> None:
        """Engines get no turns from now on, or do again."""
        if self.meter is not None:
            self.meter.occupied(by, at)

    def note(self, at: float, text: str, **fields: Any) -> None:
        """Something that concerns no single task."""
        if self.decisions is not None:
            self.decisions.note(at, text, **fields)

    def close(self) -> None:
        """Write what is still buffered."""
        if self.decisions is not None:
            self.decisions.close()
