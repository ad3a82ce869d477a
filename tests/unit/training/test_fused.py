"""The fused blocks against the same formulas under plain autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tiderl.training import fused
from tiderl.training.attention import TreePlan, tree_attention
from tiderl.training.packing import attention_blocks

PARENT = np.array([-1, 0, 1, 2, 3, 4, 2, 6, 7, 1, 9, 10, 10])


def compare(got: torch.Tensor, want: torch.Tensor, inputs: list[torch.Tensor], tol: float = 1e-6) -> None:
    torch.testing.assert_close(got, want, rtol=tol, atol=tol)
    up = torch.randn_like(got)
    mine = torch.autograd.grad(got, inputs, up, retain_graph=True)
    theirs = torch.autograd.grad(want, inputs, up, retain_graph=True)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_rms_norm() -> None:
    torch.manual_seed(0)
    x, w = leaf(3, 4, 8), leaf(8)
    want = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w
    compare(fused.rms_norm(x, w, 1e-5), want, [x, w], 1e-5)


def test_swiglu() -> None:
    torch.manual_seed(0)
    gate, up = leaf(5, 7), leaf(5, 7)
    compare(fused.swiglu(gate, up), F.silu(gate) * up, [gate, up])


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat([a * c - b * s, b * c + a * s], -1)


@pytest.mark.parametrize("block", [1, 3, 64])
@pytest.mark.parametrize("keep", [True, False])
def test_tree_attention(block: int, keep: bool) -> None:
    torch.manual_seed(0)
    n, heads, kv, d = len(PARENT), 4, 2, 6
    q, k, v = leaf(n, heads, d), leaf(n, kv, d), leaf(n, kv, d)
    depth = np.zeros(n)
    sees = np.eye(n, dtype=bool)
    for i in range(1, n):
        depth[i] = depth[PARENT[i]] + 1
        sees[i] |= sees[PARENT[i]]
    angle = torch.tensor(depth, dtype=torch.float32)[:, None] * torch.rand(3)
    cos, sin = angle.cos(), angle.sin()
    plan = TreePlan(attention_blocks(PARENT, block), torch.device("cpu"), torch.float32)
    rq, rk = rotate(q, cos, sin).transpose(0, 1)[None], rotate(k, cos, sin).transpose(0, 1)[None]
    rv = v.transpose(0, 1)[None]
    dense = F.scaled_dot_product_attention(
        rq,
        rk.repeat_interleave(2, 1),
        rv.repeat_interleave(2, 1),
        attn_mask=torch.from_numpy(sees),
        scale=0.3,
    )
    want = dense[0].transpose(0, 1).reshape(n, -1)
    compare(fused.tree_attention(q, k, v, cos, sin, plan, 0.3, keep), want, [q, k, v], 1e-5)
    generic, _ = tree_attention(torch.nn.Module(), rq, rk, rv, None, scaling=0.3, tree_plan=plan)
    compare(generic.reshape(n, -1), want, [q, k, v], 1e-5)
