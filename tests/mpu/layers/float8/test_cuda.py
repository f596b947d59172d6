# SPDX-License-Identifier: Apache-2.0
"""What torch's scaled_mm is given on a GPU: codes and scales in the layout that each scaling asks
for, held by an imitation that reads them as torch's documentation says and multiplies on a CPU.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mpu.context import LayerContext
from mpu.kernels import by_address
from mpu.layers.float8 import cuda as float8_cuda
from mpu.layers.float8.cuda import Operand, multiply, prepare, result_dtype, wide
from mpu.layers.float8.recipe import Float8
from mpu.layers.float8.rows import BLOCKS, E4M3, E5M2, decode, scale_of

N, M, K = 160, 256, 640  # neither K / 128 nor K / 32 nor N is a multiple of its padding
KIND = F.ScalingType


def unswizzled(byte: Tensor, n: int, blocks: int) -> Tensor:
    """Scales [n, blocks] of tiles of 128 x 4: (r, c) stands at 16 (r mod 32) + 4 (r div 32) + c."""
    assert byte.dtype == torch.float8_e8m0fnu and byte.is_contiguous() and byte.dim() == 1
    down, right = -(-n // 128), -(-blocks // 4)
    assert len(byte) == down * right * 512
    r, c = torch.arange(n)[:, None], torch.arange(blocks)[None, :]
    tile = r // 128 * right + c // 4
    at = 512 * tile + 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4
    return byte.float()[at]


def widened(scale: Tensor, kind: F.ScalingType, n: int, k: int, first: bool) -> Tensor:
    """A scale for each number of a [n, k], or of b^T [n, k], after a check of its layout."""
    assert kind == KIND.BlockWise1x32 or scale.dtype == torch.float32
    if kind == KIND.TensorWise:
        assert scale.numel() == 1
        return scale.expand(n, k)
    if kind == KIND.RowWise:
        assert scale.shape == ((n, 1) if first else (1, n)) and scale.is_contiguous()
        return scale.reshape(n, 1).expand(n, k)
    if kind == KIND.BlockWise1x32:
        return unswizzled(scale, n, k // 32).repeat_interleave(32, 1)
    if kind == KIND.BlockWise1x128:
        assert scale.shape == (n, k // 128) and scale.stride() == (1, n)
        return scale.repeat_interleave(128, 1)
    padded = -(-(k // 128) // 4) * 4
    assert kind == KIND.BlockWise128x128
    assert scale.shape == (padded, n // 128) and scale.stride() == (1, padded)
    return scale[: k // 128].t().repeat_interleave(128, 0).repeat_interleave(128, 1)


def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, recipe_a: F.ScalingType, scale_b: Tensor,
    recipe_b: F.ScalingType, swizzle_a=None, swizzle_b=None, bias=None,
    output_dtype: torch.dtype = torch.bfloat16, contraction_dim=(), use_fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    scales = scale_a, recipe_a.value, scale_b, recipe_b.value
    assert not [why for _, why in by_address.scaled_mm(a, b, *scales)]
    assert (recipe_a == KIND.BlockWise1x32) == (swizzle_a == F.SwizzleType.SWIZZLE_32_4_4)
    assert swizzle_a == swizzle_b
    # Transformer Engine's Float8BlockScaling asserts that no product with scales of blocks is fast
    assert not use_fast_accum or {recipe_a, recipe_b} <= {KIND.TensorWise, KIND.RowWise}
    (n, k), m = a.shape, b.shape[1]
    left = a.double() * widened(scale_a, recipe_a, n, k, True)
    right = b.t().double() * widened(scale_b, recipe_b, m, k, False)
    return (left @ right.t()).to(output_dtype)


@pytest.mark.parametrize("scaling", BLOCKS)
@pytest.mark.parametrize("weight", [True, False])
def test_scaled_mm_is_given_what_it_asks_for(scaling, weight, monkeypatch):
    """As in forward and dgrad, with a weight in squares; or as in wgrad, without one."""
    monkeypatch.setattr(float8_cuda.F, "scaled_mm", scaled_mm)
    g = torch.Generator().manual_seed(0)
    spread = torch.randn(K, generator=g).mul(3).exp()
    x, w = (torch.randn(n, K, generator=g) * spread for n in (N, M))
    recipe = Float8(scaling, "hybrid", LayerContext())
    form = recipe.dy
    x8, w8 = recipe.operand(x, "dy", "rows"), recipe.operand(w, "w" if weight else "x", "rows")
    if weight:
        prepare(w8, scaling)
        for rows in (x8[:32], x8[32:]):  # the parts of several ranks meet one weight
            given = multiply(Operand(rows, form), Operand(w8, E4M3), scaling, torch.float32)
            assert len(given) == len(rows)
    y = multiply(Operand(x8, form), Operand(w8, E4M3), scaling, torch.float32, fast=True)
    numbers = (decode(r, recipe.block, f, torch.float64) for r, f in ((x8, form), (w8, E4M3)))
    want = next(numbers) @ next(numbers).t()
    bits = 8 if scaling == "mxfp8" else 23  # whose product comes in bf16
    assert y.dtype == torch.float32
    assert (y - want).abs().max() <= 2.0**-bits * want.abs().max()


def test_a_weights_scales_are_made_once_for_all_parts(monkeypatch):
    monkeypatch.setattr(float8_cuda.F, "scaled_mm", scaled_mm)
    made, inner = [], float8_cuda.wide
    monkeypatch.setattr(float8_cuda, "wide", lambda byte: made.append(len(byte)) or inner(byte))
    recipe = Float8("rowwise", "hybrid", LayerContext())
    x8 = recipe.operand(torch.randn(64, 128), "x", "rows")
    w8 = recipe.operand(torch.randn(48, 128), "w", "rows")
    prepare(w8, "rowwise")
    for part in x8.chunk(4):
        multiply(Operand(part, E4M3), Operand(w8, E4M3), "rowwise", torch.bfloat16)
    assert made == [48, 16, 16, 16, 16]


def test_scales_in_fp32_are_those_of_the_bytes():
    byte = torch.arange(1, 256, dtype=torch.uint8)
    assert torch.equal(wide(byte)[:-1], scale_of(byte)[:-1]) and wide(byte)[-1].isnan()
    strided = byte[:252].view(12, 21)[:, ::2]
    assert wide(strided).is_contiguous() and torch.equal(wide(strided), scale_of(strided))


@pytest.mark.parametrize("scaling", ["blockwise", "mxfp8"])
def test_blocks_of_e5m2_are_refused_as_torch_refuses_them(scaling, monkeypatch):
    """torch's check_deepseek_recipe and check_mxfp8_recipe ask for e4m3 twice."""
    monkeypatch.setattr(float8_cuda.F, "scaled_mm", scaled_mm)
    recipe = Float8(scaling, "hybrid", LayerContext())
    x8, w8 = (recipe.operand(torch.randn(n, K), "dy", "rows") for n in (N, M))
    assert recipe.dy is E4M3
    with pytest.raises(AssertionError):
        multiply(Operand(x8, E5M2), Operand(w8, E4M3), scaling, torch.float32)


@pytest.mark.parametrize(
    "capability, cuda, dtype",
    [((9, 0), "13.0", torch.float32), ((9, 0), "12.8", torch.bfloat16),
     ((10, 0), "13.0", torch.bfloat16), ((8, 9), "12.9", torch.bfloat16)],
)  # fmt: skip
def test_rows_are_multiplied_into_bf16_where_torch_has_no_fp32(
    monkeypatch, capability, cuda, dtype
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    device, fp32 = torch.device("cuda"), torch.float32
    assert result_dtype("rowwise", fp32, device) == dtype
    assert result_dtype("tensorwise", fp32, device) == fp32
    assert result_dtype("mxfp8", fp32, device) == torch.bfloat16


@pytest.mark.parametrize(
    "scaling, takes",
    [("tensorwise", (89, 90, 100)), ("rowwise", (89, 90, 100)), ("blockwise", (90,)),
     ("mxfp8", (100,))],
)  # fmt: skip
def test_a_recipe_runs_on_the_generations_that_have_it_and_no_other(monkeypatch, scaling, takes):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    found = []
    for place in (80, 89, 90, 100):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device, p=place: divmod(p, 10)
        )
        if not float8_cuda.unsupported(scaling, torch.device("cuda")):
            found.append(place)
    assert tuple(found) == takes
