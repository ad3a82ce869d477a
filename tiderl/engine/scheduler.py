"""vLLM's scheduler, counting: what was computed, what came from KV, what was computed twice, and when.

Invariant: every figure is taken from a decision vLLM's own scheduler has just made (`num_scheduled_tokens`,
`num_computed_tokens`), never from what we asked for. The scheduler also owns the cache salt: a request that
has no KV yet is scheduled under the salt of the present weights. The one exception is a session that was let
go and may go on from its own older KV: it keeps its salt as long as something is found there. KV under a salt
is never of older weights than that salt, so no other request can ever read any.

Runs in the engine process.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from tiderl.engine.counters import Cell, Counters, SlotCell
from tiderl.engine.naming import RequestName
from tiderl.engine.step_cost import StepCosts

REMEMBERED_SESSIONS = 65536
_TELL_STEPS = 16
_COST_CELLS = (Cell.STEP_NS, Cell.DECODE_NS, Cell.PREFILL_NS)


@dataclass
class _Turns:
    """What the scheduler remembers of a live request."""

    session: str
    slot: int
    turn: int
    highest: int
    """Tokens of this context that were computed at some time."""
    later: bool
    """Turn >= 2, or the first turn of a session that was computed before under another request."""
    kept: bool
    """Its salt stays as it is, though it may be of older weights."""
    arrived: int
    told: bool
    """The parent has told turn and `highest`; else the scheduler remembers them by the session's name."""
    fresh: bool = True
    """The turn's first step has not been scheduled yet."""
    prefilling: bool = True
    again: bool = False
    """It was preempted: whatever is computed below `highest` is computed a second time."""
    based: bool = False
    """It has KV, of which the oldest is of `kv_version`."""
    kv_version: int = -1


@dataclass(frozen=True)
class _Step:
    """A step under way: when it was scheduled (us), its tokens, and the slots whose prompts it completes."""

    at: int = 0
    prefill: int = 0
    decode: int = 0
    completed: Sequence[int] = ()


def _now() -> int:
    return time.monotonic_ns() // 1000


def _salt_version(request: Request) -> int:
    """The version a request's salt names; -1 for a request that is none of ours."""
    salt = request.cache_salt
    return int(salt[1:]) if salt is not None and salt[1:].isdigit() else -1


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
        self._under_way: deque[_Step] = deque()
        """Oldest first."""
        self._costs, self._stepped = StepCosts(), 0
        self._resetting = False
        self._evicted = 0
        self._count_evictions()
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
            self._turns[request.request_id] = turns = self._known(request)
            if not turns.kept or _salt_version(request) > self._table[Cell.VERSION]:
                # KV of weights that another engine already had and this one has not must not be claimed.
                turns.kept = False
                self._freshen_salt(request)
        super().add_request(request)  # type: ignore[misc]
        self._gauges()

    def _known(self, request: Request) -> _Turns:
        name = RequestName.parse(request.request_id)
        if name is None:
            return _Turns(request.request_id, -1, 1, 0, False, False, _now(), True)
        if name.turn:
            later = name.turn > 1
            return _Turns(name.session, name.slot, name.turn, name.known, later, name.kept, _now(), True)
        later, highest = name.session in self._highest, self._highest.get(name.session, 0)
        return _Turns(name.session, name.slot, 1, highest, later, False, _now(), False)

    def _update_request_as_session(self, session: Request, update: Any) -> None:
        super()._update_request_as_session(session, update)  # type: ignore[misc]
        turns = self._turns[session.request_id]
        turns.turn += 1
        turns.fresh = turns.later = turns.prefilling = True
        turns.arrived = _now()
        if computed := session.num_computed_tokens:
            turns.highest = min(turns.highest, computed)  # a speculative tail was never computed

    def _free_blocks(self, request: Request) -> None:
        super()._free_blocks(request)  # type: ignore[misc]
        turns = self._turns.pop(request.request_id, None)
        if turns is not None and not turns.told and turns.highest:
            self._highest[turns.session] = max(turns.highest, self._highest.get(turns.session, 0))
            self._highest.move_to_end(turns.session)
            while len(self._highest) > REMEMBERED_SESSIONS:
                self._highest.popitem(last=False)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any:
        result = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        self._gauges()
        return result

    # -- steps

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self._table[Cell.VERSION] != self._salted_version:
            self._resalt()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self._send_images_again(output)
        self._under_way.append(
            self._count(output.num_scheduled_tokens) if output.total_num_scheduled_tokens else _Step()
        )
        self._gauges()
        return output

    def _send_images_again(self, output: Any) -> None:
        """vLLM sent the worker no pixels of images whose KV was there; a preempted request needs them."""
        me: Any = self
        resumed = [me.requests[i] for i in output.scheduled_cached_reqs.resumed_req_ids]
        if features := {r.request_id: r.mm_features for r in resumed if r.mm_features}:
            output.tiderl_mm_features = features

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        now = _now()
        step = self._under_way.popleft() if self._under_way else _Step()
        for slot in step.completed:
            self._table.note(slot, SlotCell.PREFILLED, now)
        if step.prefill or step.decode:
            self._measure(step, now)
        result = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        self._gauges()
        return result

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]
        turns = self._turns[request.request_id]
        turns.based, turns.again = False, True
        if not self._resetting:
            self._table[Cell.PREEMPTIONS] += 1

    def _measure(self, step: _Step, now: int) -> None:
        """A step is done: it began when it was scheduled, or when the one before it was done."""
        table, began, self._stepped = self._table, max(step.at, self._stepped), now
        self._costs.saw((now - began) / 1e6, step.decode, step.prefill)
        if table[Cell.STEPS] % _TELL_STEPS == 0:
            cost = self._costs.cost()
            for cell, seconds in zip(_COST_CELLS, (cost.step, cost.decode, cost.prefill), strict=True):
                table[cell] = round(seconds * 1e9)

    def _count(self, scheduled: dict[str, int]) -> _Step:
        """Count one step."""
        me: Any = self
        table = self._table
        prefill = decode = again = 0
        completed = []
        for request_id, count in scheduled.items():
            request = me.requests[request_id]
            turns = self._turns[request_id]
            end, prompt = request.num_computed_tokens, request.num_prompt_tokens
            start = end - count
            part = min(count, max(0, prompt - start))
            prefill += part
            decode += count - part
            if turns.slot < 0:
                continue
            if not turns.based or turns.fresh:
                self._begin(request, turns, start)
            if (turns.later or turns.again) and start < turns.highest:
                twice = min(end, turns.highest) - start
                again += twice
                table.add(turns.slot, SlotCell.AGAIN, twice)
            turns.highest = max(turns.highest, end)
            if turns.prefilling and end >= prompt:
                turns.prefilling = False
                completed.append(turns.slot)
        table[Cell.PREFILL] += prefill
        table[Cell.DECODE] += decode
        table[Cell.REPREFILLED] += again
        table[Cell.STEPS] += 1
        return _Step(_now(), prefill, decode, completed)

    def _begin(self, request: Request, turns: _Turns, start: int) -> None:
        """A turn's first step, or the first one after a preemption."""
        table, salt = self._table, _salt_version(request)
        if not turns.based:
            turns.based = True
            turns.kv_version = salt if start else table[Cell.VERSION]
        if turns.fresh:
            turns.fresh = False
            prompt = request.num_prompt_tokens
            table.note(turns.slot, SlotCell.TURN, turns.turn, prompt, start, 0)
            table.note(turns.slot, SlotCell.ARRIVED, turns.arrived, _now(), 0)
            if turns.later:
                table[Cell.LATER_PROMPT] += prompt
                table[Cell.LATER_CACHED] += start
        table.note(turns.slot, SlotCell.KV_VERSION, turns.kv_version, salt)

    def _count_evictions(self) -> None:
        me: Any = self
        pool = me.kv_cache_manager.block_pool
        evict = pool._maybe_evict_cached_block

        def counted(block: Any) -> bool:
            evicted: bool = evict(block)
            self._evicted += evicted
            return evicted

        pool._maybe_evict_cached_block = counted

    def _gauges(self) -> None:
        me: Any = self
        table = self._table
        held = me.num_waiting_for_streaming_input
        table[Cell.FREE_BLOCKS] = me.kv_cache_manager.block_pool.get_num_free_blocks()
        table[Cell.RUNNING] = len(me.running)
        table[Cell.HELD] = held
        table[Cell.WAITING] = len(me.waiting) + len(me.kv_holding_waiting) - held
        table[Cell.EVICTED] = self._evicted

    # -- order and salt

    def set_pause_state(self, pause_state: PauseState) -> None:
        """On resume, requests gathered while paused start in the order of their ids, not of their arrival.

        Batch rows then depend on nothing but the ids, so float rounding is the same in every run.
        """
        me: Any = self
        if pause_state == PauseState.UNPAUSED and me.pause_state == PauseState.PAUSED_ALL:
            for queue in (me.waiting, me.kv_holding_waiting):
                ordered = sorted(queue, key=lambda r: (r.priority, self._turns[r.request_id].session))
                queue.remove_requests(ordered)
                for rank, request in enumerate(ordered):
                    request.arrival_time = float(rank)
                    queue.add_request(request)
        super().set_pause_state(pause_state)  # type: ignore[misc]

    def reset_prefix_cache(self, reset_running_requests: bool = False, *args: Any, **kwargs: Any) -> bool:
        """Also preempts what vLLM forgets: turns before their first step that hold KV of earlier turns."""
        me: Any = self
        self._resetting = reset_running_requests
        try:
            if reset_running_requests:
                waiting = [r for r in me.kv_holding_waiting if r.status == RequestStatus.WAITING]
                me.kv_holding_waiting.remove_requests(waiting)
                for request in waiting:
                    me.deferred_waiting.discard(request)
                    request.status = RequestStatus.RUNNING
                    me._preempt_request(request, time.monotonic(), drop_stale_output=True)
                    request.status = RequestStatus.WAITING  # the worker has not seen its new prompt yet
            done: bool = super().reset_prefix_cache(reset_running_requests, *args, **kwargs)  # type: ignore[misc]
        finally:
            self._resetting = False
            self._gauges()
        if done:
            for turns in self._turns.values():
                turns.kept = False  # there is nothing left to keep it for
        return done

    def _get_local_prefix_cache_hit(self, request: Request) -> Any:
        hit = super()._get_local_prefix_cache_hit(request)  # type: ignore[misc]
        turns = self._turns[request.request_id]
        if turns.kept and hit[1] == 0:  # all of its own KV is gone: go on as new sessions do
            turns.kept = False
            if self._freshen_salt(request):
                hit = super()._get_local_prefix_cache_hit(request)  # type: ignore[misc]
        return hit

    def _resalt(self) -> None:
        """Weights changed: whoever has no KV moves to the new version's cache."""
        me: Any = self
        self._salted_version = self._table[Cell.VERSION]
        for request_id, request in me.requests.items():
            if request.num_computed_tokens == 0 and not self._turns[request_id].kept:
                self._freshen_salt(request)

    def _freshen_salt(self, request: Request) -> bool:
        """Put a request under the salt of the present weights; True when that is another one."""
        salt = f"v{self._table[Cell.VERSION]}"
        if request.cache_salt is None or request.cache_salt == salt:
            return False
        request.cache_salt = salt
        request.block_hashes.clear()
        request.update_block_hashes()
        return True


class CountingScheduler(_Counting, Scheduler):
    """For engines that schedule step by step (CPU)."""


class CountingAsyncScheduler(_Counting, AsyncScheduler):
    """For engines that schedule one step ahead (GPU)."""
