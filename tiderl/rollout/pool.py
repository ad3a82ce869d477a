"""The engines of a rollout, by name.

Invariant: an engine that left or died is never given a turn again; what was measured about an engine goes
with it. Engines may join and leave at any time; joining ones already run the newest weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tiderl.errors import EngineError
from tiderl.rollout.history import Average
from tiderl.scheduling.views import EngineView

if TYPE_CHECKING:
    from tiderl.engine.vllm import VLLMEngine


@dataclass
class Member:
    """One engine and what was measured about it."""

    name: str
    engine: VLLMEngine
    accepting: bool = True
    turn: Average = field(default_factory=Average)
    """Seconds a turn."""
    lost: int = 0
    """Tokens computed again because they had been let go or evicted."""

    def view(self) -> EngineView:
        """As a policy sees it, before the table's promises are filled in."""
        engine = self.engine
        return EngineView(
            name=self.name,
            capacity=engine.capacity_tokens,
            slots=engine.max_sessions,
            block=engine.settings.block_size,
            prefill_s=engine.prefill_s,
            turn_s=self.turn.value,
            lost=self.lost,
            version=engine.version,
            accepting=self.accepting,
        )

    def error(self) -> EngineError | None:
        """What it died of; None while it lives."""
        try:
            self.engine.check_alive()
        except EngineError as error:
            return error
        return None


class EnginePool:
    """Engines by name. Whoever adds an engine closes it, unless `close()` is called."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._dead: list[VLLMEngine] = []

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def __getitem__(self, name: str) -> Member:
        """An engine by name. Raises EngineError when it is not (or no more) there."""
        if name not in self._members:
            raise EngineError(f"engine {name} has left or died", fix=f"there are {list(self.names)}")
        return self._members[name]

    @property
    def names(self) -> tuple[str, ...]:
        """In the order they joined."""
        return tuple(self._members)

    def get(self, name: str) -> Member | None:
        """An engine by name; None when it is not (or no more) there."""
        return self._members.get(name)

    async def add(self, name: str, engine: VLLMEngine) -> Member:
        """A started engine joins.

        Raises:
            EngineError: the name is taken or the engine does not run.
        """
        if name in self._members:
            raise EngineError(f"there is an engine named {name} already", fix="choose another name")
        engine.check_alive()
        member = Member(name, engine)
        self._members[name] = member
        return member

    def drop(self, name: str, *, dead: bool = False) -> Member | None:
        """An engine is gone; a dead one is cleaned up at the end, when nobody looks at it any more."""
        member = self._members.pop(name, None)
        if member is not None and dead:
            self._dead.append(member.engine)
        return member

    @property
    def max_model_len(self) -> int:
        """Longest context that every engine takes, in tokens."""
        return min((member.engine.max_model_len for member in self), default=0)

    async def close(self) -> None:
        """Close every engine."""
        for member in list(self._members.values()):
            self.drop(member.name)
            await member.engine.close()
        while self._dead:
            await self._dead.pop().close()
