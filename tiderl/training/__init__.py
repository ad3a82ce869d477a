"""GRPO in torch: advantages, losses, packing, the training replica and its checkpoints.

Invariant: importing this package imports no torch; `Replica` is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiderl.training.settings import LoraSettings, LossSettings, ModelSettings, OptimSettings

if TYPE_CHECKING:
    from tiderl.training.replica import Replica
    from tiderl.training.stats import UpdateStats

__all__ = ["LoraSettings", "LossSettings", "ModelSettings", "OptimSettings", "Replica", "UpdateStats"]


def __getattr__(name: str) -> Any:
    if name == "Replica":
        from tiderl.training.replica import Replica

        return Replica
    if name == "UpdateStats":
        from tiderl.training.stats import UpdateStats

        return UpdateStats
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
