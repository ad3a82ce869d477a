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
from tiderl.errors import EngineError, PromptTooLong

if TYPE_CHECKING:
    import numpy as np

    from tiderl.engine.vllm import VLLMEngine


class VLLMSession:
    """Made by `VLLMEngine.session`; see `tiderl.engine.base.KVSession`."""

    def __init__(self, engine: VLLMEngine, lease: Lease, request_id: str, priority: int) -> None:
        self._engine = engine
        self._lease = lease
        self.request_id = request_id
        self._priority = priority
        self._limit = min(lease.tokens, engine.max_model_len)
        self._length = 0
        self._unsent: int | None = None
        self._sampled = 0
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._stream: AsyncGenerator[Any, None] | None = None
        self._busy = False
        self._ended: str | None = None

    @property
    def length(self) -> int:
        """Tokens of context so far."""
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
        """
        self._check_open()
        ids = [int(i) for i in new_ids]
        if not ids and self._length == 0:
            raise EngineError("the first turn of a session has no prompt", where=self.request_id)
        if sampling.max_tokens < 1:
            raise EngineError(
                f"max_tokens is {sampling.max_tokens}", where=self.request_id, fix="ask for 1 or more"
            )
        if ids and not 0 <= min(ids) <= max(ids) < self._engine.vocabulary:
            raise EngineError(
                f"a token id is outside 0..{self._engine.vocabulary - 1}: {min(ids)} to {max(ids)}",
                where=self.request_id,
            )
        prompt, added = await self._engine.render(ids, images)
        context = self._length + added
        room = self._limit - context
        if room < 1:
            raise PromptTooLong(
                f"the context would have {context} tokens and one more to sample, the limit is {self._limit}",
                where=f"session {self.request_id.split('~')[1]}",
                fix="reserve more tokens, raise engine.max_model_len, or end the episode",
            )
        if self._unsent is not None:
            prompt["prompt_token_ids"] = [self._unsent, *prompt["prompt_token_ids"]]
        params = self._engine.params(sampling, min(sampling.max_tokens, room))
        self._busy = True
        try:
            async with asyncio.timeout(self._engine.settings.turn_timeout):
                output = await self._turn(prompt, params)
        except BaseException as error:
            await self._kill(f"a turn failed ({type(error).__name__})")
            if isinstance(error, TimeoutError):
                raise EngineError(
                    f"a turn did not end within {self._engine.settings.turn_timeout:.0f} s",
                    where=self.request_id,
                    fix="raise engine.turn_timeout or ask for fewer tokens",
                ) from error
            if isinstance(error, (asyncio.CancelledError, EngineError, GeneratorExit, KeyboardInterrupt)):
                raise
            raise self._engine.failure(error) from error
        finally:
            self._busy = False
        ids_out, logprobs, versions, finish = output
        self._length = context + len(ids_out)
        self._unsent = ids_out[-1]
        turn, prompt_tokens, cached = self._engine.turn_counts(self._lease.slot)
        del turn
        if prompt_tokens != context:
            raise EngineError(
                f"the engine counted a context of {prompt_tokens} tokens, we count {context}",
                where=self.request_id,
            )
        return TurnOutput(ids_out, logprobs, versions, finish, prompt_tokens, cached)

    async def close(self) -> None:
        """End the session: KV and slot are free when the engine reads its next message."""
        if self._ended is not None:
            return
        if self._stream is None:
            self._ended = "it was closed"
            return
        if self._busy:
            await self._kill("it was closed during a turn")
            return
        self._ended = "it was closed"
        self._inbox.put_nowait(None)
        try:
            async with asyncio.timeout(10.0):
                async for _ in self._stream:
                    pass
        except Exception:  # the engine is dying or already dead: nothing is left to free
            await self._abort()
        except asyncio.CancelledError:
            await self._abort()
            raise

    # -- one turn

    async def _turn(
        self, prompt: dict[str, Any], params: Any
    ) -> tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...], FinishReason]:
        if self._stream is None:
            self._stream = self._engine.open_stream(self._chunks(), params, self.request_id, self._priority)
        self._inbox.put_nowait((prompt, params))
        ids: list[int] = []
        logprobs: list[float] = []
        async for output in self._stream:
            completion = output.outputs[0]
            tokens = completion.token_ids
            ids.extend(tokens)
            logprobs.extend(
                entry[token].logprob for entry, token in zip(completion.logprobs or (), tokens, strict=True)
            )
            if completion.finish_reason is None:
                continue
            if completion.finish_reason not in ("stop", "length") or not ids:
                raise EngineError(
                    f"the engine ended a turn with {completion.finish_reason!r}", where=self.request_id
                )
            start = self._sampled
            self._sampled += len(ids)
            versions = self._engine.versions_of(completion.weight_versions, start, self._sampled)
            finish: FinishReason = "stop" if completion.finish_reason == "stop" else "length"
            return tuple(ids), tuple(logprobs), versions, finish
        raise EngineError("the engine ended the session in the middle of a turn", where=self.request_id)

    async def _chunks(self) -> AsyncGenerator[Any, None]:
        from vllm.engine.protocol import StreamingInput

        while (item := await self._inbox.get()) is not None:
            prompt, params = item
            yield StreamingInput(prompt=prompt, sampling_params=params)
            self._engine.note_sent()  # vLLM asks for the next chunk once this one is on its way

    def _check_open(self) -> None:
        if self._ended is not None:
            raise EngineError(f"the session cannot be used: {self._ended}", where=self.request_id)
        if self._busy:
            raise EngineError("a turn of this session is still running", where=self.request_id)
        self._engine.check_alive()

    async def _kill(self, why: str) -> None:
        self._ended = why
        await self._abort()

    async def _abort(self) -> None:
        """Free KV and slot of a session that cannot end in good order; never raises."""
        stream = self._stream
        if stream is None:
            return
        await self._engine.abort(self.request_id)
        try:
            await stream.aclose()
        except (RuntimeError, Exception):  # vLLM's generator is being closed by its own abort
            return
