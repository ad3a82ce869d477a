"""One task's context, whose KV inside vLLM is leased turn by turn and can be let go between turns.

Invariants: the whole context (ids, images) is kept here after every turn, so KV is only a cache; a lease
covers what the engine can need for a turn before it is sent, and what it holds after it; a turn that did not
end leaves no trace, here or in the engine.

A held session goes on as `VLLMSession` does. One that is not sends its whole context as a new request, under
a new id and maybe in another slot, and takes from the prefix cache what is still there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiderl.engine.base import Replay, Sampling, TurnOutput
from tiderl.engine.budget import Lease
from tiderl.engine.naming import RequestName
from tiderl.engine.pause import to_its_end
from tiderl.engine.requests import expansion
from tiderl.engine.session import checked_ids, refuse_unusable, room, run_turn, turn_output
from tiderl.engine.stream import ResumableRequest, Sampled
from tiderl.errors import Busy, EngineError

if TYPE_CHECKING:
    import numpy as np

    from tiderl.engine.vllm import VLLMEngine


@dataclass(frozen=True)
class _Held:
    """What a session has in the engine."""

    request: ResumableRequest
    lease: Lease


@dataclass(frozen=True)
class _Turn:
    """A turn that was checked and has not been sent."""

    prompt: Any
    params: Any
    context: int
    known: int
    """Tokens of the context that were computed before."""
    tokens: int
    """Most tokens of KV it can need."""
    kept: bool
    """A new request under the salt of older weights."""


class VLLMTaskSession:
    """Made by `VLLMEngine.task_session`; see `tiderl.engine.base.TaskSession`."""

    def __init__(self, engine: VLLMEngine, name: str, priority: int, replay: Replay | None) -> None:
        replay = replay or Replay(())
        self.name = name
        self._engine = engine
        self._priority = priority
        self._ids = list(replay.ids)
        self._images = list(replay.images)
        self._turns = replay.turns
        self._salt = replay.version
        """The version under whose salt its KV lies in the prefix cache; -1: none of it may be read."""
        self._length = replay.length or len(self._ids)
        self._held: _Held | None = None
        self._busy = False
        self._ended: str | None = None

    @property
    def held(self) -> bool:
        """A live request holds blocks and a slot."""
        return self._held is not None

    @property
    def length(self) -> int:
        """Tokens of context so far; an image counts with all its tokens."""
        return self._length

    @property
    def promised_tokens(self) -> int:
        """Tokens of KV leased now, in whole blocks."""
        return 0 if self._held is None else self._engine.budget.tokens_of(self._held.lease)

    def snapshot(self) -> Replay:
        """See `tiderl.engine.base.TaskSession.snapshot`."""
        return Replay(tuple(self._ids), tuple(self._images), self._turns, self._salt, self._length)

    async def generate(
        self, new_ids: Sequence[int], sampling: Sampling, images: Sequence[np.ndarray] = ()
    ) -> TurnOutput:
        """Append `new_ids` and sample one turn; see `tiderl.engine.base.TaskSession.generate`."""
        where = f"session {self.name}"
        with self._engine.gate.counting() as note_sent:
            refuse_unusable(where, self._ended, self._busy)
            ids = checked_ids(
                self._engine,
                where,
                new_ids,
                sampling,
                len(self._images) + len(images),
                first=not self._ids,
            )
            self._busy = True
            try:
                turn = await self._prepare(ids, sampling, images)
                refuse_unusable(where, self._ended, False)  # closed while images were rendered
                held = self._held = self._lease(turn)
                try:
                    sampled = await run_turn(self._engine, held.request, turn.prompt, turn.params, note_sent)
                    refuse_unusable(where, self._ended, False)  # closed while the turn ran
                    output = turn_output(
                        self._engine, held.lease.slot, sampled, turn.context, turn.known, self.name
                    )
                except BaseException:
                    await self._let_go(in_order=False)
                    raise
                self._keep(held, ids, images, turn.context, sampled)
                return output
            finally:
                self._busy = False

    async def release(self, *, fresh: bool = False) -> None:
        """See `tiderl.engine.base.TaskSession.release`."""
        if self._busy:
            raise EngineError("a turn of this session is still running", where=f"session {self.name}")
        if fresh:
            self._salt = -1
        await self._let_go(in_order=True)

    async def close(self) -> None:
        """End the session, also in the middle of a turn: KV, slot and lease are given back."""
        if self._ended is None:
            self._ended = "it was closed"
        await self._let_go(in_order=not self._busy)

    # -- one turn

    async def _prepare(self, ids: list[int], sampling: Sampling, images: Sequence[np.ndarray]) -> _Turn:
        engine = self._engine
        if self._held is not None:
            prompt, chunk = await engine.render([self._ids[-1], *ids], images)
            known, kept = self._length - 1, False
            context = known + chunk
        else:
            kept = bool(self._turns) and self._salt >= engine.oldest_kv
            salt = self._salt if kept else engine.version
            prompt, context = await engine.render([*self._ids, *ids], [*self._images, *images], salt)
            before = context - len(ids) - expansion(prompt, len(self._images))
            known = before - 1 if self._turns else 0
        most = room(f"session {self.name}", context, engine.max_model_len, sampling)
        params = engine.params(sampling, most)
        return _Turn(prompt, params, context, known, context + most, kept)

    def _lease(self, turn: _Turn) -> _Held:
        """Room for the turn, at once. Raises Busy and changes nothing when there is none."""
        budget = self._engine.budget
        if self._held is not None:
            lease = budget.try_resize(self._held.lease, turn.tokens)
            if lease is not None:
                return _Held(self._held.request, lease)
        else:
            lease = budget.try_acquire(turn.tokens)
            if lease is not None:
                name = RequestName(
                    lease.slot, self.name, self._engine.next_epoch(), self._turns + 1, turn.known, turn.kept
                )
                return _Held(ResumableRequest(self._engine, name, self._priority), lease)
        raise Busy(
            f"no room for a turn of up to {turn.tokens} tokens of KV ({budget.taken})",
            retry_after=1.0,
            where=f"session {self.name}",
        )

    def _keep(
        self, held: _Held, ids: list[int], images: Sequence[np.ndarray], context: int, sampled: Sampled
    ) -> None:
        """A turn ended: its tokens belong to the context, and the lease shrinks to what the engine holds."""
        self._ids += ids
        self._ids += sampled.ids
        self._images += images
        self._turns += 1
        self._length = context + len(sampled.ids)
        self._salt = self._engine.turn_counts(held.lease.slot).salt
        lease = self._engine.budget.try_resize(held.lease, self._length)
        assert lease is not None  # it only shrinks
        self._held = _Held(held.request, lease)

    async def _let_go(self, *, in_order: bool) -> None:
        """Give up what is held. To its end, whoever is cancelled meanwhile: its room counts until then."""
        held, self._held = self._held, None
        if held is not None:
            await to_its_end(self._give_back(held, in_order))

    async def _give_back(self, held: _Held, in_order: bool) -> None:
        engine = self._engine
        try:
            await (held.request.end() if in_order else held.request.abort())
        except Exception as error:
            # An alive engine frees on abort, which end() has sent; a dead one holds nothing.
            if not engine.dead:
                raise engine.failure(error) from error
        finally:
            engine.budget.release(held.lease)
