"""Worker processes on this machine, started, fed and replaced by the program that uses them.

Invariants: a session goes to the live worker with the fewest sessions; the number of workers is
restored after any death; places are handed out in the order they were asked for; after `close`, an
interrupt, or the death of this program, no process and no file of the hub is left.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zmq

from tiderl.errors import (
    Busy,
    ConfigError,
    EnvironmentFault,
    InfrastructureError,
    ResourceError,
    TideError,
    WorkerDied,
)
from tiderl.hub import launch, origin
from tiderl.hub.client import RemoteSession, WorkerConnection
from tiderl.hub.process import WorkerExit, WorkerProcess
from tiderl.hub.protocol import VERSION, Ping, Pong, Stop

logger = logging.getLogger(__name__)

_MAX_FAILED_STARTS = 3
_MAX_START_DELAY = 30.0
_STOP_TIMEOUT = 4.0
_KILL_TIMEOUT = 5.0
_MAX_SOCKET_PATH = 90


@dataclass(frozen=True)
class WorkerStatus:
    """One worker now: its first process id, its sessions, whether it takes new ones."""

    pid: int
    sessions: int
    ready: bool


class _Worker:
    def __init__(self, process: WorkerProcess, connection: WorkerConnection) -> None:
        self.process, self.connection = process, connection
        self.sessions = 0
        self.ready = False


class LocalHub:
    """A `Hub` of `workers` processes; an async context manager that can be entered again.

    Args:
        workers: how many worker processes to keep.
        sessions_per_process: most sessions in one worker; a killed step takes those of its worker along.
        python: interpreter of the workers (it must have `tiderl` installed); None: this one.
        environ: more environment variables for the workers.
        start_timeout: seconds a worker has to start.
        open_timeout: seconds an environment has to import and construct.
        queue_timeout: seconds to wait for a free place before `Busy`.
    """

    def __init__(
        self,
        workers: int = 2,
        *,
        sessions_per_process: int = 64,
        python: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
        start_timeout: float = 60.0,
        open_timeout: float = 120.0,
        queue_timeout: float = 600.0,
    ) -> None:
        if workers < 1 or sessions_per_process < 1:
            what = f"a hub of {workers} workers with {sessions_per_process} sessions each has no place"
            raise ConfigError(what, fix="give at least 1 of both")
        self._wanted, self._per_process = workers, sessions_per_process
        self._python = os.fspath(python) if python is not None else sys.executable
        self._environ = dict(environ or {})
        self._start_timeout, self._open_timeout, self._queue_timeout = (
            start_timeout,
            open_timeout,
            queue_timeout,
        )
        self._open = False
        self.replaced = 0
        """Workers that have been replaced since the hub was entered."""

    @property
    def capacity(self) -> int:
        """Sessions that fit when every worker is up."""
        return self._wanted * self._per_process

    @property
    def workers(self) -> list[WorkerStatus]:
        """The worker processes that are up or starting."""
        return [WorkerStatus(w.process.pid, w.sessions, w.ready) for w in self._workers] if self._open else []

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the workers and wait until all answer.

        Raises:
            WorkerDied: a worker ended while it started; the text has its exit code and its log's end.
            StepTimeout: a worker did not answer within `start_timeout`.
            ResourceError: the interpreter is missing, or the system refuses another process.
        """
        if self._open:
            raise ConfigError("this hub is already open", fix="use one LocalHub per `async with`")
        if launch.in_worker:
            what = "a hub was started while a worker imported its environments' code"
            fix = 'put what the script runs under `if __name__ == "__main__":`'
            raise EnvironmentFault(what, fix=fix)
        self._loop = asyncio.get_running_loop()
        self._folder = _private_folder()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._workers: list[_Worker] = []
        self._waiters: deque[asyncio.Future[_Worker]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._names = 0
        self._failed_starts = self.replaced = 0
        self._last_death = WorkerDied("no worker has started")
        self._closing = False
        self._processes: set[WorkerProcess] = set()
        # Runs at `close`, or when the interpreter leaves without it.
        self._abandon = weakref.finalize(self, _abandon, self._processes, self._folder)
        self._open = True
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._wanted):
                    group.create_task(self._launch())
        except BaseExceptionGroup as errors:
            await self.close()
            raise errors.exceptions[0] from None
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close all sessions and end all workers, by force after 4 seconds. Idempotent."""
        if not self._open or self._closing:
            return
        self._closing = True
        try:
            self._fail_waiters(InfrastructureError("the hub was closed while a session waited for a place"))
            for task in self._tasks:
                task.cancel()
            for worker in self._workers:
                if worker.ready:
                    worker.connection.tell(Stop())
                else:
                    worker.process.kill()
            await self._wait_for_exits(_STOP_TIMEOUT)
            for process in self._processes:
                process.kill()
            await self._wait_for_exits(_KILL_TIMEOUT)
        finally:
            for worker in list(self._workers):
                worker.connection.close()
            self._abandon()
            self._context.destroy(linger=0)
            self._open = False

    @asynccontextmanager
    async def session(self, env_id: str, /, **env_kwargs: Any) -> AsyncIterator[RemoteSession]:
        """See `Hub.session`; `env_kwargs` go to the environment's constructor."""
        where = origin.origin_of(env_id)
        worker = await self._place()
        session = RemoteSession(worker.connection, env_id, on_closed=lambda: self._release(worker))
        try:
            await session.open(env_kwargs, where, self._open_timeout)
            yield session
        finally:
            await session.close()

    async def task_ids(self, env_id: str, split: str = "train", /, **env_kwargs: Any) -> list[Any]:
        """See `Hub.task_ids`."""
        async with self.session(env_id, **env_kwargs) as session:
            return await session.tasks(split)

    # Places

    async def _place(self) -> _Worker:
        if not self._open or self._closing:
            raise InfrastructureError(
                "the hub is not open", fix="use it inside `async with LocalHub(...) as hub`"
            )
        if self._failed_starts >= _MAX_FAILED_STARTS and not any(w.ready for w in self._workers):
            raise self._last_death
        give_up = time.monotonic() + self._queue_timeout
        while True:
            waiter: asyncio.Future[_Worker] = self._loop.create_future()
            self._waiters.append(waiter)
            self._grant()
            try:
                async with asyncio.timeout(max(0.0, give_up - time.monotonic())):
                    worker = await waiter
            except TimeoutError:
                self._give_back(waiter)
                taken = sum(w.sessions for w in self._workers)
                what = (
                    f"no place became free in {self._queue_timeout:g} s: {taken} of {self.capacity} are taken"
                )
                raise Busy(what, retry_after=min(30.0, self._queue_timeout)) from None
            except asyncio.CancelledError:
                self._give_back(waiter)
                raise
            if worker in self._workers:
                return worker  # else it died between the grant and now

    def _give_back(self, waiter: asyncio.Future[_Worker]) -> None:
        if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
            self._release(waiter.result())
        waiter.cancel()

    def _release(self, worker: _Worker) -> None:
        worker.sessions -= 1
        self._grant()

    def _grant(self) -> None:
        while self._waiters:
            if self._waiters[0].done():
                self._waiters.popleft()
                continue
            free = [w for w in self._workers if w.ready and w.sessions < self._per_process]
            if not free:
                return
            worker = min(free, key=lambda w: w.sessions)
            worker.sessions += 1
            self._waiters.popleft().set_result(worker)

    # Workers

    async def _launch(self) -> None:
        """Start one worker and wait until it answers."""
        name = f"w{self._names}"
        self._names += 1
        process = WorkerProcess(
            name,
            self._folder,
            python=self._python,
            capacity=self._per_process,
            environ=self._environ,
            loop=self._loop,
            on_exit=lambda end: self._ended(worker, end),
        )
        self._processes.add(process)
        connection = WorkerConnection(self._context, process.endpoint, on_overdue=process.kill)
        worker = _Worker(process, connection)
        self._workers.append(worker)
        reply = await connection.call("", 0, Ping(), limit=self._start_timeout, what="start of a worker")
        if not isinstance(reply, Pong) or reply.version != VERSION:
            process.kill()
            fix = f"install the tiderl of this program for {self._python}"
            raise InfrastructureError("the worker speaks another version of the protocol", fix=fix)
        process.serving = reply.pid
        worker.ready = True
        self._failed_starts = 0
        self._grant()

    def _ended(self, worker: _Worker, end: WorkerExit) -> None:
        self._processes.discard(worker.process)
        self._workers.remove(worker)
        died = WorkerDied(end.describe(), fix="open a new session; the worker is being replaced")
        worker.connection.fail(
            lambda call: call.timed_out() if call.session == end.late_session else died, later=died
        )
        if self._closing:
            return
        logger.warning("%s", end.describe())
        if not worker.ready:
            self._failed_starts += 1
            self._last_death = died
        self._spawn(
            self._replace(min(_MAX_START_DELAY, 0.1 * 2**self._failed_starts if self._failed_starts else 0.0))
        )
        if self._failed_starts >= _MAX_FAILED_STARTS and not any(w.ready for w in self._workers):
            self._fail_waiters(died)

    async def _replace(self, delay: float) -> None:
        self.replaced += 1
        await asyncio.sleep(delay)
        while True:
            try:
                return await self._launch()
            except ResourceError as error:  # no process was made, so nobody else tries again
                logger.warning("a worker could not be replaced: %s", error)
                await asyncio.sleep(1.0)
            except TideError as error:  # its process has ended, and `_ended` has planned the next
                return logger.warning("a worker could not be replaced: %s", error)

    def _fail_waiters(self, error: TideError) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(error)

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wait_for_exits(self, limit: float) -> None:
        waits = [asyncio.ensure_future(p.exited.wait()) for p in self._processes]
        if waits:
            _, pending = await asyncio.wait(waits, timeout=limit)
            for wait in pending:
                wait.cancel()


def _private_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tiderl-"))  # mode 0700
    if len(str(folder)) > _MAX_SOCKET_PATH:  # the system bounds the path of a socket to some 107 bytes
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="tiderl-", dir="/tmp"))
    return folder


def _abandon(processes: set[WorkerProcess], folder: Path) -> None:
    for process in processes:
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)
