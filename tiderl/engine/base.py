"""What an inference engine is: the interface the rollout drives, free of vLLM and torch.

Invariants: token ids in, token ids out; a session's ids grow only by `generate`; every sampled token
carries its log-probability at temperature 1 and the policy version that made it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """How one turn is sampled. `temperature=0` is greedy; `seed` makes a turn reproducible."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True)
class TurnOutput:
    """One turn's sampled tokens; the three tuples have equal length (tokens)."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: FinishReason
    prompt_tokens: int
    """Length of the whole context when the turn began, in tokens."""
    cached_tokens: int
    """How many of `prompt_tokens` were served from KV, as the engine's scheduler counted."""


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine started, all counted inside the engine's scheduler."""

    version: int
    capacity_tokens: int
    free_tokens: int
    running: int
    held: int
    """Sessions that wait for their next turn and hold KV."""
    waiting: int
    preemptions: int
    prefill_tokens: int
    decode_tokens: int
    later_prompt_tokens: int
    """Prompt tokens over turns >= 2."""
    later_cached_tokens: int
    """Of those, tokens served from KV."""
    reprefilled_tokens: int
    """Tokens computed a second time in turns >= 2 (evicted, preempted or moved)."""

    @property
    def kv_hit_rate(self) -> float:
        """Prompt tokens served from KV / prompt tokens, over turns >= 2 (1.0 when there were none)."""
        if not self.later_prompt_tokens:
            return 1.0
        return self.later_cached_tokens / self.later_prompt_tokens


class KVSession(Protocol):
    """One episode's context in the engine, KV kept between turns."""

    @property
    def length(self) -> int:
        """Tokens of context so far (prompt, sampled and observation tokens)."""
        ...

    async def generate(
        self, new_ids: Sequence[int], sampling: Sampling, images: Sequence[np.ndarray] = ()
    ) -> TurnOutput:
        """Append `new_ids` to the context and sample one turn.

        Raises:
            PromptTooLong: context + new_ids + 1 would pass the reservation or the model's limit;
                nothing was sent to the engine and the session can still be closed.
            EngineError: the engine died or did not answer before the deadline.
        """
        ...


class Engine(Protocol):
    """An inference engine with resumable sessions and weights that can change while it runs."""

    max_model_len: int
    capacity_tokens: int
    max_sessions: int
    version: int

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def session(
        self, reserve_tokens: int, *, session_id: str | None = None, priority: int = 0
    ) -> AbstractAsyncContextManager[KVSession]:
        """Open a session with `reserve_tokens` of KV set aside for it (prompt + all turns).

        Entering waits for room; it can never deadlock, since the sum of reservations never passes
        the capacity. Leaving (also on error or cancellation) frees KV and slot.
        """
        ...

    async def publish(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> float:
        """Put new weights (names as in the model's own checkpoint) into the running engine.

        Sessions in flight go on with their old KV; their later tokens carry `version`. New sessions
        never read KV of older weights. Returns the seconds it took.
        """
        ...

    def stats(self) -> EngineStats: ...
