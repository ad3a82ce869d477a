"""Pure decisions: no I/O, no clock, no torch, nothing of ours but itself."""

from tiderl.scheduling.decisions import Plan, Policy
from tiderl.scheduling.policies import POLICIES, make_policy

__all__ = ["POLICIES", "Plan", "Policy", "make_policy"]
