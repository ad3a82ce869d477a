"""Recording what episodes did, so that a workload can play them again.

Invariant: one whole JSON object a line, one line an episode; the members of a group have the same `task`, and
so become the ways in which that task can go.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tiderl.errors import ConfigError
from tiderl.scheduling.views import State

if TYPE_CHECKING:
    from tiderl.scheduling.views import Task
    from tiderl.trajectory.trajectory import Trajectory


class Recorder:
    """Writes finished episodes to a file; learns from the moves of the task table how long environments took.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file: TextIO = path.open("w")
        except OSError as error:
            raise ConfigError(
                f"the trace cannot be written: {error.strerror}", where=str(path), fix="name another file"
            ) from error
        self._waits: dict[str, list[float]] = {}
        self.episodes = 0

    def over(self, meter: Any) -> Any:
        """A meter that tells this recorder what it is told."""
        return _Meter(meter, self)

    def moved(self, before: Task | None, after: Task, at: float) -> None:
        """See `RolloutMeter.moved`."""
        if before is not None and before.state is State.PAUSED and after.state is not State.PAUSED:
            self._waits.setdefault(after.key, []).append(at - before.since)
        if after.state in (State.FAILED, State.CANCELLED):
            self._waits.pop(after.key, None)

    def finished(self, trajectory: Trajectory) -> None:
        """Write an episode down; one whose record forked, or that is not valid, is left out."""
        waits = self._waits.pop(trajectory.episode_id, [])
        if not trajectory.valid or trajectory.forks or len(waits) != trajectory.turns:
            return
        self._file.write(json.dumps(line_of(trajectory, waits)) + "\n")
        self._file.flush()
        self.episodes += 1

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _Meter:
    def __init__(self, meter: Any, recorder: Recorder) -> None:
        self._meter, self._recorder = meter, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._meter, name)

    def moved(self, before: Task | None, after: Task, at: float, cause: str = "") -> None:
        self._recorder.moved(before, after, at)
        self._meter.moved(before, after, at, cause)


def line_of(trajectory: Trajectory, waits: list[float]) -> dict[str, Any]:
    """An episode as a line of a trace: tokens of each observation and reply, seconds after each reply."""
    (record,) = trajectory.records
    pictures = _pictures(trajectory)
    turns, end = [], 0
    for number, ((start, stop), wait) in enumerate(zip(record.turns, waits, strict=True)):
        turn: dict[str, Any] = {"observation": start - end, "reply": stop - start, "seconds": round(wait, 4)}
        if number in pictures:
            turn["image"] = True
        turns.append(turn)
        end = stop
    return {"task": trajectory.ordinal, "turns": turns}


def _pictures(trajectory: Trajectory) -> set[int]:
    """The turns whose observation holds a picture."""
    from tiderl.env.messages import images_of

    found, turn = set(), 0
    for message in trajectory.messages:
        if message["role"] == "assistant":
            turn += 1
        elif images_of(message):
            found.add(turn)
    return found
