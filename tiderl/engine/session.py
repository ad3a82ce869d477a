"""One episode's context inside vLLM, with KV set aside for all of it.

Invariants: nothing reaches the engine that could pass the reservation or the model's limit; a session that
failed, timed out or was cancelled is dead and is never fed again.

vLLM drops the last sampled token of a turn from its context (its KV was never computed), so it is sent again
as the first token of the next turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tiderl.engine.base import Sampling, TurnOutput
from tiderl.engine.budget import Lease
from tiderl.engine.naming import RequestName
from tiderl.engine.stream import ResumableRequest, Sampled
from tiderl.errors import EngineError, PromptTooLong, TideError

if TYPE_CHECKING:
    import numpy as np

    from tiderl.engine.vllm import VLLMEngine


class VLLMSession:
    """Made by `VLLMEngine.session`; see `tiderl.engine.base.KVSession`."""

    def __init__(self, engine: VLLMEngine, lease: Lease, name: str, epoch: int, priority: int) -> None:
        self.name = name
        self._engine = engine
        self._lease = lease
        self._request = ResumableRequest(engine, RequestName(lease.slot, name, epoch), priority)
        self._limit = min(lease.tokens, engine.max_model_len)
        self._length = 0
        self._images = 0
        self._unsent: int | None = None
        self._busy = False
        self._ended: str | None = None

    @property
    def length(self) -> int:
        """Tokens of context so far; an image counts with all its tokens."""
        return self._length

    @property
    def limit(self) -> int:
        """Most tokens this session's context may hold."""
        return self._limit

    async def generate(
        self, new_ids: Sequence[int], sampling: Sampling, images: Sequence[np.ndarray] = ()
    ) -> TurnOutput:
        """Append `new_ids` and sample one turn; see `tiderl.engine.base.KVSession.generate`.

        `sampling.max_tokens` is cut to what the reservation still allows (`finish` is then "length").
        `new_ids` holds one placeholder for each of `images` (H x W x 3, uint8).
        """
        sent = False
        with self._engine.gate.counting() as note_sent:
            try:
                prompt, context, params = await self._admit(new_ids, sampling, images)
                self._busy = sent = True
                sampled = await run_turn(self._engine, self._request, prompt, params, note_sent)
            except BaseException as error:
                if sent:
                    await self._kill(f"a turn failed ({type(error).__name__})")
                raise
            finally:
                self._busy = False
        known = max(0, self._length - 1)
        self._length = context + len(sampled.ids)
        self._unsent = sampled.ids[-1]
        self._images += len(images)
        try:
            return turn_output(self._engine, self._lease.slot, sampled, context, known, self.name)
        except EngineError:
            await self._kill("the engine's context differs from ours")
            raise

    async def close(self) -> None:
        """End the session: KV and slot are free when the engine reads its next message."""
        idle = self._ended is None and not self._busy
        if self._ended is None:
            self._ended = "it was closed"
        if idle:
            await self._request.end()
        else:
            await self._request.abort()

    async def _admit(
        self, new_ids: Sequence[int], sampling: Sampling, images: Sequence[np.ndarray]
    ) -> tuple[Any, int, Any]:
        """Check a turn before the engine sees it: (prompt, context length, sampling parameters)."""
        where = f"session {self.name}"
        refuse_unusable(where, self._ended, self._busy)
        ids = checked_ids(
            self._engine, where, new_ids, sampling, self._images + len(images), first=self._length == 0
        )
        again = 0 if self._unsent is None else 1
        if again:
            ids.insert(0, self._unsent)  # type: ignore[arg-type]
        self._busy = True  # rendering images awaits; a second turn must not slip in
        try:
            prompt, chunk = await self._engine.render(ids, images)
        finally:
            self._busy = False
        context = self._length + chunk - again
        return prompt, context, self._engine.params(sampling, room(where, context, self._limit, sampling))

    async def _kill(self, why: str) -> None:
        self._ended = why
        await self._request.abort()


def refuse_unusable(where: str, ended: str | None, busy: bool) -> None:
    """Raise EngineError when a session has ended or a turn of it is running."""
    if ended is not None:
        raise EngineError(f"the session cannot be used: {ended}", where=where)
    if busy:
        raise EngineError("a turn of this session is still running", where=where)


def checked_ids(
    engine: VLLMEngine, where: str, new_ids: Sequence[int], sampling: Sampling, images: int, *, first: bool
) -> list[int]:
    """The new ids of a turn as a list of our own, once everything about the turn is in order.

    Args:
        images: how many the context would hold.
        first: it is the session's first turn.

    Raises:
        EngineError: the engine is dead, or the turn is not one it could run.
    """
    engine.check_alive()
    ids = [int(i) for i in new_ids]
    if not ids and first:
        raise EngineError("the first turn of a session has no prompt", where=where)
    if sampling.max_tokens < 1:
        raise EngineError(f"max_tokens is {sampling.max_tokens}", where=where, fix="ask for 1 or more")
    if ids and not 0 <= min(ids) <= max(ids) < engine.vocabulary:
        raise EngineError(
            f"token ids run from {min(ids)} to {max(ids)}, the model's from 0 to {engine.vocabulary - 1}",
            where=where,
        )
    if images > engine.settings.max_images:
        raise EngineError(
            f"the context would hold {images} images, the engine allows {engine.settings.max_images}",
            where=where,
            fix="raise engine.max_images",
        )
    return ids


def room(where: str, context: int, limit: int, sampling: Sampling) -> int:
    """How many tokens a turn may sample after `context` tokens. Raises PromptTooLong when none."""
    if context >= limit:
        raise PromptTooLong(
            f"the context would have {context} tokens and one more to sample, the limit is {limit}",
            where=where,
            fix="reserve more tokens, raise engine.max_model_len, or end the episode",
        )
    return min(sampling.max_tokens, limit - context)


async def run_turn(
    engine: VLLMEngine, request: ResumableRequest, prompt: Any, params: Any, note_sent: Callable[[], None]
) -> Sampled:
    """A turn with its deadline; what vLLM raises becomes an EngineError."""
    try:
        async with asyncio.timeout(engine.settings.turn_timeout):
            return await request.turn(prompt, params, note_sent)
    except TimeoutError as error:
        raise EngineError(
            f"a turn did not end within {engine.settings.turn_timeout:.0f} s",
            where=f"session {request.name.session}",
            fix="raise engine.turn_timeout or ask for fewer tokens",
        ) from error
    except TideError:
        raise
    except Exception as error:
        raise engine.failure(error) from error


def turn_output(
    engine: VLLMEngine, slot: int, sampled: Sampled, context: int, known: int, name: str
) -> TurnOutput:
    """What a turn brought, with what the scheduler counted.

    Args:
        context: its length when the turn began, as we count.
        known: tokens of it that had been computed before.

    Raises:
        EngineError: the scheduler counted another context.
    """
    counts = engine.turn_counts(slot)
    if counts.prompt != context:
        raise EngineError(
            f"the engine counted a context of {counts.prompt} tokens, we count {context}",
            where=f"session {name}",
        )
    return TurnOutput(
        sampled.ids,
        sampled.logprobs,
        sampled.versions,
        sampled.finish,
        prompt_tokens=counts.prompt,
        cached_tokens=counts.cached,
        new_tokens=context - known,
        reprefilled=counts.again,
        kv_version=counts.kv_version,
        prefill_seconds=counts.prefill_seconds,
        queue_seconds=counts.queue_seconds,
    )
