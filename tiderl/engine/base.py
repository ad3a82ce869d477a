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
PublishMode = Literal["keep", "recompute"]


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
    new_tokens: int = 0
    """Of `prompt_tokens`, those that had never been computed before: what this turn brought, images included,
    and the last token sampled before it."""
    reprefilled: int = 0
    """Tokens computed a second time in this turn, as the scheduler counted: `prompt_tokens - cached_tokens -
    new_tokens` (never below 0), and what new weights in mode `recompute` made it compute again."""
    kv_version: int = -1
    """The oldest policy version that KV of the context was computed with, or an older one where that is not
    known. Where it is a token's own version, that token was sampled from KV of that version alone."""
    prefill_seconds: float = 0.0
    """From the turn's first step in the engine until its prompt was computed and its first token sampled."""
    queue_seconds: float = 0.0
    """From the turn's arrival in the engine to its first step."""


@dataclass(frozen=True)
class Replay:
    """The context of a session, complete: with it any engine can go on."""

    ids: tuple[int, ...]
    """All ids in order, one placeholder for each image, sampled ones up to the last included."""
    images: tuple[np.ndarray, ...] = ()
    turns: int = 0
    """Turns sampled so far."""
    version: int = -1
    """KV found in a prefix cache may be as old as this policy version; -1: no older than the turn's own."""
    length: int = 0
    """Tokens of `ids` with every image expanded; 0 where that is not known."""


@dataclass(frozen=True)
class Audit:
    """What was promised by us against what the engine's scheduler says it holds, read at the same moment.

    Messages to and from the engine take a moment: `consistent` is certain only while nothing is under way.
    """

    promised_tokens: int
    """Whole blocks in all leases."""
    used_tokens: int
    """Whole blocks that requests hold; a block they share counts once, the prefix cache's are free."""
    sessions: int
    """Leases."""
    held_here: int
    """Sessions that hold KV between two turns."""
    held_there: int
    running_there: int
    """Turns that were sent and have not ended."""

    @property
    def consistent(self) -> bool:
        """No more is used than was promised, and both sides hold the same sessions."""
        return (
            self.used_tokens <= self.promised_tokens
            and self.held_here == self.held_there
            and self.held_there + self.running_there <= self.sessions
        )


@dataclass(frozen=True)
class StepCost:
    """Seconds an engine step takes; all 0.0 until enough of them were seen."""

    step: float = 0.0
    """Whatever is in it."""
    decode: float = 0.0
    """More for a sampled token."""
    prefill: float = 0.0
    """More for a prompt token."""


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
    """Tokens computed a second time: in turns >= 2 (evicted, preempted or moved), and in any turn that new
    weights in mode `recompute` made start again."""
    evicted_tokens: int = 0
    """Tokens of KV that the prefix cache gave up to make room, in whole blocks."""
    cost: StepCost = StepCost()
    """What a step takes, over the last hundreds of them."""

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


class TaskSession(KVSession, Protocol):
    """A session whose KV is leased turn by turn: it can be let go between turns, and replayed.

    KV is only a cache: ids, log-probs and versions of a turn are the same whether the context was held, found
    in the prefix cache, or computed again, here or on another engine.
    """

    @property
    def held(self) -> bool:
        """A live request holds its blocks and a slot in the engine."""
        ...

    @property
    def promised_tokens(self) -> int:
        """Tokens of KV leased now, in whole blocks; 0 when nothing is held and no turn runs."""
        ...

    async def generate(
        self, new_ids: Sequence[int], sampling: Sampling, images: Sequence[np.ndarray] = ()
    ) -> TurnOutput:
        """Append `new_ids` to the context and sample one turn; see `KVSession.generate`.

        Leases KV for the context and all of `sampling.max_tokens` (cut to the model's limit), and a slot when
        none is held; never waits for them. After the turn the lease shrinks to the context and stays held.
        A turn that fails or is cancelled leaves the session as it was before it, with nothing held.

        Raises:
            Busy: there is no room now; nothing was sent and the session is as before.
        """
        ...

    async def release(self, *, fresh: bool = False) -> None:
        """Let the KV go: whole blocks to the prefix cache, slot and lease to others. Quiet when not held.

        Args:
            fresh: the next turn must not read KV of weights older than the engine's are then. Without it, it
                may read what this session left (also KV of older weights: mode `keep`).

        Raises:
            EngineError: a turn is running.
        """
        ...

    def snapshot(self) -> Replay:
        """The context up to the last turn that ended, to go on with it on another engine."""
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

    def task_session(
        self, *, session_id: str, priority: int = 0, replay: Replay | None = None
    ) -> AbstractAsyncContextManager[TaskSession]:
        """Open a session that leases its KV turn by turn. Entering takes nothing and never waits.

        Leaving (also on error or cancellation) frees what is held. `replay`: go on with this context.
        """
        ...

    async def publish(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int, mode: PublishMode = "keep"
    ) -> float:
        """Put new weights (names as in the model's own checkpoint) into the running engine.

        `keep`: sessions in flight go on with their old KV; their later tokens carry `version`.
        `recompute`: running turns compute their context again with the new weights and no KV of older ones is
        left; sessions must have been released before. In both modes new sessions never read KV of older
        weights. Returns the seconds it took.

        Raises:
            EngineError: a session is held (`recompute`), or the weights do not fit; nothing has changed then.
        """
        ...

    def stats(self) -> EngineStats: ...

    def audit(self) -> Audit: ...
