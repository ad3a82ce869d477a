"""A small table of int64 shared by the engine process and its parent.

Invariant: each cell has one writer (the scheduler, except `VERSION`, which the parent writes while the
engine is paused), and an aligned 8-byte store is atomic, so a reader may look at any time without a call
into the engine. The table lives in a memory file that vanishes with the last process that has it open:
nothing is ever left on disk or in /dev/shm, whoever is killed.
"""

from __future__ import annotations

import mmap
import os
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

    FREE_BLOCKS = 16
    RUNNING = 17
    HELD = 18
    WAITING = 19

    VERSION = 24


HEADER = 32
SLOT_CELLS = 4  # turn, prompt tokens, cached tokens, spare


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

    def set_turn(self, slot: int, turn: int, prompt: int, cached: int) -> None:
        """Note a turn's context length and how much of it needed no computing (tokens)."""
        at = HEADER + SLOT_CELLS * slot
        self.cells[at : at + 3] = (turn, prompt, cached)

    def turn(self, slot: int) -> tuple[int, int, int]:
        """(turn, prompt tokens, cached tokens) of the slot's latest turn."""
        at = HEADER + SLOT_CELLS * slot
        turn, prompt, cached = self.cells[at : at + 3]
        return int(turn), int(prompt), int(cached)

    def close(self) -> None:
        """Give the memory back; the other side keeps its own view."""
        self.cells = np.zeros(0, dtype=np.int64)
        self._map.close()
        os.close(self.fd)
