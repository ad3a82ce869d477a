"""Products equal torch's own in every precision and layout."""

from __future__ import annotations

import pytest
import torch

from tiderl.training.products import batched, linear, product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_they_equal_torchs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": None, "atol": None}
    x, w, bias = torch.randn(2, 5, 7).to(dtype), torch.randn(3, 7).to(dtype), torch.randn(3).to(dtype)
    torch.testing.assert_close(linear(x, w, bias), torch.nn.functional.linear(x, w, bias), **tolerance)
    torch.testing.assert_close(linear(x, w), x @ w.t(), **tolerance)
    a, b = torch.randn(6, 4).to(dtype), torch.randn(6, 9).to(dtype)
    torch.testing.assert_close(product(a.t(), b), a.t() @ b, **tolerance)
    q, k = torch.randn(2, 5, 4).to(dtype), torch.randn(2, 8, 4).to(dtype)
    torch.testing.assert_close(batched(q, k.transpose(1, 2)), torch.bmm(q, k.transpose(1, 2)), **tolerance)
    torch.testing.assert_close(batched(k.transpose(1, 2), k), torch.bmm(k.transpose(1, 2), k), **tolerance)


def test_they_carry_no_gradient() -> None:
    x, w = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    assert not linear(x, w).requires_grad
    assert not batched(x[None], w.t()[None]).requires_grad
