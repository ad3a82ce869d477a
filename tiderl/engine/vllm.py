"""The engine on vLLM 0.32: resumable sessions, weights that change while it runs, counters without RPC.

Invariants: the reservations of open sessions never pass the KV cache; every wait has a deadline; when the
engine process dies, everybody who waits for it gets an `EngineError` that says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from tiderl.engine import launch
from tiderl.engine.base import EngineStats, Sampling
from tiderl.engine.budget import KVBudget, Lease
from tiderl.engine.checkpoint import Checkpoint, read_checkpoint
from tiderl.engine.counters import Cell, Counters
from tiderl.engine.log import EngineLog
from tiderl.engine.pause import PauseGate, to_its_end
from tiderl.engine.publish import offered_weights
from tiderl.engine.requests import render_prompt, sampling_params, token_versions
from tiderl.engine.session import VLLMSession
from tiderl.engine.settings import EngineSettings
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
            await self._build(lambda: launch.import_vllm(checkpoint.architecture))
            imported = time.monotonic()
            self._llm = await self._build(
                lambda: launch.build(self.settings, counters, self._log.path, folder)
            )
            await self._call(self._prepare(), self.settings.start_timeout)
            self.start_seconds = {"import": imported - began, "construct": time.monotonic() - imported}
            self._check_effective(counters)
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
        self._fail(EngineError("the engine was closed"))
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

    async def _build(self, work: Any) -> Any:
        """Run a part of the start in a thread made for it; past the deadline kill what it waits for."""
        waiting = asyncio.ensure_future(asyncio.to_thread(launch.in_fresh_thread(work)))
        try:
            return await asyncio.wait_for(asyncio.shield(waiting), self.settings.start_timeout)
        except (TimeoutError, asyncio.CancelledError) as error:
            waiting.add_done_callback(launch.end_when_built)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise EngineError(
                f"the engine was not up after {self.settings.start_timeout:.0f} s; {self._log.cause()}",
                where="engine start",
                fix="raise engine.start_timeout",
            ) from error
        except TideError:
            raise
        except Exception as error:
            raise EngineError(
                f"the engine did not start: {launch.first_line(error)}; {self._log.cause()}",
                where="engine start",
            ) from error

    async def _prepare(self) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
        await self._llm.update_weight_version("0")
        await self._llm.get_supported_tasks()
        if self.settings.weight_route == "auto":
            self._gpu = ",".join(await self._llm.collective_rpc("gpu_uuid"))  # several ranks: none matches

    def _check_effective(self, counters: Counters) -> None:
        """Compare what the scheduler runs with against what was asked for."""
        wanted = {
            Cell.BLOCKS: self.settings.kv_blocks,
            Cell.BLOCK_SIZE: self.settings.block_size,
            Cell.MAX_MODEL_LEN: self.settings.max_model_len,
            Cell.MAX_SEQS: self.settings.max_sessions,
            Cell.PREFIX_CACHING: 1,
        }
        for cell, value in wanted.items():
            if counters[cell] != value:
                raise EngineError(
                    f"the engine runs with {cell.name.lower()} {counters[cell]} where {value} was asked for",
                    where="effective configuration",
                    fix="change the setting to what the model allows",
                )

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
        assert self._budget is not None
        name = session_id or uuid.uuid4().hex[:12]
        if "~" in name:
            raise EngineError(f"the session id {name!r} holds a '~'", fix="leave it out")
        lease = await self._budget.acquire(
            min(reserve_tokens, self.max_model_len),
            priority=priority,
            timeout=self.settings.admission_timeout,
        )
        self._epoch += 1
        session = VLLMSession(self, lease, name, self._epoch, priority)
        try:
            yield session
        finally:
            # Shielded: a second cancellation must not leave KV or slot behind.
            await asyncio.shield(asyncio.ensure_future(self._end(session, lease)))

    async def _end(self, session: VLLMSession, lease: Lease) -> None:
        try:
            await session.close()
        except Exception as error:
            # An alive engine frees on abort, which close() has sent; a dead one holds nothing.
            if self._llm is not None and not self._llm.errored:
                raise self.failure(error) from error
        finally:
            assert self._budget is not None
            self._budget.release(lease)

    # -- what a session needs of its engine

    async def render(self, ids: list[int], images: Sequence[np.ndarray]) -> tuple[Any, int]:
        """See `render_prompt`."""
        return await render_prompt(self._llm, ids, images, f"v{self.version}")

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

    def turn_counts(self, slot: int) -> tuple[int, int, int]:
        """(turn, context tokens, cached tokens) of a slot's latest turn, as the scheduler counted."""
        self.check_alive()
        assert self._counters is not None
        return self._counters.turn(slot)

    async def abort(self, request_id: str) -> None:
        """Abort a request; quiet when the engine is dead, since it then holds nothing."""
        if self._llm is not None and not self._llm.errored:
            with contextlib.suppress(EngineError):
                await self._call(self._llm.abort(request_id))

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
            self._fail(
                EngineError(
                    f"the engine process died, {launch.exit_of(self._llm)}; {self._log.cause()}",
                    fix="start a new engine",
                )
            )
        if self._error is not None:
            return EngineError(self._error.what, where=self._error.where, fix=self._error.fix)
        return EngineError(f"the engine refused a request: {launch.first_line(error.__cause__ or error)}")

    def _fail(self, error: EngineError) -> None:
        if self._error is None:
            self._error = error
        if self._budget is not None:
            self._budget.fail(self._error)

    async def _call(self, work: Coroutine[Any, Any, T], timeout: float = _SMALL_CALL) -> T:
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
        await self._call(self._llm.pause_generation(mode="keep", clear_cache=False))

    async def _resume(self) -> None:
        if self._llm is not None and not self._llm.errored:
            await self._call(self._llm.resume_generation())

    def hold(self, turns: int | None = None) -> AbstractAsyncContextManager[None]:
        """Gather turns and start them in one engine step, in the order of their session ids.

        Start the turns as tasks inside the block and leave it without awaiting them: leaving waits until
        `turns` of them (None: all that have begun) have reached the engine or failed on the way. The engine
        then sees the same batches in every run, so equal seeds give equal tokens and log-probs bit for bit.
        """
        # Half of it: held turns whose company never comes must still run before their own deadline.
        return self.gate.hold(turns, self.settings.turn_timeout / 2)

    async def publish(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> float:
        """Put new weights into the running engine; see `tiderl.engine.base.Engine.publish`.

        Tensors that are not sent keep their values exactly. The iterable is consumed in a worker thread
        while sessions go on; they are paused only for the load.

        Raises:
            EngineError: a name, shape or value is wrong, or `version` is not above the current one (nothing
                has changed then); or the engine died, or failed half-way, and cannot be used any more.
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
                await to_its_end(self._load(told, version))
        return time.monotonic() - began

    async def _load(self, told: dict[str, Any], version: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        request = WeightTransferUpdateRequest(update_info=told)
        timeout = self.settings.publish_timeout
        async with self.gate.paused():
            try:
                await self._call(self._llm.start_weight_update(), timeout)
                await self._call(self._llm.update_weights(request), timeout)
                await self._call(self._llm.finish_weight_update(weight_version=str(version)), timeout)
                if self.settings.max_images:
                    await self._call(self._llm.reset_encoder_cache())
            except EngineError as error:
                # Half-loaded weights: no token of this engine can be trusted any more.
                self._fail(
                    EngineError(f"a weight update failed half-way: {error.what}", fix="start a new engine")
                )
                raise
            assert self._counters is not None
            self._counters[Cell.VERSION] = version
            self.version = version

    # -- figures

    def stats(self) -> EngineStats:
        """The scheduler's counters, read from shared memory without a call into the engine."""
        cells, budget = self._counters, self._budget
        if cells is None or budget is None:
            raise EngineError("the engine is not running")
        return EngineStats(
            version=self.version,
            capacity_tokens=self.capacity_tokens,
            free_tokens=cells[Cell.FREE_BLOCKS] // budget.groups * cells[Cell.BLOCK_SIZE],
            running=cells[Cell.RUNNING],
            held=cells[Cell.HELD],
            waiting=cells[Cell.WAITING] + budget.waiting,
            preemptions=cells[Cell.PREEMPTIONS],
            prefill_tokens=cells[Cell.PREFILL],
            decode_tokens=cells[Cell.DECODE],
            later_prompt_tokens=cells[Cell.LATER_PROMPT],
            later_cached_tokens=cells[Cell.LATER_CACHED],
            reprefilled_tokens=cells[Cell.REPREFILLED],
        )
