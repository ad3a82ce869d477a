"""How token losses become one number.

Invariant: the update is (sum of weight x token loss over all tokens) / (global denominator at the step).
Weight and denominator depend on loss masks only, never on micro-batches, clipping or corrections.
"""

from __future__ import annotations

from tiderl.training.settings import Aggregation


def token_weight(kind: Aggregation, episode_tokens: int, token_norm: float = 1.0) -> float:
    """Weight of each loss token of an episode that has `episode_tokens` of them (> 0)."""
    if kind == "token_mean":
        return 1.0
    if kind == "seq_mean_token_mean":
        return 1.0 / episode_tokens
    return 1.0 / token_norm


def denominator(kind: Aggregation, episode_tokens: int) -> float:
    """What one episode adds to the global denominator: its tokens, or 1 for the sequence means."""
    return float(episode_tokens) if kind == "token_mean" else 1.0
