"""What an environment is: `AgentEnv`, messages, tools, spaces, limits, the registry.

Invariant: importing this package needs NumPy and Gymnasium and nothing heavier; it imports no plug-in.
"""

from __future__ import annotations

from tiderl.env import messages
from tiderl.env.base import AgentEnv
from tiderl.env.ends import EndReason
from tiderl.env.limits import Limits
from tiderl.env.registry import EnvironmentSpec, list_environments, make, register, spec
from tiderl.env.spaces import MessageSpace, ReplySpace
from tiderl.env.tasks import LazyTasks
from tiderl.env.tools import ToolFault, tool

__all__ = [
    "AgentEnv",
    "EndReason",
    "EnvironmentSpec",
    "LazyTasks",
    "Limits",
    "MessageSpace",
    "ReplySpace",
    "ToolFault",
    "list_environments",
    "make",
    "messages",
    "register",
    "spec",
    "tool",
]
