"""One session inside a worker: an environment object and the thread that alone touches it.

Invariants: the environment is made, stepped and closed on one thread; a request whose sequence number
was seen is answered from the record and never executed again; after `reset` or `step` raised, the
environment is closed at once and its place is free.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from tiderl.env.ends import EndReason
from tiderl.errors import EnvironmentFault, InfrastructureError
from tiderl.hub import origin, protocol
from tiderl.hub.base import SessionSpec
from tiderl.hub.deadlines import DeadlineTable

CLOSE_TIMEOUT = 10.0
"""Seconds an environment has to close itself before its process is killed."""


@dataclass(frozen=True)
class Address:
    """Whom a reply goes to: the client's identity and its request id."""

    client: bytes
    request: bytes


class HostedSession:
    """The worker's side of a session.

    Args:
        post: sends frames to an address; may be called from any thread.
        finished: called once, on the session's thread, when the environment is closed.
    """

    def __init__(
        self,
        session_id: str,
        slot: int,
        table: DeadlineTable,
        post: Callable[[Address, list[bytes]], None],
        finished: Callable[[HostedSession], None],
    ) -> None:
        self.id, self.slot = session_id, slot
        self._table, self._post, self._finished = table, post, finished
        self._env: Any = None
        self._where = ""
        self._lock = threading.Lock()
        self._seq = -1
        self._recorded: list[bytes] | None = []
        self._reply_to: Address | None = None
        self._closers: list[Address] = []
        self._queue: SimpleQueue[protocol.Operation] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"session-{slot}", daemon=True)
        table.assign(slot, session_id)

    def start(self) -> None:
        self._thread.start()

    def submit(self, sender: Address, request: protocol.Request) -> None:
        """Take a request; called on the worker's main thread, never blocks."""
        with self._lock:
            if isinstance(request.op, protocol.Close):
                self._closers.append(sender)
                self._queue.put(request.op)
                return
            if request.seq == self._seq:
                if self._recorded is None:
                    self._reply_to = sender  # still running: its answer goes to whoever asked last
                else:
                    self._post(sender, self._recorded)
                return
            if request.seq != self._seq + 1 or self._recorded is None:
                problem = "while the last one runs" if self._recorded is None else f"after number {self._seq}"
                what = f"call number {request.seq} of a session arrived {problem}"
                self._post(
                    sender, protocol.pack(protocol.Failure(InfrastructureError.__name__, what, self._where))
                )
                return
            self._seq, self._recorded, self._reply_to = request.seq, None, sender
            self._table.arm(self.slot, self._limit(request.op))
        self._queue.put(request.op)

    @property
    def busy(self) -> bool:
        """Whether a call runs."""
        return self._recorded is None

    def ask_to_close(self) -> None:
        """Close when the running call has ended, for nobody in particular."""
        self._queue.put(protocol.Close())

    def close_addresses(self) -> list[Address]:
        """Who still waits for the close; emptied by the call."""
        with self._lock:
            closers, self._closers = self._closers, []
            return closers

    def _limit(self, op: protocol.Operation) -> float:
        if isinstance(op, protocol.Open):
            return op.timeout
        slow = isinstance(op, (protocol.Reset, protocol.Tasks))
        own = getattr(self._env, "reset_timeout" if slow else "step_timeout", None)
        asked = op.timeout if isinstance(op, (protocol.Reset, protocol.Step)) else None
        return min(math.inf if own is None else float(own), math.inf if asked is None else asked)

    def _run(self) -> None:
        while True:
            op = self._queue.get()
            if isinstance(op, protocol.Close):
                break
            fatal = False
            try:
                reply = self._execute(op)
            # The boundary of the thread: `SystemExit` of a module that exits on import is a fault too.
            except BaseException as error:  # noqa: BLE001
                reply = self._failure(op, error)
                fatal = isinstance(op, (protocol.Open, protocol.Reset, protocol.Step))
            self._answer(reply)
            if fatal:
                break
        self._close_environment()
        self._finished(self)

    def _answer(self, reply: protocol.Reply) -> None:
        try:
            frames = protocol.pack(reply)
        except (TypeError, OverflowError, ValueError, RecursionError) as error:
            what = f"an answer of the environment cannot be sent: {error}"
            fix = "put only messages, numbers, text, lists, dicts and numpy arrays into observations and info"
            frames = protocol.pack(protocol.Failure(EnvironmentFault.__name__, what, self._where, fix))
        with self._lock:
            self._table.disarm(self.slot)
            self._recorded = frames
            if self._reply_to is not None:
                self._post(self._reply_to, frames)

    def _execute(self, op: protocol.Operation) -> protocol.Reply:
        if isinstance(op, protocol.Open):
            return self._open(op)
        if isinstance(op, protocol.Reset):
            options = None if op.task is None else {"task": op.task, "split": op.split}
            if options is None and op.split != "train":
                options = {"split": op.split}
            messages, info = self._env.reset(seed=op.seed, options=options)
            return self._observed(messages, info)
        if isinstance(op, protocol.Step):
            messages, reward, terminated, truncated, info = self._env.step(op.action)
            return self._observed(messages, info, reward, terminated, truncated)
        if isinstance(op, protocol.Oracle):
            return protocol.Acted(self._env.oracle())
        if isinstance(op, protocol.Tasks):
            return protocol.TaskIds(self._env.task_lists.ids(op.split))
        if isinstance(op, protocol.Truncate):
            credit, info = self._env.truncate(EndReason(op.reason))
            return protocol.Credited(float(credit), info)
        raise InfrastructureError(f"a session does not understand {type(op).__name__}")

    def _open(self, op: protocol.Open) -> protocol.Opened:
        self._where = op.env_id
        self._env = env = origin.make(op.env_id, op.kwargs, op.origin)
        low, high = env.reward_range
        return protocol.Opened(
            SessionSpec(
                env_id=op.env_id,
                tools=list(env.tools),
                max_turns=env.max_turns,
                max_total_tokens=env.max_total_tokens,
                episode_timeout=float(env.episode_timeout),
                reward_range=(float(low), float(high)),
                splits=tuple(env.splits),
                step_timeout=float(env.step_timeout),
                reset_timeout=float(env.reset_timeout),
            )
        )

    def _observed(
        self, messages: Any, info: Any, reward: Any = 0.0, terminated: Any = False, truncated: Any = False
    ) -> protocol.Observed:
        if not isinstance(messages, (tuple, list)) or not isinstance(info, dict):
            what = (
                f"observation and info must be a tuple of messages and a dict, not {type(messages).__name__}"
            )
            raise EnvironmentFault(f"{what} and {type(info).__name__}", where=self._where)
        if reward is None:
            raise EnvironmentFault(
                "step returned None as the reward", where=self._where, fix="return a float"
            )
        limit = float(self._env.step_timeout)
        return protocol.Observed(
            list(messages), info, float(reward), bool(terminated), bool(truncated), limit
        )

    def _failure(self, op: protocol.Operation, error: BaseException) -> protocol.Failure:
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else 1
            what = f"the environment's code left with exit code {code}: {error.code}"
            fault = EnvironmentFault(what, where=self._where)
            return protocol.failure_of(fault.with_traceback(error.__traceback__), self._where)
        return protocol.failure_of(error, f"{type(op).__name__.lower()} of {self._where}")

    def _close_environment(self) -> None:
        self._table.arm(self.slot, CLOSE_TIMEOUT)
        try:
            if self._env is not None:
                self._env.close()
        except BaseException as error:  # noqa: BLE001 - the thread's boundary, with nobody to raise to
            print(f"closing {self._where} raised {error!r}", flush=True)
        self._env = None
        self._table.disarm(self.slot)


def closed() -> list[bytes]:
    """The frames that answer a close."""
    return protocol.pack(protocol.Closed())
