"""TideRL: reinforcement learning of LLM agents on multi-turn, multi-modal tasks."""

from __future__ import annotations

__version__ = "0.1.0"
