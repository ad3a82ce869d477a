"""Building vLLM's AsyncLLM fast, quietly and without touching this process.

Invariants: the parent's environment, log handlers and torch threads are as before when `build` returns; the
EngineCore's main function is ours only while one engine is being built.

Why forking is safe here. A fork copies only the forking thread, so what can go wrong is state that other
threads own: (1) OpenMP: libgomp keeps a thread's worker pool in that thread's local storage and a forked
child that uses a pool of its parent hangs; `build` runs in a thread made for it, which has never run a
parallel region and so has no pool to inherit, whatever the other threads did. (2) OpenBLAS, glibc's malloc,
Python's own locks: each registers fork handlers. (3) CUDA cannot be forked once initialised: with CUDA, or
inside Ray, vLLM insists on `spawn`, and so do we. (4) The event loop: the child drops the wake-up socket
first (`child.py`) and never touches the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from tiderl.engine import child
from tiderl.engine.counters import Counters
from tiderl.engine.log import EngineLog, catch_vllm_logs
from tiderl.engine.settings import EngineSettings
from tiderl.errors import EngineError, MissingExtra, TideError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")

# One build at a time: the environment and vLLM's entry point are process-wide.
_building = threading.Lock()

# Measured on a CPU: without TORCH_COMPILE_DISABLE the first sampled token waits 14 s for a compiler; without
# VLLM_ENABLE_V1_MULTIPROCESSING=0 a third process is started for the worker.
_QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # `worker.py` builds on the first one
}
_CPU = {"TORCH_COMPILE_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@contextmanager
def same_random_state() -> Iterator[None]:
    """Put the global random states back: vLLM seeds them while it reads its configuration."""
    import random

    import numpy as np
    import torch

    states = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.random.set_rng_state(states[2])


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables and put the old ones back."""
    old = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in old.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def in_fresh_thread(work: Callable[[], T]) -> Callable[[], T]:
    """Start `work` in a thread made for it; call the result to wait for it."""
    box: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            box.append(work())
        except BaseException as error:  # noqa: BLE001  # handed to the waiter, whatever it is
            failure.append(error)

    thread = threading.Thread(target=run, name="tiderl-engine-build", daemon=True)
    thread.start()

    def wait() -> T:
        thread.join()
        if failure:
            raise failure[0]
        return box[0]

    return wait


def import_vllm(architecture: str) -> None:
    """Import vLLM, its logger tied to the engines' logs.

    On a CPU what the engine process needs is imported here too: a fork then finds it in place, and so does
    the next engine.

    Raises:
        MissingExtra: vLLM is not installed.
    """
    with _building, environment(_QUIET):
        catch_vllm_logs()
        try:
            import vllm.v1.engine.async_llm
            import vllm.v1.engine.core  # noqa: F401

            if on_cpu():
                from vllm.model_executor.models.registry import _VLLM_MODELS

                import tiderl.engine.scheduler
                import tiderl.engine.worker  # noqa: F401

                if architecture in _VLLM_MODELS:
                    importlib.import_module(f"vllm.model_executor.models.{_VLLM_MODELS[architecture][0]}")
        except ModuleNotFoundError as error:
            raise MissingExtra(
                f"the inference engine needs vLLM, and {error.name} is not installed",
                fix="pip install 'tiderl[cpu]' or 'tiderl[gpu]'",
            ) from error


def on_cpu() -> bool:
    """True when vLLM's platform here is the CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def make_folder() -> str:
    """A private folder for vLLM's sockets; its path is short, since a socket's may have 107 characters."""
    base = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="tiderl-engine-", dir=base if len(base) < 40 else "/tmp")


def build(settings: EngineSettings, counters: Counters, log_path: str, folder: str) -> AsyncLLM:
    """Create the engine process and wait until it is ready. Call it in a thread of its own."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCoreProc

    cpu = on_cpu()
    values = _QUIET | {"VLLM_RPC_BASE_PATH": folder}
    if cpu:
        values |= _CPU | {"OMP_NUM_THREADS": str(settings.threads)}
    options = child.ChildOptions(
        os.getpid(), settings.threads, log_path, counters.path, counters.slots, folder, values
    )
    method = settings.start_method
    if method == "auto":
        method = "fork" if cpu else "spawn"
    with _building, same_random_state(), environment(values | {"VLLM_WORKER_MULTIPROC_METHOD": method}):
        try:
            config = _arguments(settings, counters, cpu).create_engine_config()
        except (ValueError, OSError) as error:
            raise EngineError(
                f"vLLM cannot run the model {settings.model}: {first_line(error)}", where="engine start"
            ) from error
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = method  # the CPU platform has just forced "spawn"
        original = EngineCoreProc.run_engine_core
        child.vllm_main = original
        EngineCoreProc.run_engine_core = functools.partial(child.run_engine_core, options)
        try:
            return AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        finally:
            EngineCoreProc.run_engine_core = staticmethod(original)


def _arguments(settings: EngineSettings, counters: Counters, cpu: bool) -> Any:
    from vllm.config import WeightTransferConfig
    from vllm.config.logging import LoggingConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    scheduler = "CountingScheduler" if cpu else "CountingAsyncScheduler"
    extra: dict[str, Any] = {}
    if cpu:
        extra["kv_cache_memory_bytes"] = _kv_bytes(settings)
    else:
        extra["gpu_memory_utilization"] = settings.gpu_memory
    if settings.max_images:
        extra["limit_mm_per_prompt"] = {"image": settings.max_images}
        # Its two halves assume that all that is processed is also sent; a turn we refuse would part them, and
        # the next use of its picture would fail.
        extra["mm_processor_cache_gb"] = 0
    if settings.banned_token_ids:
        extra["logits_processors"] = ["tiderl.engine.banned:BannedTokens"]
    return AsyncEngineArgs(
        model=str(settings.model),
        dtype=settings.dtype,
        seed=settings.seed,
        max_model_len=settings.max_model_len,
        block_size=settings.block_size,
        num_gpu_blocks_override=settings.kv_blocks + 1,  # one is vLLM's null block
        max_num_seqs=settings.max_sessions,
        max_num_batched_tokens=max(settings.max_batched_tokens, settings.max_sessions),
        enable_prefix_caching=True,
        enforce_eager=cpu,
        skip_tokenizer_init=not settings.max_images,
        stream_interval=settings.max_model_len,  # a turn is read whole; fewer objects in this process
        generation_config="vllm",  # the checkpoint's own sampling defaults must not leak in
        scheduling_policy="priority",
        scheduler_cls=f"tiderl.engine.scheduler.{scheduler}",
        worker_cls="tiderl.engine.worker.TideWorker",
        weight_transfer_config=WeightTransferConfig(backend="tiderl"),
        additional_config={
            "tiderl_counters": counters.path,
            "tiderl_slots": counters.slots,
            "tiderl_banned": list(settings.banned_token_ids),
        },
        logging_config=LoggingConfig(configure_logging=False),
        **extra,
    )


def _kv_bytes(settings: EngineSettings) -> int:
    """A KV size given outright spares vLLM its profiling run; the blocks themselves are overridden."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(settings.model)).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = 4 if settings.dtype == "float32" else 2
    tokens = (settings.kv_blocks + 1) * settings.block_size
    return 2 * tokens * heads * size * width * config.num_hidden_layers * 5 // 4 + (1 << 20)


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[
        :300
    ]


def wake_all(llm: Any) -> None:
    """Everybody who still waits for an output of this engine learns that there will be none."""
    from vllm.v1.engine.exceptions import EngineDeadError

    llm.output_processor.propagate_error(EngineDeadError())


def end(llm: Any) -> None:
    """End an engine's processes and free what the client holds.

    vLLM's own shutdown waits until its time is up before it kills; nothing of ours needs that grace.
    """
    for process in _processes(llm):
        if process.is_alive():
            kill_group(process.pid)
    llm.shutdown(timeout=1.0)


async def started(work: Callable[[], T], timeout: float, log: EngineLog) -> T:
    """Run a part of the start in a thread made for it; past the deadline its engine is ended when it comes.

    Raises:
        EngineError: it failed, or was not done in time.
    """
    waiting = asyncio.ensure_future(asyncio.to_thread(in_fresh_thread(work)))
    try:
        return await asyncio.wait_for(asyncio.shield(waiting), timeout)
    except (TimeoutError, asyncio.CancelledError) as error:
        waiting.add_done_callback(_end_when_built)
        if isinstance(error, asyncio.CancelledError):
            raise
        raise EngineError(
            f"the engine was not up after {timeout:.0f} s; {log.cause()}",
            where="engine start",
            fix="raise engine.start_timeout",
        ) from error
    except TideError:
        raise
    except Exception as error:
        raise EngineError(
            f"the engine did not start: {first_line(error)}; {log.cause()}", where="engine start"
        ) from error


def _end_when_built(built: asyncio.Future[Any]) -> None:
    """Callback for a build nobody waits for any more."""
    if not built.cancelled() and built.exception() is None and built.result() is not None:
        end(built.result())


def exit_of(llm: Any) -> str:
    """How an engine's process ended, in words."""
    codes = [process.exitcode for process in _processes(llm)]
    for code in codes:
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        if code is not None:
            return f"exit code {code}"
    return "by an error of its own"


def kill_group(pid: int) -> None:
    """Kill an engine process and what it started (it leads a group of its own)."""
    if pid > 0:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def _processes(llm: Any) -> list[Any]:
    manager = llm.engine_core.resources.engine_manager
    return list(manager.processes) if manager is not None else []
