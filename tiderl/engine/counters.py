"""A small table of int64 shared by the engine process and its parent.

Invariant: each cell has one writer (the scheduler, except `VERSION`, which the parent writes while the
engine is paused), and an aligned 8-byte store is atomic, so a reader may look at any time without a call
into the engine. The table lives in a memory file that vanishes with the last process that has it open:
nothing is ever left on disk or in /dev/shm, whoever is killed.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class Cell(IntEnum):
    """Index of each cell. The first group is the engine's effective configuration, read back at start."""

    PID = 0
    BLOCKS = 1
    """KV blocks that can hold tokens (the null block is not counted)."""
    BLOCK_SIZE = 2
    MAX_MODEL_LEN = 3
    MAX_SEQS = 4
    PREFIX_CACHING = 5
    KV_GROUPS = 6

    PREFILL = 8
    DECODE = 9
    LATER_PROMPT = 10
    LATER_CACHED = 11
    REPREFILLED = 12
    PREEMPTIONS = 13
    STEPS = 14
    EVICTED = 15
    """Blocks that the prefix cache gave up to make room."""

    FREE_BLOCKS = 16
    RUNNING = 17
    HELD = 18
    WAITING = 19

    STEP_NS = 20
    """What a step costs, then a sampled token in it, then a prompt token; 0 until measured."""
    DECODE_NS = 21
    PREFILL_NS = 22

    VERSION = 24


class SlotCell(IntEnum):
    """What the scheduler notes about a slot's latest turn. Times are CLOCK_MONOTONIC in microseconds."""

    TURN = 0
    PROMPT = 1
    CACHED = 2
    AGAIN = 3
    """Tokens computed a second time in this turn."""
    KV_VERSION = 4
    SALT = 5
    """The version whose prefix cache the request reads and writes."""
    ARRIVED = 6
    SCHEDULED = 7
    PREFILLED = 8
    """0 until the prompt is computed."""


HEADER = 32
SLOT_CELLS = 12


@dataclass(frozen=True)
class TurnCounts:
    """A slot's latest turn, in the scheduler's words."""

    turn: int
    prompt: int
    cached: int
    again: int
    kv_version: int
    salt: int
    queue_seconds: float
    prefill_seconds: float


class Counters:
    """The table. `create` in the parent, `open` in the engine."""

    def __init__(self, fd: int, slots: int) -> None:
        self.fd = fd
        self.slots = slots
        self._map = mmap.mmap(fd, 8 * (HEADER + SLOT_CELLS * slots))
        self.cells = np.frombuffer(self._map, dtype=np.int64)

    @classmethod
    def create(cls, slots: int) -> Counters:
        fd = os.memfd_create("tiderl-counters")
        os.ftruncate(fd, 8 * (HEADER + SLOT_CELLS * slots))
        return cls(fd, slots)

    @classmethod
    def open(cls, path: str, slots: int) -> Counters:
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), slots)

    @property
    def path(self) -> str:
        """A path under which a process of the same user can open the table."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def __getitem__(self, cell: int) -> int:
        return int(self.cells[cell])

    def __setitem__(self, cell: int, value: int) -> None:
        self.cells[cell] = value

    def note(self, slot: int, first: SlotCell, *values: int) -> None:
        """Write cells of a slot, from `first` on."""
        at = HEADER + SLOT_CELLS * slot + first
        self.cells[at : at + len(values)] = values

    def add(self, slot: int, cell: SlotCell, value: int) -> None:
        """Add to a cell of a slot."""
        self.cells[HEADER + SLOT_CELLS * slot + cell] += value

    def turn(self, slot: int) -> TurnCounts:
        """What the scheduler counted of the slot's latest turn."""
        at = HEADER + SLOT_CELLS * slot
        row = [int(value) for value in self.cells[at : at + len(SlotCell)]]
        turn, prompt, cached, again, kv_version, salt, arrived, scheduled, prefilled = row
        return TurnCounts(
            turn,
            prompt,
            cached,
            again,
            kv_version,
            salt,
            queue_seconds=max(0, scheduled - arrived) / 1e6,
            prefill_seconds=max(0, prefilled - scheduled) / 1e6,
        )

    def close(self) -> None:
        """Give the memory back; the other side keeps its own view."""
        self.cells = np.zeros(0, dtype=np.int64)
        self._map.close()
        os.close(self.fd)
