"""A workload's seconds on a machine of another speed than the one they were written for.

What a benchmark shows turns on how long environments take beside the engine's work. Where a workload says how
fast its engine was (`measure.reference_tokens_per_s`), all its seconds are stretched alike on another one.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from tiderl.bench.rollout.cell import Cell
from tiderl.errors import ResourceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiderl.bench.rollout.setup import Bench
    from tiderl.bench.rollout.workload import Workload

BESIDE = 8
"""Episodes beside each other while the engine's speed is measured."""
WARMUP_S, SECONDS = 4.0, 12.0


async def measured_tokens_per_s(bench: Bench, tell: Callable[[float, str], None]) -> float:
    """Sampled tokens per second of the workload's episodes when environments answer at once.

    Raises:
        ResourceError: nothing was sampled.
    """
    found = await Cell(_over(bench, probe(bench.plan.workload), 0.0), "async", seed=0, tell=tell).run()
    speed = float(found["sampled_tokens_per_s"])
    if speed <= 0.0:
        raise ResourceError(
            f"the engine sampled nothing in {SECONDS:.0f} s",
            where=f"workload {bench.plan.workload.name}",
            fix="take a smaller model, or leave measure.reference_tokens_per_s out",
        )
    return speed


def stretched(bench: Bench, factor: float) -> Bench:
    """The same engines, where everything that takes its time takes `factor` times as long."""
    workload = bench.plan.workload
    trainer, measure = workload.trainer, workload.measure
    longer = workload.model_copy(
        update={
            "trainer": trainer.model_copy(
                update={
                    "update_s": trainer.update_s * factor,
                    "publish_every_s": trainer.publish_every_s * factor,
                }
            ),
            "measure": measure.model_copy(
                update={
                    "warmup_s": measure.warmup_s * factor,
                    "seconds": measure.seconds * factor,
                    "timeout_s": measure.timeout_s * max(1.0, factor),
                }
            ),
        }
    )
    return _over(bench, longer, factor)


def probe(workload: Workload) -> Workload:
    """The same episodes with few beside each other, and a trainer that is never in the way."""
    load, measure = workload.load, workload.measure
    few = max(load.group_size, min(BESIDE, load.concurrency))
    return workload.model_copy(
        update={
            "load": load.model_copy(update={"concurrency": few, "max_staleness": 1000}),
            "trainer": workload.trainer.model_copy(update={"update_s": 0.0, "publish_every_s": 1e6}),
            "measure": measure.model_copy(update={"warmup_s": WARMUP_S, "seconds": SECONDS}),
            "policies": {},
        }
    )


def _over(bench: Bench, workload: Workload, pace: float) -> Bench:
    other = copy.copy(bench)
    other.plan = replace(bench.plan, workload=workload, arguments=bench.plan.arguments | {"pace": pace})
    return other
