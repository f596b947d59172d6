# SPDX-License-Identifier: Apache-2.0
"""CoreAttention calls the operators of the kernel that is asked for; those of CUDA by stand-ins.

The stand-ins compute by matrix products what torch's operators return, and note their names.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mpu import torch_private
from mpu.layers.attention import block_attention as module
from mpu.layers.attention import core
from mpu.layers.attention.backends import Card
from mpu.layers.attention.block_attention import products_forward
from mpu.layers.attention.core import CoreAttention
from tests.mpu.layers.attention.test_block_attention import flash_stand_in, no_turn

H100 = Card("cuda", 9, 0, 91900)
BF16 = torch.bfloat16


class Noted:
    """torch.ops.aten with CUDA's operators of attention replaced; calls: their names."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops.aten, name)

    def _flash_attention_forward(self, *args: Any, **given: Any) -> tuple[Tensor, ...]:
        self.calls.append("flash")
        return flash_stand_in(*args, **given)

    def _scaled_dot_product_flash_attention(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool
    ) -> tuple[Tensor, ...]:
        self.calls.append("flash")
        return (products_forward(q, k, v, is_causal)[0],)

    def _scaled_dot_product_cudnn_attention(
        self, q: Tensor, k: Tensor, v: Tensor, attn_bias: None, compute_log_sumexp: bool,
        is_causal: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert compute_log_sumexp == (torch.is_grad_enabled() and q.requires_grad)
        self.calls.append("cudnn")
        return (products_forward(q, k, v, is_causal)[0],)


@pytest.fixture
def noted(monkeypatch):
    found = Noted()
    monkeypatch.setattr(torch_private, "aten", found)
    products, chosen = module.products_forward, F.scaled_dot_product_attention

    def math(*args: Any) -> Any:
        found.calls.append("math")
        return products(*args)

    def sdpa(*args: Any, **given: Any) -> Tensor:
        found.calls.append("torch")
        return chosen(*args, **given)

    monkeypatch.setattr(module, "products_forward", math)
    monkeypatch.setattr(core.F, "scaled_dot_product_attention", sdpa)
    return found


def attended(attend: CoreAttention, x: Tensor, **more: Any) -> Tensor:
    turn = no_turn(len(x), 8, torch.float32)
    return attend(x.clone(), *turn, 4, 2, more.pop("packed", None), **more)


@pytest.mark.parametrize("asked", ["auto", "flash", "fused"])
def test_generation_never_asks_cudnn_which_builds_a_plan_for_each_number_of_keys(noted, asked):
    """A prompt, then token by token; torch would choose cuDNN for each of them on this card."""
    attend, cache = CoreAttention(asked, H100), list[Tensor]()
    x = torch.randn(7, 1, 8 * 8).to(BF16)
    with torch.no_grad():
        whole = attended(CoreAttention(), x)
        noted.calls.clear()
        cuts = (slice(4), slice(4, 5), slice(5, 6))
        parts = [attended(attend, x[at], cache=cache) for at in cuts]
    assert noted.calls == ["flash"] * 3
    assert (torch.cat(parts) - whole[:6]).float().norm() < 2e-2 * whole.float().norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_generation_in_wide_numbers_leaves_the_choice_to_torch(noted, dtype):
    cache = list[Tensor]()
    attended(CoreAttention("auto", H100), torch.randn(3, 1, 64, dtype=dtype), cache=cache)
    assert noted.calls == ["torch"]


def test_fp32_is_not_left_to_products_of_whole_rows(monkeypatch):
    """torch 2.11 to 2.13: the memory-efficient kernel takes equal numbers of heads alone, and
    scaled_dot_product_attention then makes s x s scores (pytorch/pytorch#191085)."""
    chosen, called = F.scaled_dot_product_attention, []

    def sdpa(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, enable_gqa: bool) -> Tensor:
        assert q.shape[1] == k.shape[1] == v.shape[1], "math: scores of s x s for each head"
        called.append(len(q))
        return chosen(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa)

    torch.manual_seed(0)
    x, found = torch.randn(12, 2, 8 * 8), []
    for attend in (CoreAttention(), CoreAttention("auto", H100)):
        leaf = x.clone().requires_grad_()
        y = attended(attend, leaf)
        y.backward(torch.ones_like(y))
        found.append((y.detach(), leaf.grad))
        monkeypatch.setattr(core.F, "scaled_dot_product_attention", sdpa)
    assert called == [2]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
    attended(CoreAttention("auto", H100), x, cache=list[Tensor]())
    assert called == [2, 2]


def test_cudnn_is_asked_for_a_log_sum_exp_only_where_something_learns(noted):
    attend, x = CoreAttention("fused", H100), torch.randn(4, 1, 64).to(BF16)
    with torch.no_grad():
        attended(attend, x)
    attend.attend(*x.requires_grad_().view(4, 1, 8, 8).split([4, 2, 2], 2), None, None, 0)
    assert noted.calls == ["cudnn"] * 2


@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
def test_operators_take_what_they_are_given(kernel):
    """Names and places of arguments, on meta tensors, with torch's own backward formula."""
    q = torch.empty(2, 4, 16, 8, dtype=BF16, device="meta", requires_grad=True)
    k, v = (torch.empty(2, 2, 16, 8, dtype=BF16, device="meta") for _ in range(2))
    y = module._attention_of_rows(q, k, v, kernel)
    assert y.shape == q.shape
    assert torch.autograd.grad(y, q, torch.empty_like(y))[0].shape == q.shape
    out, lse = module._forward(kernel, "all", q, k, v)
    assert (out.shape, lse.shape) == (q.shape, (2, 4, 16))
    parts = module._backward(kernel, "tril", out, q, k, v, out, lse)
    assert [x.shape for x in parts] == [q.shape, k.shape, v.shape]
