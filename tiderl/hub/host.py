"""The serving half of a worker: a ROUTER socket in the main thread, one thread per session.

Invariants: only the main thread touches the socket; it never runs an environment's code, so it always
answers; a message that cannot be read is refused and changes nothing.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections import deque

import zmq

from tiderl.errors import Busy, InfrastructureError
from tiderl.hub import origin
from tiderl.hub.deadlines import DeadlineTable
from tiderl.hub.hosted import Address, HostedSession, closed
from tiderl.hub.protocol import (
    MAX_FRAME_BYTES,
    VERSION,
    Close,
    Failure,
    Open,
    Ping,
    Pong,
    ProtocolError,
    Request,
    Stop,
    failure_of,
    pack,
    unpack_request,
)
from tiderl.processes import kill_below

_CLOSE_GRACE = 3.0
"""Seconds that environments have to close when the worker stops."""
_BUSY_GRACE = 0.5
"""Seconds for those in the middle of a call, which may never end."""
_BURST = 256


class Host:
    """Serves sessions on `endpoint` until it is told to stop or its watchdog process is gone.

    Args:
        table: deadlines, shared with the watchdog; its number of slots is the capacity.
        watchdog: process id of the watchdog.
    """

    def __init__(self, endpoint: str, table: DeadlineTable, watchdog: int) -> None:
        self._table, self._watchdog = table, watchdog
        self._free = list(range(table.slots - 1, -1, -1))
        self._sessions: dict[str, HostedSession] = {}
        self._outbox: deque[tuple[Address, list[bytes]]] = deque()
        self._ended: deque[HostedSession] = deque()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._woken = False
        self._stopped_at: float | None = None
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        # Each client has at most one call per session under way, so the queues are bounded by that.
        self._router.set_hwm(0)
        self._router.setsockopt(zmq.LINGER, 1000)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._router.bind(endpoint)

    def serve(self) -> None:
        """Run the loop; returns after `Stop` when all sessions are closed, or their time is up."""
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        while not self._may_leave():
            poller.poll(500 if self._stopped_at is None else 50)
            self._receive()
            self._send()
            if os.getppid() != self._watchdog:  # nobody enforces our deadlines any more
                kill_below(os.getpid())  # also what is in a group of its own: after our end nobody finds it
                os.killpg(0, signal.SIGKILL)
        self._send()
        self._context.destroy()

    def _may_leave(self) -> bool:
        if self._stopped_at is None:
            return False
        waited = time.monotonic() - self._stopped_at
        closing = any(not session.busy for session in self._sessions.values())
        return not self._sessions or waited > (_CLOSE_GRACE if closing else _BUSY_GRACE)

    def post(self, to: Address, frames: list[bytes]) -> None:
        """Queue a reply; from any thread."""
        self._outbox.append((to, frames))
        self._wake()

    def _finished(self, session: HostedSession) -> None:
        self._ended.append(session)
        self._wake()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            os.write(self._wake_write, b"w")

    def _receive(self) -> None:
        for _ in range(_BURST):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) < 3:
                continue  # no request id: there is nothing to answer to
            sender = Address(frames[0], frames[1])
            try:
                request = unpack_request(frames[2:])
            except ProtocolError as error:
                self.post(sender, pack(failure_of(error, "worker")))
                continue
            self._handle(sender, request)

    def _handle(self, sender: Address, request: Request) -> None:
        op = request.op
        session = self._sessions.get(request.session)
        if isinstance(op, Ping):
            self.post(sender, pack(Pong(VERSION, os.getpid(), self._table.slots)))
        elif isinstance(op, Stop):
            self._stopped_at = time.monotonic()
            for one in self._sessions.values():
                one.ask_to_close()
        elif session is not None:
            session.submit(sender, request)
        elif isinstance(op, Close):
            self.post(sender, closed())
        elif isinstance(op, Open) and request.seq == 0:
            self._open(sender, request)
        else:
            what = "the worker has no such session; it was closed, or ended by an error"
            self.post(sender, pack(Failure(InfrastructureError.__name__, what)))

    def _open(self, sender: Address, request: Request) -> None:
        if not self._free or self._stopped_at is not None:
            busy = Busy(f"the worker's {self._table.slots} sessions are all taken", retry_after=1.0)
            self.post(sender, pack(failure_of(busy, "worker")))
            return
        session = HostedSession(request.session, self._free.pop(), self._table, self.post, self._finished)
        self._sessions[request.session] = session
        session.start()
        session.submit(sender, request)

    def _send(self) -> None:
        try:
            os.read(self._wake_read, 4096)
        except BlockingIOError:
            pass  # woken by the socket, not by a session
        self._woken = False  # before the queues are emptied, so that nothing posted later is missed
        while self._outbox:
            to, frames = self._outbox.popleft()
            self._router.send_multipart([to.client, to.request, *frames], copy=False)
        while self._ended:
            session = self._ended.popleft()
            del self._sessions[session.id]
            self._free.append(session.slot)
            for to in session.close_addresses():
                self._router.send_multipart([to.client, to.request, *closed()])


def run(endpoint: str, table: DeadlineTable, watchdog: int) -> None:
    """Serve as the child of `watchdog`; returns when told to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the hub, which then stops its workers
    faulthandler.enable()
    sys.setswitchinterval(0.001)  # a computing environment must not hold up the others' answers
    host = Host(endpoint, table, watchdog)
    origin.prepare()
    host.serve()
    sys.stdout.flush()
    sys.stderr.flush()
