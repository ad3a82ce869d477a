"""Attention over a prefix tree, as a transformers attention function.

Invariant: exactly softmax(q k^T scale) v over each token's ancestors and itself; blocks only decide
which dense calls compute it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tiderl.training.packing import AttentionBlock

NAME = "tiderl_tree"


class TreePlan:
    """The blocks of one pack with their masks as tensors, made once and used by every layer."""

    def __init__(
        self,
        blocks: list[AttentionBlock],
        device: torch.device,
        dtype: torch.dtype,
        backward_dtype: torch.dtype | None = None,
    ) -> None:
        self.blocks = blocks
        self.backward_dtype = backward_dtype or dtype
        """Precision of the backward pass's products."""
        self.inner_masks: list[torch.Tensor] = []
        """Additive (queries, queries) masks among each block's own tokens; older keys are all ancestors."""
        for block in blocks:
            allowed = torch.from_numpy(block.inner).to(device)
            bias = torch.zeros(allowed.shape, dtype=dtype, device=device)
            self.inner_masks.append(bias.masked_fill_(~allowed, float("-inf")))


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    tree_plan: TreePlan | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """q (1, heads, N, d), k and v (1, kv heads, N, d) -> (1, N, heads, d); `tree_plan` is required."""
    if tree_plan is None:
        raise ValueError("tree attention was called without its plan")
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    outputs = []
    for block, inner in zip(tree_plan.blocks, tree_plan.inner_masks, strict=True):
        before = sum(b - a for a, b in block.keys) - len(inner)
        mask = F.pad(inner, (before, 0))
        k = torch.cat([key[:, :, a:b] for a, b in block.keys], 2)
        v = torch.cat([value[:, :, a:b] for a, b in block.keys], 2)
        q = query[:, :, block.start : block.end]
        outputs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling))
    order = sorted(range(len(outputs)), key=lambda i: tree_plan.blocks[i].start)
    return torch.cat([outputs[i] for i in order], 2).transpose(1, 2).contiguous(), None


def register() -> None:
    """Make `attn_implementation="tiderl_tree"` known to transformers (idempotent)."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, tree_attention)
