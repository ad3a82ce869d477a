"""TideRL: reinforcement learning of LLM agents on multi-turn, multi-modal tasks.

Invariant: importing this package imports nothing heavy; the names below are loaded when first used.
Where Gymnasium is loaded already, the plug-ins are registered at once, so that
`gymnasium.make("tiderl:tide/Safe-v0")` works.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiderl.env import messages as messages
    from tiderl.env.base import AgentEnv as AgentEnv
    from tiderl.env.checker import check_environment as check_environment
    from tiderl.env.ends import EndReason as EndReason
    from tiderl.env.registry import list_environments as list_environments
    from tiderl.env.registry import make as make
    from tiderl.env.registry import register as register
    from tiderl.env.registry import spec as spec
    from tiderl.env.tools import tool as tool

__version__ = "0.1.0"

_HOMES = {
    "AgentEnv": "tiderl.env.base",
    "EndReason": "tiderl.env.ends",
    "check_environment": "tiderl.env.checker",
    "list_environments": "tiderl.env.registry",
    "make": "tiderl.env.registry",
    "messages": "tiderl.env",
    "register": "tiderl.env.registry",
    "spec": "tiderl.env.registry",
    "tool": "tiderl.env.tools",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tiderl' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


if "gymnasium" in sys.modules:
    importlib.import_module("tiderl.env.registry").discover()
