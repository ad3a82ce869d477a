"""One resumable request inside vLLM: several turns, its KV kept between them.

Invariants: a chunk is sent only when the turn before it has ended; a request that failed, timed out or was
cancelled is aborted and never fed again; whatever happens, once `end` or `abort` has returned, the engine
gives blocks and slot back before it reads anything sent later.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiderl.engine.base import FinishReason
from tiderl.engine.naming import RequestName
from tiderl.errors import EngineError

if TYPE_CHECKING:
    from tiderl.engine.vllm import VLLMEngine

_END_TIMEOUT = 10.0


@dataclass(frozen=True)
class Sampled:
    """What one turn sampled; the tuples have equal length."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: FinishReason


class ResumableRequest:
    """Made by a session for as long as it holds KV in the engine."""

    def __init__(self, engine: VLLMEngine, name: RequestName, priority: int) -> None:
        self.name = name
        self.id = str(name)
        self._engine = engine
        self._priority = priority
        self._sampled = 0
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._stream: AsyncGenerator[Any, None] | None = None
        self._over = False

    async def turn(self, prompt: Any, params: Any, note_sent: Callable[[], None]) -> Sampled:
        """Send a chunk and read what is sampled after it.

        Raises:
            EngineError: the engine ended the turn in another way than a turn ends. Also what vLLM raises.
        """
        where = f"session {self.name.session}"
        self._engine.idle.discard(self)
        if self._stream is None:
            self._stream = self._engine.open_stream(self._chunks(), params, self.id, self._priority)
        self._inbox.put_nowait((prompt, params, note_sent))
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
                raise EngineError(f"the engine ended a turn with {completion.finish_reason!r}", where=where)
            start = self._sampled
            self._sampled += len(ids)
            versions = self._engine.versions_of(completion.weight_versions, start, self._sampled)
            self._engine.idle.add(self)
            finish: FinishReason = "stop" if completion.finish_reason == "stop" else "length"
            return Sampled(tuple(ids), tuple(logprobs), versions, finish)
        self._engine.check_alive()
        raise EngineError("the engine ended the session in the middle of a turn", where=where)

    async def end(self) -> None:
        """End it between two turns: what it computed goes to the prefix cache.

        Raises:
            EngineError: the engine did not take it. Also what vLLM raises, when the engine is dead.
        """
        self._engine.idle.discard(self)
        if self._over or self._stream is None:
            self._over = True
            return
        self._inbox.put_nowait(None)
        try:
            async with asyncio.timeout(_END_TIMEOUT):
                async for _ in self._stream:
                    pass
            self._over = True
        finally:
            if not self._over:
                await self.abort()

    async def abort(self) -> None:
        """End it wherever it is."""
        self._engine.idle.discard(self)
        if self._over or self._stream is None:
            self._over = True
            return
        await self._engine.abort(self.id)
        self._over = True
        try:
            await self._stream.aclose()
        except Exception:  # noqa: BLE001  # vLLM's generator ends with whatever its abort made of it
            return

    async def _chunks(self) -> AsyncGenerator[Any, None]:
        from vllm.engine.protocol import StreamingInput

        while (chunk := await self._inbox.get()) is not None:
            prompt, params, note_sent = chunk
            yield StreamingInput(prompt=prompt, sampling_params=params)
            note_sent()  # vLLM asks for the next chunk once this one is on its way
