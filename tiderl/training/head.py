"""Log-probs of chosen tokens from hidden states, without keeping the logits.

Invariant: float32 log_softmax over the whole vocabulary, a bounded number of rows at a time; nothing of
size (rows, vocabulary) outlives a chunk, neither forward nor backward.
"""

from __future__ import annotations

from typing import Any

import torch

from tiderl.training.products import linear, product

CHUNK_BYTES = 48 << 20
"""Float32 logits held at a time."""


def _chunks(pair_row: torch.Tensor, rows: int, vocabulary: int) -> list[tuple[int, int, int, int]]:
    """(first row, end row, first pair, end pair) of each chunk; pairs are sorted by row."""
    step = max(1, CHUNK_BYTES // (4 * vocabulary))
    starts = list(range(0, rows, step))
    bounds = torch.searchsorted(pair_row, torch.tensor([*starts, rows], device=pair_row.device)).tolist()
    return [(a, min(a + step, rows), bounds[i], bounds[i + 1]) for i, a in enumerate(starts)]


class _SelectedLogprobs(torch.autograd.Function):
    """With p = softmax(W h): d log p_t / d h = W_t - sum_v p_v W_v.

    The second term does not depend on the upstream gradient, so the forward pass computes it while the
    chunk's probabilities exist and keeps one vector per row. Only a trained W needs them again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        pair_row: torch.Tensor,
        pair_target: torch.Tensor,
        with_gradient: bool,
        backward_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, vocabulary = hidden.shape[0], weight.shape[0]
        logprobs = torch.empty(len(pair_row), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty(rows, dtype=torch.float32, device=hidden.device)
        first = torch.searchsorted(pair_row, torch.arange(rows, device=hidden.device))
        anchor = pair_target[first]
        pull = torch.empty_like(hidden) if with_gradient else hidden.new_empty(0)
        backward_weight = weight.to(backward_dtype) if with_gradient else weight
        for a, b, i, j in _chunks(pair_row, rows, vocabulary):
            logits = linear(hidden[a:b], weight).float()
            log_p = torch.log_softmax(logits, -1)
            logprobs[i:j] = log_p[pair_row[i:j] - a, pair_target[i:j]]
            p = log_p.exp()
            entropy[a:b] = -torch.einsum("rv,rv->r", p, log_p)
            if with_gradient:
                # p - onehot(anchor) before the product: no cancellation where p is close to 1
                p[torch.arange(b - a, device=p.device), anchor[a:b]] -= 1.0
                pull[a:b] = product(p.to(backward_dtype), backward_weight)
        ctx.save_for_backward(hidden, weight, pair_row, pair_target, anchor, pull)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _entropy: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, pair_row, pair_target, anchor, pull = ctx.saved_tensors
        rows = hidden.shape[0]
        per_row = torch.zeros(rows, dtype=torch.float32, device=grad.device).index_add_(0, pair_row, grad)
        grad_hidden = -per_row[:, None] * pull.float()
        other = torch.nonzero(pair_target != anchor[pair_row]).squeeze(-1)
        if len(other):
            row = pair_row[other]
            difference = weight[pair_target[other]].float() - weight[anchor[row]].float()
            grad_hidden.index_add_(0, row, grad[other, None] * difference)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
            for a, b, i, j in _chunks(pair_row, rows, weight.shape[0]):
                minus = torch.softmax(linear(hidden[a:b], weight).float(), -1) * -per_row[a:b, None]
                minus.index_put_((pair_row[i:j] - a, pair_target[i:j]), grad[i:j], accumulate=True)
                grad_weight.addmm_(minus.t(), hidden[a:b].float())
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None


def selected_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    pair_row: torch.Tensor,
    pair_target: torch.Tensor,
    backward_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each (row, target) pair and entropy of each row, in nats, float32.

    Args:
        hidden: (rows, width), with gradient where wanted.
        weight: (vocabulary, width), the output head.
        pair_row: (pairs,) ascending row indices; every row occurs.
        pair_target: (pairs,) token ids.
        backward_dtype: precision of the gradient's large product; None means the weight's.
    """
    wants = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    logprobs, entropy = _SelectedLogprobs.apply(
        hidden, weight, pair_row, pair_target, wants, backward_dtype or weight.dtype
    )
    return logprobs, entropy
