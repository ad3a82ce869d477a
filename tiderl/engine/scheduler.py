"""vLLM's scheduler, counting: what was computed, what came from KV, what was computed twice.

Invariant: every figure is taken from a decision vLLM's own scheduler has just made (`num_scheduled_tokens`,
`num_computed_tokens`), never from what we asked for. The scheduler also owns the cache salt: no request that
has computed nothing yet is ever scheduled under the salt of older weights.

Runs in the engine process. The request ids it sees are `slot~session~epoch-suffix` (see `session.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from tiderl.engine.counters import Cell, Counters

REMEMBERED_SESSIONS = 65536


@dataclass
class _Turns:
    """What the scheduler remembers of a live request."""

    session: str
    slot: int
    turn: int = 1
    fresh: bool = True
    """The turn's first step has not been scheduled yet."""
    later: bool = False
    """Turn >= 2, or the first turn of a session that was computed before under another request."""


def split_request_id(request_id: str) -> tuple[int, str]:
    """(slot, session) of a request id; slot -1 for a request that is not one of our sessions."""
    parts = request_id.split("~")
    if len(parts) != 3 or not parts[0].isdigit():
        return -1, request_id
    return int(parts[0]), parts[1]


class _Counting:
    """Mixed in before a vLLM scheduler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        me: Any = self
        options = me.vllm_config.additional_config
        self._table = Counters.open(options["tiderl_counters"], options["tiderl_slots"])
        self._turns: dict[str, _Turns] = {}
        self._highest: OrderedDict[str, int] = OrderedDict()
        self._salted_version = self._table[Cell.VERSION]
        table = self._table
        table[Cell.BLOCKS] = me.cache_config.num_gpu_blocks - 1
        table[Cell.BLOCK_SIZE] = me.block_size
        table[Cell.MAX_MODEL_LEN] = me.max_model_len
        table[Cell.MAX_SEQS] = me.max_num_running_reqs
        table[Cell.PREFIX_CACHING] = int(bool(me.cache_config.enable_prefix_caching))
        table[Cell.KV_GROUPS] = len(me.kv_cache_config.kv_cache_groups)
        self._gauges()

    # -- requests come and go

    def add_request(self, request: Request) -> None:
        me: Any = self
        if request.request_id not in me.requests:
            slot, session = split_request_id(request.request_id)
            self._turns[request.request_id] = _Turns(session, slot, later=session in self._highest)
            self._freshen_salt(request)
        super().add_request(request)  # type: ignore[misc]
        self._gauges()

    def _update_request_as_session(self, session: Request, update: Any) -> None:
        super()._update_request_as_session(session, update)  # type: ignore[misc]
        turns = self._turns[session.request_id]
        turns.turn += 1
        turns.fresh = turns.later = True
        self._clip(turns.session, session.num_computed_tokens)

    def _free_blocks(self, request: Request) -> None:
        super()._free_blocks(request)  # type: ignore[misc]
        self._turns.pop(request.request_id, None)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any:
        result = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        self._gauges()
        return result

    # -- steps

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self._table[Cell.VERSION] != self._salted_version:
            self._resalt()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if output.total_num_scheduled_tokens:
            self._count(output.num_scheduled_tokens)
        self._gauges()
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        result = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        self._gauges()
        return result

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(*args, **kwargs)  # type: ignore[misc]
        self._table[Cell.PREEMPTIONS] += 1

    def _count(self, scheduled: dict[str, int]) -> None:
        me: Any = self
        table = self._table
        prefill = decode = again = 0
        for request_id, count in scheduled.items():
            request = me.requests[request_id]
            turns = self._turns[request_id]
            start = request.num_computed_tokens - count
            end = request.num_computed_tokens
            part = min(count, max(0, request.num_prompt_tokens - start))
            prefill += part
            decode += count - part
            if turns.fresh:
                turns.fresh = False
                prompt = request.num_prompt_tokens
                if turns.slot >= 0:
                    table.set_turn(turns.slot, turns.turn, prompt, start)
                if turns.later:
                    table[Cell.LATER_PROMPT] += prompt
                    table[Cell.LATER_CACHED] += start
            if turns.slot < 0:
                continue
            highest = self._highest.get(turns.session, 0)
            if turns.later:
                again += max(0, min(end, highest) - start)
            if end > highest:
                self._highest[turns.session] = end
                self._highest.move_to_end(turns.session)
        while len(self._highest) > REMEMBERED_SESSIONS:
            self._highest.popitem(last=False)
        table[Cell.PREFILL] += prefill
        table[Cell.DECODE] += decode
        table[Cell.REPREFILLED] += again
        table[Cell.STEPS] += 1

    def _clip(self, session: str, computed: int) -> None:
        """A turn's speculative tail was dropped: those positions count as never computed."""
        if computed and self._highest.get(session, 0) > computed:
            self._highest[session] = computed

    def _gauges(self) -> None:
        me: Any = self
        table = self._table
        held = me.num_waiting_for_streaming_input
        table[Cell.FREE_BLOCKS] = me.kv_cache_manager.block_pool.get_num_free_blocks()
        table[Cell.RUNNING] = len(me.running)
        table[Cell.HELD] = held
        table[Cell.WAITING] = len(me.waiting) + len(me.kv_holding_waiting) - held

    # -- order and salt

    def set_pause_state(self, pause_state: PauseState) -> None:
        """On resume, requests gathered while paused start in the order of their ids, not of their arrival.

        Batch rows then depend on nothing but the ids, so float rounding is the same in every run.
        """
        me: Any = self
        if pause_state == PauseState.UNPAUSED and me.pause_state == PauseState.PAUSED_ALL:
            for queue in (me.waiting, me.kv_holding_waiting):
                ordered = sorted(queue, key=lambda r: (r.priority, split_request_id(r.request_id)[1]))
                queue.remove_requests(ordered)
                for rank, request in enumerate(ordered):
                    request.arrival_time = float(rank)
                    queue.add_request(request)
        super().set_pause_state(pause_state)  # type: ignore[misc]

    def _resalt(self) -> None:
        """Weights changed: whoever has computed nothing yet moves to the new version's cache."""
        me: Any = self
        self._salted_version = self._table[Cell.VERSION]
        for request in me.requests.values():
            if request.num_computed_tokens == 0 and request.num_output_tokens == 0:
                self._freshen_salt(request)

    def _freshen_salt(self, request: Request) -> None:
        salt = f"v{self._table[Cell.VERSION]}"
        if request.cache_salt is not None and request.cache_salt != salt:
            request.cache_salt = salt
            request.block_hashes.clear()
            request.update_block_hashes()


class CountingScheduler(_Counting, Scheduler):
    """For engines that schedule step by step (CPU)."""


class CountingAsyncScheduler(_Counting, AsyncScheduler):
    """For engines that schedule one step ahead (GPU)."""
