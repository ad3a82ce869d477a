"""Figures of an engine, read from the scheduler's table and our own budget.

Invariant: no call into the engine and nothing that waits; cheap enough for many reads a second.
"""

from __future__ import annotations

from tiderl.engine.base import Audit, EngineStats, StepCost
from tiderl.engine.budget import KVBudget
from tiderl.engine.counters import Cell, Counters
from tiderl.engine.settings import EngineSettings
from tiderl.errors import EngineError


def stats_of(cells: Counters, budget: KVBudget, version: int) -> EngineStats:
    """The scheduler's counters."""
    return EngineStats(
        version=version,
        capacity_tokens=budget.capacity_tokens,
        free_tokens=cells[Cell.FREE_BLOCKS] // budget.groups * budget.block_size,
        running=cells[Cell.RUNNING],
        held=cells[Cell.HELD],
        waiting=cells[Cell.WAITING] + budget.waiting,
        preemptions=cells[Cell.PREEMPTIONS],
        prefill_tokens=cells[Cell.PREFILL],
        decode_tokens=cells[Cell.DECODE],
        later_prompt_tokens=cells[Cell.LATER_PROMPT],
        later_cached_tokens=cells[Cell.LATER_CACHED],
        reprefilled_tokens=cells[Cell.REPREFILLED],
        evicted_tokens=cells[Cell.EVICTED] // budget.groups * budget.block_size,
        cost=StepCost(*(cells[cell] / 1e9 for cell in (Cell.STEP_NS, Cell.DECODE_NS, Cell.PREFILL_NS))),
    )


def audit_of(cells: Counters, budget: KVBudget, held: int) -> Audit:
    """Our promises beside the scheduler's figures; `held`: sessions of ours between two turns."""
    return Audit(
        promised_tokens=budget.promised_tokens,
        used_tokens=(budget.blocks - cells[Cell.FREE_BLOCKS]) // budget.groups * budget.block_size,
        sessions=budget.open,
        held_here=held,
        held_there=cells[Cell.HELD],
        running_there=cells[Cell.RUNNING] + cells[Cell.WAITING],
    )


def check_effective(settings: EngineSettings, cells: Counters) -> None:
    """Compare what the scheduler runs with against what was asked for. Raises EngineError."""
    wanted = {
        Cell.BLOCKS: settings.kv_blocks,
        Cell.BLOCK_SIZE: settings.block_size,
        Cell.MAX_MODEL_LEN: settings.max_model_len,
        Cell.MAX_SEQS: settings.max_sessions,
        Cell.PREFIX_CACHING: 1,
    }
    for cell, value in wanted.items():
        if cells[cell] != value:
            raise EngineError(
                f"the engine runs with {cell.name.lower()} {cells[cell]} where {value} was asked for",
                where="effective configuration",
                fix="change the setting to what the model allows",
            )
