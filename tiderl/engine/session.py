"""One episode's context inside vLLM: a resumable request that keeps its KV between turns.

Invariants: nothing reaches the engine that could pass the reservation or the model's limit; a session that
failed, timed out or was cancelled is dead and is never fed again; the lists vLLM extends in place are copies.

vLLM drops the last sampled token of a turn from its context (its KV was never computed), so it is sent again
as the first token of the next turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

from tiderl.engine.base import FinishReason, Sampling, TurnOutput
from tiderl.engine.budget import Lease
from tiderl.errors import EngineError, PromptTooLong, TideError

if TYPE_CHECKING:
    import numpy as np

    from tiderl.engine.vllm import VLLMEngine

_END_TIMEOUT = 10.0


class VLLMSession:
    """Made by `VLLMEngine.session`; see `tiderl.engine.base.KVSession`."""

    def __init__(self, engine: VLLMEngine, lease: Lease, name: str, epoch: int, priority: int) -> None:
        self.name = name
        self.request_id = f"{lease.slot:04d}~{name}~{epoch}"
        self._engine = engine
        self._lease = lease
        self._priority = priority
        self._limit = min(lease.tokens, engine.max_model_len)
        self._length = 0
        self._images = 0
        self._unsent: int | None = None
        self._sampled = 0
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._stream: AsyncGenerator[Any, None] | None = None
        self._busy = False
        self._ended: str | None = None
        self._freed = False

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
                async with asyncio.timeout(self._engine.settings.turn_timeout):
                    ids, logprobs, versions, finish = await self._turn((prompt, params, note_sent))
            except BaseException as error:
                if sent:
                    await self._kill(f"a turn failed ({type(error).__name__})")
                if isinstance(error, TimeoutError):
                    raise EngineError(
                        f"a turn did not end within {self._engine.settings.turn_timeout:.0f} s",
                        where=f"session {self.name}",
                        fix="raise engine.turn_timeout or ask for fewer tokens",
                    ) from error
                if isinstance(error, TideError) or not isinstance(error, Exception):
                    raise
                raise self._engine.failure(error) from error
            finally:
                self._busy = False
        self._length = context + len(ids)
        self._unsent = ids[-1]
        self._images += len(images)
        _, prompt_tokens, cached = self._engine.turn_counts(self._lease.slot)
        if prompt_tokens != context:
            await self._kill("the engine's context differs from ours")
            raise EngineError(
                f"the engine counted a context of {prompt_tokens} tokens, we count {context}",
                where=f"session {self.name}",
            )
        return TurnOutput(ids, logprobs, versions, finish, prompt_tokens, cached)

    async def close(self) -> None:
        """End the session: KV and slot are free when the engine reads its next message."""
        if self._freed:
            return
        idle = self._ended is None and not self._busy
        if self._ended is None:
            self._ended = "it was closed"
        if self._stream is None:
            self._freed = True
        elif not idle:
            await self._abort()
        else:
            self._inbox.put_nowait(None)
            try:
                async with asyncio.timeout(_END_TIMEOUT):
                    async for _ in self._stream:
                        pass
                self._freed = True
            finally:
                if not self._freed:
                    await self._abort()

    # -- one turn

    async def _admit(
        self, new_ids: Sequence[int], sampling: Sampling, images: Sequence[np.ndarray]
    ) -> tuple[Any, int, Any]:
        """Check a turn before the engine sees it: (prompt, context length, sampling parameters)."""
        where = f"session {self.name}"
        if self._ended is not None:
            raise EngineError(f"the session cannot be used: {self._ended}", where=where)
        if self._busy:
            raise EngineError("a turn of this session is still running", where=where)
        self._engine.check_alive()
        ids = [int(i) for i in new_ids]
        if not ids and self._length == 0:
            raise EngineError("the first turn of a session has no prompt", where=where)
        if sampling.max_tokens < 1:
            raise EngineError(f"max_tokens is {sampling.max_tokens}", where=where, fix="ask for 1 or more")
        if ids and not 0 <= min(ids) <= max(ids) < self._engine.vocabulary:
            raise EngineError(
                f"token ids run from {min(ids)} to {max(ids)}, the model's from 0 to"
                f" {self._engine.vocabulary - 1}",
                where=where,
            )
        if self._images + len(images) > self._engine.settings.max_images:
            raise EngineError(
                f"the context would hold {self._images + len(images)} images, the engine allows"
                f" {self._engine.settings.max_images}",
                where=where,
                fix="raise engine.max_images",
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
        room = self._limit - context
        if room < 1:
            raise PromptTooLong(
                f"the context would have {context} tokens and one more to sample, the limit is {self._limit}",
                where=where,
                fix="reserve more tokens, raise engine.max_model_len, or end the episode",
            )
        return prompt, context, self._engine.params(sampling, min(sampling.max_tokens, room))

    async def _turn(
        self, chunk: tuple[Any, Any, Any]
    ) -> tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...], FinishReason]:
        if self._stream is None:
            self._stream = self._engine.open_stream(self._chunks(), chunk[1], self.request_id, self._priority)
        self._inbox.put_nowait(chunk)
        ids: list[int] = []
        logprobs: list[float] = []
        async for output in self._stream:
            completion = output.outputs[0]
            ids.extend(completion.token_ids)
            for entry, token in zip(completion.logprobs or (), completion.token_ids, strict=True):
                logprobs.append(entry[token].logprob)
            if completion.finish_reason is None:
                continue
            if completion.finish_reason not in ("stop", "length") or not ids:
                raise EngineError(
                    f"the engine ended a turn with {completion.finish_reason!r}", where=f"session {self.name}"
                )
            start = self._sampled
            self._sampled += len(ids)
            versions = self._engine.versions_of(completion.weight_versions, start, self._sampled)
            finish: FinishReason = "stop" if completion.finish_reason == "stop" else "length"
            return tuple(ids), tuple(logprobs), versions, finish
        self._engine.check_alive()
        raise EngineError(
            "the engine ended the session in the middle of a turn", where=f"session {self.name}"
        )

    async def _chunks(self) -> AsyncGenerator[Any, None]:
        from vllm.engine.protocol import StreamingInput

        while (chunk := await self._inbox.get()) is not None:
            prompt, params, note_sent = chunk
            yield StreamingInput(prompt=prompt, sampling_params=params)
            note_sent()  # vLLM asks for the next chunk once this one is on its way

    async def _kill(self, why: str) -> None:
        self._ended = why
        await self._abort()

    async def _abort(self) -> None:
        """Free KV and slot of a session that cannot end in good order."""
        await self._engine.abort(self.request_id)
        self._freed = True
        if self._stream is not None:
            try:
                await self._stream.aclose()
            except Exception:  # noqa: BLE001  # vLLM's generator ends with whatever its abort made of it
                return
