"""The engine on vLLM 0.32: resumable sessions, weights that change while it runs, counters without RPC.

Invariants: the reservations of open sessions never pass the KV cache; a pause is always in mode `keep` without
clearing caches (any other kills held sessions); every wait has a deadline; when the engine process dies every
waiter gets an `EngineError` that says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tiderl.engine import launch
from tiderl.engine.base import EngineStats, Sampling
from tiderl.engine.budget import KVBudget
from tiderl.engine.counters import Cell, Counters
from tiderl.engine.publish import WeightFile, checkpoint_shapes
from tiderl.engine.session import VLLMSession
from tiderl.engine.settings import EngineSettings
from tiderl.errors import EngineError, ModelError, TideError

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
        self._llm: Any = None
        self._counters: Counters | None = None
        self._budget: KVBudget | None = None
        self._log_fd = -1
        self._log_path = ""
        self._error: EngineError | None = None
        self._closed = False
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._tied = False
        self._pauses = 0
        self._pause_lock = asyncio.Lock()
        self._publish_lock = asyncio.Lock()
        self._sent = 0
        self._sent_changed = asyncio.Condition()
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
        if self._llm is not None or self._closed:
            raise EngineError("the engine was started before", fix="make a new VLLMEngine")
        self._read_checkpoint()
        if self.settings.log_file is not None:
            self._log_path = str(Path(self.settings.log_file).resolve())
            Path(self._log_path).parent.mkdir(parents=True, exist_ok=True)
        else:
            self._log_fd = os.memfd_create("tiderl-engine-log")
            self._log_path = f"/proc/{os.getpid()}/fd/{self._log_fd}"
        self._counters = Counters.create(self.settings.max_sessions)
        try:
            began = time.monotonic()
            await self._wait_for(launch.in_fresh_thread(lambda: launch.import_vllm(self._log_path)))
            imported = time.monotonic()
            counters = self._counters
            self._llm = await self._wait_for(
                launch.in_fresh_thread(lambda: launch.build(self.settings, counters, self._log_path))
            )
            await self._call(self._prepare(), self.settings.start_timeout)
            self.start_seconds = {"import": imported - began, "construct": time.monotonic() - imported}
            self._check_effective()
        except BaseException:
            await self.close()
            raise
        cells = self._counters
        self._budget = KVBudget(
            cells[Cell.BLOCKS],
            self.settings.max_sessions,
            cells[Cell.BLOCK_SIZE],
            max(1, cells[Cell.KV_GROUPS]),
        )
        self.capacity_tokens = self._budget.capacity_tokens

    async def close(self) -> None:
        """End the engine process and give all its memory back; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._fail(EngineError("the engine was closed"))
        pid = self._counters[Cell.PID] if self._counters else 0
        llm, self._llm = self._llm, None
        if llm is not None:
            # vLLM's own shutdown waits for its deadline to pass; with the process gone it returns at once.
            _kill(pid)
            await asyncio.to_thread(llm.shutdown, 0.5)
        elif pid:
            _kill(pid)
        if self._counters is not None:
            self._counters.close()
            self._counters = None
        if self._log_fd >= 0:
            os.close(self._log_fd)
            self._log_fd = -1

    def _read_checkpoint(self) -> None:
        from tiderl.engine.models import check_folder

        folder = Path(self.settings.model)
        config = check_folder(folder)
        self._shapes = checkpoint_shapes(folder)
        text = config.get("text_config") or config
        self._tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
        self.vocabulary = int(text["vocab_size"])
        longest = text.get("max_position_embeddings")
        if longest and self.settings.max_model_len > longest:
            raise ModelError(
                f"engine.max_model_len {self.settings.max_model_len} passes the model's own limit of {longest}",
                where=str(folder),
                fix=f"set engine.max_model_len to {longest} or less",
            )

    async def _prepare(self) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
        await self._llm.update_weight_version("0")
        await self._llm.get_supported_tasks()

    def _check_effective(self) -> None:
        """Compare what the scheduler runs with against what was asked for."""
        cells = self._counters
        assert cells is not None
        wanted = {
            Cell.BLOCKS: self.settings.kv_blocks,
            Cell.BLOCK_SIZE: self.settings.block_size,
            Cell.MAX_MODEL_LEN: self.settings.max_model_len,
            Cell.MAX_SEQS: self.settings.max_sessions,
            Cell.PREFIX_CACHING: 1,
        }
        for cell, value in wanted.items():
            if cells[cell] != value:
                raise EngineError(
                    f"the engine runs with {cell.name.lower()} = {cells[cell]} where {value} was asked for",
                    where="effective configuration",
                    fix=f"see {self._log_path} for who changed it",
                )

    async def _wait_for(self, wait: Any) -> Any:
        """Wait for a build thread; past the deadline kill the process it waits for."""
        waiting = asyncio.ensure_future(asyncio.to_thread(wait))
        try:
            return await asyncio.wait_for(asyncio.shield(waiting), self.settings.start_timeout)
        except TimeoutError as error:
            pid = self._counters[Cell.PID] if self._counters else 0
            _kill(pid)
            raise EngineError(
                f"the engine was not up after {self.settings.start_timeout:.0f} s",
                where="engine start",
                fix=f"raise engine.start_timeout. Its log ends: {self.log_tail()}",
            ) from error
        except TideError:
            raise
        except Exception as error:
            raise EngineError(
                f"the engine did not start: {launch.first_line(error)}. Its log ends: {self.log_tail()}",
                where="engine start",
            ) from error

    # -- sessions

    @contextlib.asynccontextmanager
    async def session(
        self, reserve_tokens: int, *, session_id: str | None = None, priority: int = 0
    ) -> AsyncIterator[VLLMSession]:
        """Open a session; see `tiderl.engine.base.Engine.session`.

        `session_id` names the episode: opened again under the same name (after its KV was lost), tokens that
        are computed a second time count as re-prefilled. A reservation above `max_model_len` is cut to it.
        """
        self.check_alive()
        assert self._budget is not None
        name = session_id or uuid.uuid4().hex[:12]
        if "~" in name:
            raise EngineError(f"the session id {name!r} holds a '~'")
        lease = await self._budget.acquire(
            min(reserve_tokens, self.max_model_len),
            priority=priority,
            timeout=self.settings.admission_timeout,
        )
        session: VLLMSession | None = None
        try:
            self._epoch += 1
            session = VLLMSession(self, lease, f"{lease.slot:04d}~{name}~{self._epoch}", priority)
            yield session
        finally:
            # Shielded: a second cancellation must not leave KV or slot behind.
            await asyncio.shield(asyncio.ensure_future(self._end(session, lease)))

    async def _end(self, session: VLLMSession | None, lease: Any) -> None:
        try:
            if session is not None:
                await session.close()
        finally:
            assert self._budget is not None
            self._budget.release(lease)

    # -- what a session needs of its engine

    async def render(self, ids: list[int], images: Sequence[np.ndarray]) -> tuple[dict[str, Any], int]:
        """(a prompt for vLLM, how many context tokens it is)."""
        if len(images):
            raise EngineError("this engine takes no images")
        return {"prompt_token_ids": ids, "cache_salt": f"v{self.version}"}, len(ids)

    def params(self, sampling: Sampling, max_tokens: int) -> Any:
        """vLLM's sampling parameters of one turn."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            max_tokens=max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=list(sampling.stop_token_ids),
            seed=sampling.seed,
            ignore_eos=sampling.ignore_eos,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    def open_stream(
        self, chunks: AsyncGenerator[Any, None], params: Any, request_id: str, priority: int
    ) -> AsyncGenerator[Any, None]:
        return self._llm.generate(chunks, params, request_id, priority=priority)

    def versions_of(self, spans: Any, start: int, end: int) -> tuple[int, ...]:
        """The version of each sampled token `start..end` of a session, as the engine stamped it."""
        if not spans:
            return (self.version,) * (end - start)
        versions: list[int] = []
        for span in spans:
            count = min(span.end, end) - max(span.start, start)
            if count > 0:
                versions.extend([int(span.version)] * count)
        if len(versions) != end - start or max(versions) > self.version:
            raise EngineError(f"the engine stamped versions {spans} on tokens {start} to {end}")
        return tuple(versions)

    def turn_counts(self, slot: int) -> tuple[int, int, int]:
        assert self._counters is not None
        return self._counters.turn(slot)

    def note_sent(self) -> None:
        self._sent += 1

    async def abort(self, request_id: str) -> None:
        """Abort a request; never raises."""
        if self._llm is None or self._llm.errored:
            return
        try:
            async with asyncio.timeout(_SMALL_CALL):
                await self._llm.abort(request_id)
        except Exception as error:  # only a dead engine cannot take an abort
            self.failure(error)

    def check_alive(self) -> None:
        if self._error is not None:
            raise self._error
        if self._llm is None:
            raise EngineError("the engine is not running", fix="await engine.start() first")
        if self._llm.errored:
            raise self.failure(RuntimeError("the engine process has ended"))

    def failure(self, error: BaseException) -> EngineError:
        """The EngineError for `error`; when the engine is dead it is the end of all sessions."""
        if self._error is not None:
            return self._error
        if self._llm is not None and not self._llm.errored:
            cause: BaseException = error.__cause__ or error
            return EngineError(f"the engine refused a request: {launch.first_line(cause)}")
        died = EngineError(
            f"the engine process died. Its log ends: {self.log_tail()}", fix="start a new engine"
        )
        self._fail(died)
        return died

    def log_tail(self, characters: int = 600) -> str:
        """The end of the engine's log, on one line."""
        try:
            with open(self._log_path, "rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - 4 * characters))
                text = file.read().decode(errors="replace")
        except OSError:
            return "(no log)"
        return (
            " | ".join(line.strip() for line in text.splitlines() if line.strip())[-characters:] or "(empty)"
        )

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

    @contextlib.asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Nothing is scheduled inside; KV stays. Nested and concurrent pauses end together."""
        async with self._pause_lock:
            if self._pauses == 0:
                await self._call(self._llm.pause_generation(mode="keep", clear_cache=False))
            self._pauses += 1
        try:
            yield
        finally:
            async with self._pause_lock:
                self._pauses -= 1
                if self._pauses == 0 and self._llm is not None and not self._llm.errored:
                    await self._call(self._llm.resume_generation())

    @contextlib.asynccontextmanager
    async def hold(self, turns: int) -> AsyncIterator[None]:
        """Gather `turns` turns and start them in one engine step, ordered by session id.

        Start the turns as tasks inside the block and leave it without awaiting them: leaving waits until all
        have reached the engine. The batches are then the same in every run, and with them, bit for bit, the
        tokens and log-probs of equal seeds.
        """
        self.check_alive()
        async with self._paused():
            goal = self._sent + turns
            yield
            async with asyncio.timeout(self.settings.turn_timeout):
                while self._sent < goal:
                    self.check_alive()
                    await asyncio.sleep(0.001)

    async def publish(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> float:
        """Put new weights into the running engine; see `tiderl.engine.base.Engine.publish`.

        Tensors that are not sent keep their values exactly. The iterable is consumed in a worker thread.

        Raises:
            EngineError: a name, shape or value is wrong (nothing has changed then), `version` is not above
                the current one, or the engine died.
        """
        began = time.monotonic()
        async with self._publish_lock:
            self.check_alive()
            if version <= self.version:
                raise EngineError(
                    f"version {version} is not above the engine's {self.version}", where="publish"
                )
            file = WeightFile(self._shapes, self.settings.dtype, self._tied)
            try:
                await asyncio.wait_for(asyncio.to_thread(file.write, weights), self.settings.publish_timeout)
                await asyncio.shield(asyncio.ensure_future(self._load(file.path, version)))
            finally:
                file.close()
        return time.monotonic() - began

    async def _load(self, path: str, version: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        async with self._paused():
            try:
                await self._call(self._llm.start_weight_update(), self.settings.publish_timeout)
                request = WeightTransferUpdateRequest(update_info={"path": path})
                await self._call(self._llm.update_weights(request), self.settings.publish_timeout)
                await self._call(
                    self._llm.finish_weight_update(weight_version=str(version)), self.settings.publish_timeout
                )
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
        cells = self._counters
        if cells is None or self._budget is None:
            raise self._error or EngineError("the engine is not running")
        return EngineStats(
            version=self.version,
            capacity_tokens=self.capacity_tokens,
            free_tokens=cells[Cell.FREE_BLOCKS] // self._budget.groups * cells[Cell.BLOCK_SIZE],
            running=cells[Cell.RUNNING],
            held=cells[Cell.HELD],
            waiting=cells[Cell.WAITING] + self._budget.waiting,
            preemptions=cells[Cell.PREEMPTIONS],
            prefill_tokens=cells[Cell.PREFILL],
            decode_tokens=cells[Cell.DECODE],
            later_prompt_tokens=cells[Cell.LATER_PROMPT],
            later_cached_tokens=cells[Cell.LATER_CACHED],
            reprefilled_tokens=cells[Cell.REPREFILLED],
        )


def _kill(pid: int) -> None:
    """Kill an engine process and what it started (it leads its own group)."""
    if pid <= 0:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
