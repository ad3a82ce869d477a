"""What a running check tells whoever watches it, in one thread, or from another process.

Invariant: an event is a plain JSON object; the watcher learns of the beginning of a call before the
author's code runs, so that a call which never returns is known by name and deadline.
"""

from __future__ import annotations

import json
import os
import queue
import select
import time
from abc import ABC, abstractmethod
from typing import Any, Protocol

from tiderl.env.checker.driver import Abandoned
from tiderl.env.checker.report import CheckItem

Event = dict[str, Any]


class Source(Protocol):
    """Where a watcher gets events."""

    def get(self, timeout: float) -> Event | None:
        """The next event; None after `timeout` seconds without one.

        Raises:
            EOFError: no event will come any more.
        """
        ...


class Sender(ABC):
    """Turns the calls of a check into events; the base of both ways."""

    @abstractmethod
    def send(self, event: Event) -> None:
        """Pass an event on."""

    def begin(self, label: str, seconds: float, *, own: bool = True) -> None:
        """See `Monitor.begin`."""
        self.send({"event": "begin", "label": label, "seconds": seconds, "own": own})

    def end(self) -> None:
        """See `Monitor.end`."""
        self.send({"event": "end"})

    def phase(self, name: str) -> None:
        """See `Reporter.phase`."""
        self.send({"event": "phase", "name": name})

    def report(self, item: CheckItem) -> None:
        """See `Reporter.report`."""
        self.send({"event": "item", "item": item.to_json()})

    def done(self) -> None:
        """The check is over."""
        self.send({"event": "done"})


class QueueSender(Sender):
    """Events of a thread; also the `Source` of its watcher."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.muted = False

    def send(self, event: Event) -> None:
        """Queue an event.

        Raises:
            Abandoned: nobody watches any more; this ends the thread, also after a call that hung.
        """
        if self.muted:
            raise Abandoned
        self._queue.put(event)

    def get(self, timeout: float) -> Event | None:
        """See `Source.get`."""
        try:
            return self._queue.get(timeout=max(0.0, timeout))
        except queue.Empty:
            return None


class PipeSender(Sender):
    """Events of a process, a JSON line each."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def send(self, event: Event) -> None:
        """Write an event.

        Raises:
            Abandoned: nobody reads any more.
        """
        data = json.dumps(event).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except BrokenPipeError:
            raise Abandoned from None


class PipeSource:
    """The reading end of a `PipeSender`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffer = b""

    def get(self, timeout: float) -> Event | None:
        """See `Source.get`."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            data = os.read(self._descriptor, 65_536)
            if not data:
                raise EOFError
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        event: Event = json.loads(line)
        return event


class Watcher:
    """Collects the items of one check and notices when a call passes its deadline.

    Concurrent calls (sessions in threads) are counted; the latest deadline holds.
    """

    GRACE = 0.5

    def __init__(self, source: Source, on_item: Any = None, silence: float = 120.0) -> None:
        self.source, self.on_item, self.silence = source, on_item, silence
        self.items: dict[str, CheckItem] = {}
        self.phase = "start"
        self.finished = False
        self.slowest = (0.0, "")
        self._open, self._own = 0, False
        self._label, self._began, self._deadline = "the start of the check", time.monotonic(), silence

    def watch(self) -> CheckItem | None:
        """Handle events until the check is over, or until a call hangs: then the item that says so.

        Raises:
            EOFError: the sender is gone without having finished.
        """
        while not self.finished:
            now = time.monotonic()
            limit = self._began + self._deadline + self.GRACE
            event = self.source.get(min(1.0, max(0.0, limit - now)))
            if event is not None:
                self._handle(event)
            elif time.monotonic() > limit:
                return self._hung()
        return None

    def add(self, item: CheckItem) -> None:
        """Keep an item, and show it."""
        self.items[item.name] = item
        if self.on_item is not None:
            self.on_item(item)

    def _handle(self, event: Event) -> None:
        now = time.monotonic()
        kind = event["event"]
        if kind == "begin":
            self._open += 1
            if self._open == 1 or now + event["seconds"] > self._began + self._deadline:
                self._label, self._began, self._deadline = event["label"], now, float(event["seconds"])
                self._own = event["own"]
        elif kind == "end":
            self._open -= 1
            if self._own and self._open == 0 and now - self._began > self.slowest[0]:
                self.slowest = (now - self._began, self._label)
            if self._open == 0:
                self._label, self._began, self._deadline = f"the check of {self.phase}", now, self.silence
        elif kind == "phase":
            self.phase, self._began = event["name"], now
        elif kind == "item":
            self.add(CheckItem.from_json(event["item"]))
        elif kind == "done":
            self.finished = True

    def _hung(self) -> CheckItem:
        return CheckItem(
            "deadlines",
            "fail",
            f"{self._label} did not answer within {self._deadline:g} s (while checking {self.phase})",
            "let it return in time, or set reset_timeout or step_timeout to what it needs",
            self._deadline,
        )
