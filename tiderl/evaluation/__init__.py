"""Runs policies, journals results, reports.

Invariant: importing this package needs neither an engine nor a trainer; `hf:` and `run:` policies load theirs
when they are asked for.
"""

from __future__ import annotations

from .plan import EvaluationPlan, PlannedEpisode, plan_episodes
from .result import EpisodeResult, EvaluationResult
from .runner import evaluate

__all__ = [
    "EpisodeResult",
    "EvaluationPlan",
    "EvaluationResult",
    "PlannedEpisode",
    "evaluate",
    "plan_episodes",
]
