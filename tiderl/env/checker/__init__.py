"""The gate for authors: what `tiderl env check` runs.

Invariant: a check reports every fault that it names as an item with what was seen and what to do;
it raises only for what is no fault of the environment (an unknown id, a wrong argument).
"""

from __future__ import annotations

from tiderl.env.checker.report import CheckItem, CheckReport
from tiderl.env.checker.run import check_environment

__all__ = ["CheckItem", "CheckReport", "check_environment"]
