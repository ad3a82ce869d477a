"""The client's side of a worker: one DEALER socket in the event loop, and the sessions behind it.

Invariants: every call ends, with its answer, with a typed error, or with `StepTimeout` shortly after
its deadline; a session's calls carry consecutive sequence numbers; the socket is only touched by the
loop's thread.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import zmq

from tiderl.env.ends import EndReason
from tiderl.errors import Busy, ConfigError, InfrastructureError, StepTimeout, TideError, WorkerDied
from tiderl.hub import protocol
from tiderl.hub.base import Action, Message, SessionSpec

logger = logging.getLogger(__name__)

GRACE = 0.25
"""Seconds a worker's own watchdog has, after a deadline, before the client acts."""
_SWEEP = 0.05
_SIDE_TIMEOUT = 30.0
_CLOSE_TIMEOUT = 15.0
_BURST = 256

R = TypeVar("R")


@dataclass
class Call:
    """A request without an answer yet; times are those of `time.monotonic`."""

    session: str
    what: str
    limit: float
    future: asyncio.Future[protocol.Reply]
    deadline: float
    overdue: bool = field(default=False)

    def timed_out(self) -> StepTimeout:
        return StepTimeout(f"{self.what} did not answer within its limit of {self.limit:g} s")


class WorkerConnection:
    """Requests to one worker and their answers; belongs to the running event loop.

    Args:
        on_overdue: called when a call passed its deadline and the worker did not act on it; the
            callee must kill the worker.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, *, on_overdue: Callable[[], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_overdue = on_overdue
        self._calls: dict[bytes, Call] = {}
        self._ids = itertools.count(1)
        self._error: TideError | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._socket = context.socket(zmq.DEALER)
        self._socket.set_hwm(0)  # bounded by the sessions: each has one call under way
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, protocol.MAX_FRAME_BYTES)
        self._socket.connect(endpoint)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._receive)

    async def call(
        self, session: str, seq: int, op: protocol.Operation, *, limit: float, what: str
    ) -> protocol.Reply:
        """Send a request and wait for its answer (a `Failure` raises the error it stands for)."""
        if self._error is not None:
            raise self._error
        try:
            frames = protocol.pack(protocol.Request(session, seq, op))
        except (TypeError, OverflowError, ValueError, RecursionError) as error:
            fix = "use numbers, text, lists, dicts and numpy arrays"
            raise ConfigError(f"{what} cannot be sent to a worker: {error}", fix=fix) from error
        request_id = struct.pack(">Q", next(self._ids))
        call = Call(session, what, limit, self._loop.create_future(), time.monotonic() + limit)
        self._calls[request_id] = call
        self._socket.send_multipart([request_id, *frames], zmq.NOBLOCK, copy=False)
        self._poke()
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(_SWEEP, self._sweep)
        try:
            reply = await call.future
        finally:
            self._calls.pop(request_id, None)
        if isinstance(reply, protocol.Failure):
            raise protocol.error_of(reply)
        return reply

    def tell(self, op: protocol.Operation) -> None:
        """Send a request whose answer nobody waits for."""
        if not self._socket.closed:
            self._socket.send_multipart([b"\0" * 8, *protocol.pack(protocol.Request("", 0, op))], zmq.NOBLOCK)

    def fail(self, error_for: Callable[[Call], TideError], later: TideError) -> None:
        """The worker is gone: fail each call with `error_for(call)`, and every later call with `later`."""
        self._error = later
        for call in self._calls.values():
            if not call.future.done():
                call.future.set_exception(error_for(call))
        self.close()

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if self._socket.closed:
            return
        if self._error is None:
            self._error = WorkerDied("the connection to the worker is closed")
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._loop.remove_reader(self._fd)
        self._socket.close()

    def _poke(self) -> None:
        # The socket's file descriptor is edge triggered, and a send may swallow the edge of an answer.
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        for _ in range(_BURST):
            if self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            call = self._calls.get(frames[0])
            if call is None or call.future.done():
                continue  # cancelled, or given up
            try:
                call.future.set_result(protocol.unpack_reply(frames[1:]))
            except InfrastructureError as error:
                call.future.set_exception(error)
        self._loop.call_soon(self._receive)

    def _sweep(self) -> None:
        """Every 50 ms while calls are under way: the second line behind the worker's own watchdog."""
        self._sweeper = None
        late, now = False, time.monotonic()
        for call in self._calls.values():
            if call.future.done() or now < call.deadline + GRACE:
                continue
            if call.overdue:
                call.future.set_exception(call.timed_out())
                late = True
            # Else the loop itself may have been held up, with the answer waiting: one more round.
            call.overdue = True
        if self._calls:
            self._sweeper = self._loop.call_later(_SWEEP, self._sweep)
        if late:
            self._on_overdue()


class RemoteSession:
    """An `EnvSession` in a worker; made by `open`, ended by `close`.

    Args:
        on_closed: called once, when the worker has freed the session's place or is gone.
    """

    spec: SessionSpec

    def __init__(self, connection: WorkerConnection, env_id: str, *, on_closed: Callable[[], None]) -> None:
        self.id = secrets.token_hex(16)
        self._connection, self._env_id, self._on_closed = connection, env_id, on_closed
        self._seq = 0
        self._abandoned = False
        self._lock = asyncio.Lock()
        self._ended: str | None = None
        self._closing: asyncio.Task[None] | None = None
        self._reset_timeout = self._step_timeout = _SIDE_TIMEOUT

    async def open(self, kwargs: dict[str, Any], origin: protocol.Origin | None, timeout: float) -> None:
        """Make the environment in the worker and learn its `spec`."""
        reply = await self._call(
            protocol.Open(self._env_id, kwargs, origin, timeout), protocol.Opened, timeout, fatal=True
        )
        self.spec = reply.spec
        self._reset_timeout, self._step_timeout = reply.spec.reset_timeout, reply.spec.step_timeout

    async def reset(
        self, seed: int | None = None, task: Any = None, split: str = "train", *, timeout: float | None = None
    ) -> tuple[tuple[Message, ...], dict[str, Any]]:
        """See `EnvSession.reset`."""
        op = protocol.Reset(seed, task, split, timeout)
        reply = await self._call(op, protocol.Observed, _shorter(self._reset_timeout, timeout), fatal=True)
        self._step_timeout = reply.step_timeout
        return tuple(reply.messages), reply.info

    async def step(
        self, action: Action, *, timeout: float | None = None
    ) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        """See `EnvSession.step`."""
        op = protocol.Step(action, timeout)
        reply = await self._call(op, protocol.Observed, _shorter(self._step_timeout, timeout), fatal=True)
        self._step_timeout = reply.step_timeout
        return tuple(reply.messages), reply.reward, reply.terminated, reply.truncated, reply.info

    async def oracle(self) -> Action:
        """See `EnvSession.oracle`."""
        return (await self._call(protocol.Oracle(), protocol.Acted, self._step_timeout)).action

    async def truncate(self, reason: EndReason) -> tuple[float, dict[str, Any]]:
        """See `EnvSession.truncate`."""
        reply = await self._call(protocol.Truncate(reason.value), protocol.Credited, self._step_timeout)
        return reply.reward, reply.info

    async def tasks(self, split: str) -> list[Any]:
        """Ids of the tasks of `split`."""
        return (await self._call(protocol.Tasks(split), protocol.TaskIds, self._reset_timeout)).ids

    async def close(self) -> None:
        """See `EnvSession.close`. Does not wait for a call that was cancelled and still runs."""
        closing = self._start_closing()
        if not self._abandoned:
            await asyncio.shield(closing)  # a cancelled caller must not leave the place taken

    async def _call(
        self, op: protocol.Operation, expected: type[R], limit: float, *, fatal: bool = False
    ) -> R:
        what = f"{type(op).__name__.lower()} of {self._env_id}"
        async with self._lock:
            if self._ended is not None:
                fix = "open a new session"
                raise InfrastructureError(f"the session of {self._env_id} has ended: {self._ended}", fix=fix)
            seq, self._seq = self._seq, self._seq + 1
            try:
                reply = await self._connection.call(self.id, seq, op, limit=limit, what=what)
            except ConfigError:
                self._seq = seq  # nothing was sent
                raise
            except (TideError, asyncio.CancelledError) as error:
                if fatal or isinstance(error, (WorkerDied, StepTimeout, asyncio.CancelledError)):
                    self._abandoned = isinstance(error, asyncio.CancelledError)
                    self._ended = str(error) or "its last call was cancelled"
                    self._start_closing()
                raise
        if not isinstance(reply, expected):
            raise protocol.ProtocolError(f"the worker answered {what} with {type(reply).__name__}")
        return reply

    def _start_closing(self) -> asyncio.Task[None]:
        if self._closing is None:
            self._ended = self._ended or "it was closed"
            self._closing = asyncio.create_task(self._close(), name=f"close {self._env_id}")
        return self._closing

    async def _close(self) -> None:
        limit = _CLOSE_TIMEOUT
        if self._abandoned:  # a call that was cancelled may still run in the worker, until its own limit
            limit += max(self._step_timeout, self._reset_timeout)
        what = f"close of {self._env_id}"
        try:
            reply = await self._connection.call(self.id, self._seq, protocol.Close(), limit=limit, what=what)
            if not isinstance(reply, protocol.Closed):
                logger.warning("the worker answered %s with %s", what, type(reply).__name__)
        except (WorkerDied, StepTimeout):
            logger.debug("%s: its worker is gone", what)
        except (Busy, InfrastructureError) as error:
            logger.warning("%s failed: %s", what, error)
        finally:
            self._on_closed()


def _shorter(own: float, asked: float | None) -> float:
    return own if asked is None else min(own, asked)
