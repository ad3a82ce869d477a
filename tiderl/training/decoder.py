"""The decoder of Llama-like models over a prefix tree, out of the fused blocks.

Invariant: it only reads the modules of the transformers model it was made from, and computes what they
compute. `CausalModel` proves that on a probe at load and otherwise uses the modules themselves.
"""

from __future__ import annotations

from typing import Any

import torch

from tiderl.training.attention import TreePlan
from tiderl.training.fused import KEPT_PROBABILITIES, rms_norm, swiglu, tree_attention

ARCHITECTURES = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model")
"""Pre-norm RMSNorm, rotary grouped-query attention, SwiGLU; Qwen3 also normalises queries and keys."""


def _norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, module.weight, module.variance_epsilon)


class TreeDecoder:
    """Runs a supported transformers decoder on packed trees."""

    def __init__(self, decoder: Any) -> None:
        self.decoder = decoder
        self.head_dim = decoder.layers[0].self_attn.head_dim

    @classmethod
    def of(cls, decoder: Any) -> TreeDecoder | None:
        """The runner for `decoder`, or None when its architecture is not one of `ARCHITECTURES`."""
        config = getattr(decoder, "config", None)
        if type(decoder).__name__ not in ARCHITECTURES or getattr(config, "hidden_act", None) != "silu":
            return None
        return cls(decoder)

    def hidden(
        self, ids: torch.Tensor, positions: torch.Tensor, plan: TreePlan, rows: torch.Tensor
    ) -> torch.Tensor:
        """Last hidden states at `rows`, (rows, width); `ids` and `positions` are (tokens,)."""
        decoder, d = self.decoder, self.head_dim
        x = decoder.embed_tokens(ids)
        cos, sin = (t[0, :, : d // 2].contiguous() for t in decoder.rotary_emb(x[None], positions[None]))
        heads = decoder.config.num_attention_heads
        scores = sum(heads * (b.end - b.start) * sum(j - i for i, j in b.keys) for b in plan.blocks)
        keep = scores * plan.backward_dtype.itemsize * len(decoder.layers) <= KEPT_PROBABILITIES
        for index, layer in enumerate(decoder.layers):
            attention = layer.self_attn
            h = _norm(layer.input_layernorm, x)
            q, k, v = (
                p(h).view(len(h), -1, d) for p in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            if hasattr(attention, "q_norm"):
                q, k = _norm(attention.q_norm, q), _norm(attention.k_norm, k)
            mixed = tree_attention(q, k, v, cos, sin, plan, attention.scaling, keep)
            if index == len(decoder.layers) - 1:  # from here on only the rows that are read matter
                mixed, x = mixed[rows], x[rows]
            x = x + attention.o_proj(mixed)
            h = _norm(layer.post_attention_layernorm, x)
            x = x + layer.mlp.down_proj(swiglu(layer.mlp.gate_proj(h), layer.mlp.up_proj(h)))
        return _norm(decoder.norm, x)
