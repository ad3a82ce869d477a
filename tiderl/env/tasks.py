"""Task sets: tasks by split and id.

Invariant: within a split an id names one task; ids are ints or strings, and "3" finds 3 where no task
is called "3".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np

from tiderl.errors import EnvironmentFault, nearest


class LazyTasks(Sequence[Any]):
    """Tasks made from their ids when they are asked for.

    Args:
        ids: the ids in order.
        make: the task of an id; it must not depend on anything else.
    """

    def __init__(self, ids: Sequence[int | str], make: Callable[[Any], dict[str, Any]]) -> None:
        self.ids, self._make = ids, make

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return LazyTasks(self.ids[index], self._make)
        return self._make(self.ids[index])


class TaskLists:
    """The task lists of one environment, asked for once per split.

    Raises (all methods):
        EnvironmentFault: unknown split or task, an empty split, a task without an id, an id twice.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self._lists: dict[str, Sequence[Any]] = {}
        self._index: dict[str, dict[int | str, int]] = {}

    def tasks(self, split: str) -> Sequence[Any]:
        """The tasks of a split."""
        if split not in self._lists:
            env = self._env
            if split not in env.splits:
                raise EnvironmentFault(
                    f"{type(env).__name__} has no split {split!r}",
                    fix="use one of " + ", ".join(repr(name) for name in env.splits),
                )
            found = env.tasks(split)
            if not isinstance(found, Sequence) or isinstance(found, str):
                raise EnvironmentFault(
                    f"tasks({split!r}) of {type(env).__name__} returned {type(found).__name__}",
                    fix="return a list of dicts with an 'id'",
                )
            if not len(found):
                raise EnvironmentFault(
                    f"split {split!r} of {type(env).__name__} has no tasks", fix="add tasks"
                )
            self._lists[split] = found
        return self._lists[split]

    def index(self, split: str) -> dict[int | str, int]:
        """Id to position."""
        if split not in self._index:
            tasks = self.tasks(split)
            ids = tasks.ids if isinstance(tasks, LazyTasks) else [self._id(task, split) for task in tasks]
            index = {identity: position for position, identity in enumerate(ids)}
            if len(index) != len(ids):
                raise EnvironmentFault(
                    f"split {split!r} of {type(self._env).__name__} has an id twice", fix="number the tasks"
                )
            self._index[split] = index
        return self._index[split]

    def ids(self, split: str) -> list[int | str]:
        """The ids of a split, in order."""
        return list(self.index(split))

    def find(self, split: str, identity: int | str) -> Any:
        """The task of an id."""
        index = self.index(split)
        if identity not in index and str(identity) not in index:
            as_int = int(identity) if isinstance(identity, str) and identity.lstrip("-").isdigit() else None
            if as_int not in index:
                near = nearest(str(identity), map(str, list(index)[:5000]))
                raise EnvironmentFault(
                    f"split {split!r} of {type(self._env).__name__} has no task {identity!r}",
                    fix=f"did you mean {near[0]!r}?"
                    if near
                    else f"it has {len(index)} tasks, such as {next(iter(index), None)!r}",
                )
            identity = as_int
        elif identity not in index:
            identity = str(identity)
        return self.tasks(split)[index[identity]]

    def draw(self, split: str, rng: np.random.Generator) -> Any:
        """A task drawn uniformly."""
        tasks = self.tasks(split)
        return tasks[int(rng.integers(len(tasks)))]

    def _id(self, task: Any, split: str) -> int | str:
        identity = task.get("id") if isinstance(task, dict) else None
        if isinstance(identity, bool) or not isinstance(identity, (int, str)):
            raise EnvironmentFault(
                f"a task of split {split!r} of {type(self._env).__name__} has no id: {str(task)[:60]}",
                fix="make each task a dict with an 'id' that is an int or a string",
            )
        return identity
