"""Token ids that are never sampled, as a vLLM logits processor.

Invariant: one assignment a step for the whole batch; log-probs are taken before it (`raw_logprobs`), so they
stay those of the model's full softmax, which is what the trainer computes.

`allowed_token_ids` would send the complement (the whole vocabulary) with every turn, and `logit_bias` only
makes an id unlikely.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor.interface import LogitsProcessor


class BannedTokens(LogitsProcessor):
    """Sets the logits of `additional_config["tiderl_banned"]` to minus infinity."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        ids = vllm_config.additional_config["tiderl_banned"]
        self.ids = torch.tensor(ids, dtype=torch.long, device=device)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill_(-1, self.ids, float("-inf"))

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        """Nothing depends on who is in the batch."""
