"""The engine on vLLM 0.32: resumable sessions, weights that change while it runs, counters without RPC.

Invariants: the reservations of open sessions never pass the KV cache; every wait has a deadline; when the
engine process dies, everybody who waits for it gets an `EngineError` that says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import shutil
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from tiderl.engine import launch
from tiderl.engine.base import Audit, EngineStats, PublishMode, Replay, Sampling
from tiderl.engine.budget import KVBudget, Lease
from tiderl.engine.checkpoint import Checkpoint, read_checkpoint
from tiderl.engine.counters import Cell, Counters, TurnCounts
from tiderl.engine.figures import audit_of, check_effective, stats_of
from tiderl.engine.loading import load_weights
from tiderl.engine.log import EngineLog
from tiderl.engine.pause import PauseGate, Turns, to_its_end
from tiderl.engine.publish import offered_weights
from tiderl.engine.requests import render_prompt, sampling_params, token_versions
from tiderl.engine.session import VLLMSession
from tiderl.engine.settings import EngineSettings
from tiderl.engine.stream import ResumableRequest
from tiderl.engine.task_session import VLLMTaskSession
from tiderl.errors import EngineError, TideError

if TYPE_CHECKING:
    import numpy as np
    import torch

T = TypeVar("T")

_SMALL_CALL = 30.0
"""Seconds a control call (pause, resume, version) may take."""


class VLLMEngine:
    """An `Engine` (see `tiderl.engine.base`) in a vLLM process of its own.

    `async with VLLMEngine(settings) as engine:` starts and closes it.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.max_model_len = settings.max_model_len
        self.capacity_tokens = settings.kv_blocks * settings.block_size
        self.max_sessions = settings.max_sessions
        self.version = 0
        self.vocabulary = 0
        self.start_seconds: dict[str, float] = {}
        """Seconds of `import` (vLLM into this process) and `construct` (all after that)."""
        self.gate = PauseGate(self._pause, self._resume, self.check_alive)
        self.idle: set[ResumableRequest] = set()
        """Requests that hold KV between two turns."""
        self.oldest_kv = 0
        """No KV in the engine was computed with weights older than this version (see mode `recompute`)."""
        self._llm: Any = None
        self._counters: Counters | None = None
        self._budget: KVBudget | None = None
        self._checkpoint: Checkpoint | None = None
        self._log = EngineLog(settings.log_file)
        self._folder = ""
        self._gpu = ""
        self._error: EngineError | None = None
        self._closed = False
        self._publish_lock = asyncio.Lock()
        self._epoch = 0

    async def __aenter__(self) -> VLLMEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- life

    async def start(self) -> None:
        """Start the engine process and check that it runs what was asked for.

        Raises:
            ModelError: the folder is not a usable checkpoint.
            EngineError: vLLM did not come up, or came up with another configuration.
            MissingExtra: vLLM is not installed.
        """
        if self._counters is not None or self._closed:
            raise EngineError("the engine was started before", fix="make a new VLLMEngine")
        self._checkpoint = checkpoint = read_checkpoint(self.settings.model, self.settings.max_model_len)
        self.vocabulary = checkpoint.vocabulary
        self._log.open()
        self._folder = folder = launch.make_folder()
        self._counters = counters = Counters.create(self.settings.max_sessions)
        try:
            began = time.monotonic()
            timeout, log = self.settings.start_timeout, self._log
            await launch.started(lambda: launch.import_vllm(checkpoint.architecture), timeout, log)
            imported = time.monotonic()
            self._llm = await launch.started(
                lambda: launch.build(self.settings, counters, log.path, folder), timeout, log
            )
            await self.call(self._prepare(), self.settings.start_timeout)
            self.start_seconds = {"import": imported - began, "construct": time.monotonic() - imported}
            check_effective(self.settings, counters)
            # What was imported and built stays: a collector that scans it again and again takes 7 % of the
            # time of the process that prepares every turn.
            gc.unfreeze()  # what an engine before this one left behind is collected
            gc.collect()
            gc.freeze()
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(self.close()))
            raise
        self._budget = KVBudget(
            counters[Cell.BLOCKS],
            self.settings.max_sessions,
            counters[Cell.BLOCK_SIZE],
            max(1, counters[Cell.KV_GROUPS]),
        )
        self.capacity_tokens = self._budget.capacity_tokens

    async def close(self) -> None:
        """End the engine process and give its memory back; open sessions fail. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        gc.unfreeze()
        self.fail(EngineError("the engine was closed"))
        llm, self._llm = self._llm, None
        if llm is not None:
            launch.wake_all(llm)
            await asyncio.to_thread(launch.end, llm)
        elif self._counters is not None:
            launch.kill_group(self._counters[Cell.PID])
        if self._counters is not None:
            self._counters.close()
            self._counters = None
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._log.close()

    async def _prepare(self) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
        await self._llm.update_weight_version("0")
        await self._llm.get_supported_tasks()
        if self.settings.weight_route == "auto":
            self._gpu = ",".join(await self._llm.collective_rpc("gpu_uuid"))  # several ranks: none matches

    # -- sessions

    @contextlib.asynccontextmanager
    async def session(
        self, reserve_tokens: int, *, session_id: str | None = None, priority: int = 0
    ) -> AsyncIterator[VLLMSession]:
        """Open a session; see `tiderl.engine.base.Engine.session`.

        A reservation above `max_model_len` is cut to it. `session_id` names the episode: when it is opened
        again under the same name (its KV was lost), tokens computed a second time count as re-prefilled.
        Lower `priority` is served first.

        Raises:
            PromptTooLong: the reservation is larger than the whole KV cache.
            Busy: no room within `settings.admission_timeout`.
            EngineError: the engine is not running or died.
        """
        self.check_alive()
        name = _checked_name(session_id or uuid.uuid4().hex[:12])
        lease = await self.budget.acquire(
            min(reserve_tokens, self.max_model_len),
            priority=priority,
            timeout=self.settings.admission_timeout,
        )
        session = VLLMSession(self, lease, name, self.next_epoch(), priority)
        try:
            yield session
        finally:
            # A second cancellation must not leave KV or slot behind.
            await to_its_end(self._end(session, lease))

    async def _end(self, session: VLLMSession, lease: Lease) -> None:
        try:
            await session.close()
        except Exception as error:
            # An alive engine frees on abort, which close() has sent; a dead one holds nothing.
            if not self.dead:
                raise self.failure(error) from error
        finally:
            self.budget.release(lease)

    @contextlib.asynccontextmanager
    async def task_session(
        self, *, session_id: str, priority: int = 0, replay: Replay | None = None
    ) -> AsyncIterator[VLLMTaskSession]:
        """Open a session that leases its KV turn by turn; see `tiderl.engine.base.Engine.task_session`.

        Raises:
            EngineError: the engine is not running or died.
        """
        self.check_alive()
        session = VLLMTaskSession(self, _checked_name(session_id), priority, replay)
        try:
            yield session
        finally:
            await to_its_end(session.close())

    # -- what a session needs of its engine

    @property
    def budget(self) -> KVBudget:
        """What is promised to whom. Raises EngineError before the engine runs."""
        if self._budget is None:
            raise EngineError("the engine is not running", fix="await engine.start() first")
        return self._budget

    @property
    def dead(self) -> bool:
        """The engine process has ended, or was never there."""
        return self._llm is None or bool(self._llm.errored)

    def next_epoch(self) -> int:
        """A number no other request of this engine has."""
        self._epoch += 1
        return self._epoch

    async def render(
        self, ids: list[int], images: Sequence[np.ndarray], salt: int | None = None
    ) -> tuple[Any, int]:
        """See `render_prompt`; `salt` is the version whose KV may be read, None: the present one."""
        try:
            return await render_prompt(self._llm, ids, images, f"v{self.version if salt is None else salt}")
        except TideError:
            raise
        except Exception as error:
            raise self.failure(error) from error

    def params(self, sampling: Sampling, max_tokens: int) -> Any:
        """See `sampling_params`."""
        assert self._checkpoint is not None
        return sampling_params(sampling, max_tokens, self._checkpoint.eos)

    def open_stream(
        self, chunks: AsyncGenerator[Any, None], params: Any, request_id: str, priority: int
    ) -> AsyncGenerator[Any, None]:
        """Start the resumable request of a session."""
        return self._llm.generate(chunks, params, request_id, priority=priority)

    def versions_of(self, spans: Any, start: int, end: int) -> tuple[int, ...]:
        """See `token_versions`."""
        return token_versions(spans, start, end, self.version)

    def turn_counts(self, slot: int) -> TurnCounts:
        """A slot's latest turn, as the scheduler counted."""
        self.check_alive()
        assert self._counters is not None
        return self._counters.turn(slot)

    async def abort(self, request_id: str) -> None:
        """Abort a request; quiet when the engine is dead, since it then holds nothing."""
        if not self.dead:
            with contextlib.suppress(EngineError):
                await self.call(self._llm.abort(request_id))

    def check_alive(self) -> None:
        """Raise the EngineError that ended the engine, if one did."""
        if self._error is None and self._llm is not None and self._llm.errored:
            self.failure(RuntimeError("the engine process has ended"))
        if self._error is not None:
            raise EngineError(self._error.what, where=self._error.where, fix=self._error.fix)
        if self._llm is None:
            raise EngineError("the engine is not running", fix="await engine.start() first")

    def failure(self, error: BaseException) -> EngineError:
        """The EngineError for `error`; when the engine is dead it ends all sessions."""
        if self._error is None and self._llm is not None and self._llm.errored:
            self.fail(
                EngineError(
                    f"the engine process died, {launch.exit_of(self._llm)}; {self._log.cause()}",
                    fix="start a new engine",
                )
            )
        if self._error is not None:
            return EngineError(self._error.what, where=self._error.where, fix=self._error.fix)
        return EngineError(f"the engine refused a request: {launch.first_line(error.__cause__ or error)}")

    def fail(self, error: EngineError) -> None:
        """The engine cannot be used any more: everybody who uses it, now or later, gets `error`."""
        if self._error is None:
            self._error = error
        if self._budget is not None:
            self._budget.fail(self._error)

    async def call(self, work: Coroutine[Any, Any, T], timeout: float = _SMALL_CALL) -> T:
        """A control call with a deadline; its errors become EngineErrors."""
        try:
            async with asyncio.timeout(timeout):
                return await work
        except TimeoutError as error:
            raise EngineError(f"the engine did not answer within {timeout:.0f} s") from error
        except TideError:
            raise
        except Exception as error:
            raise self.failure(error) from error

    # -- pause, lockstep, weights

    async def _pause(self) -> None:
        self.check_alive()
        await self.call(self._llm.pause_generation(mode="keep", clear_cache=False))

    async def _resume(self) -> None:
        if not self.dead:
            await self.call(self._llm.resume_generation())

    def hold(self, turns: Turns = None) -> AbstractAsyncContextManager[None]:
        """Gather turns and start them in one engine step, in the order of their session ids.

        Start the turns as tasks inside the block and leave it without awaiting them: leaving waits until
        `turns` of them (None: all that have begun; a function: as many as it says) have reached the engine
        or failed on the way. The engine then sees the same batches in every run, so equal seeds give equal
        tokens and log-probs bit for bit.
        """
        # Half of it: held turns whose company never comes must still run before their own deadline.
        return self.gate.hold(turns, self.settings.turn_timeout / 2)

    async def publish(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int, mode: PublishMode = "keep"
    ) -> float:
        """Put new weights into the running engine; see `tiderl.engine.base.Engine.publish`.

        Tensors that are not sent keep their values exactly. The iterable is consumed in a worker thread
        while sessions go on; they are paused only for the load.

        Raises:
            EngineError: a name, shape or value is wrong, `version` is not above the current one, or a session
                is held in mode `recompute` (nothing has changed then); or the engine died, or failed
                half-way, and cannot be used any more.
        """
        began = time.monotonic()
        async with self._publish_lock:
            self.check_alive()
            if version <= self.version:
                raise EngineError(
                    f"version {version} is not above the engine's {self.version}", where="publish"
                )
            assert self._checkpoint is not None
            async with offered_weights(
                weights,
                self._checkpoint,
                self.settings.dtype,
                gpu=self._gpu,
                timeout=self.settings.publish_timeout,
            ) as told:
                assert self._counters is not None
                await to_its_end(load_weights(self, self._llm, self._counters, told, version, mode))
        return time.monotonic() - began

    # -- figures, read from shared memory without a call into the engine

    @property
    def promised_tokens(self) -> int:
        """Tokens of KV in all leases, in whole blocks."""
        return self.budget.promised_tokens

    @property
    def open_slots(self) -> int:
        """Sessions that could still be given a slot."""
        return self.budget.open_slots

    def stats(self) -> EngineStats:
        """The scheduler's counters."""
        return stats_of(self.cells, self.budget, self.version)

    @property
    def prefill_s(self) -> float:
        """Seconds a prompt token adds to a step; 0.0 until enough were computed."""
        return self.cells[Cell.PREFILL_NS] / 1e9

    def audit(self) -> Audit:
        """Our promises beside what the scheduler says it holds."""
        return audit_of(self.cells, self.budget, len(self.idle))

    @property
    def cells(self) -> Counters:
        """The table the scheduler writes. Raises EngineError when the engine does not run."""
        if self._counters is None:
            raise EngineError("the engine is not running")
        return self._counters


def _checked_name(name: str) -> str:
    if "~" in name:
        raise EngineError(f"the session id {name!r} holds a '~'", fix="leave it out")
    return name
