# SPDX-License-Identifier: Apache-2.0
"""Rows of float8: every code and every rounding edge against torch's cast, scales, the layout."""

import itertools
import math

import pytest
import torch

from mpu.layers.float8.rows import (
    E4M3,
    E5M2,
    NOT_FINITE,
    codes,
    codes_in,
    decode,
    encode,
    row_bytes,
    row_scales,
    scale_bytes,
    scale_of,
    scales,
)

FORMATS = pytest.mark.parametrize("form", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def every_code(form) -> torch.Tensor:
    """The 256 codes as numbers, in fp32."""
    return torch.arange(256, dtype=torch.uint8).view(form.dtype).float()


def finite(form) -> torch.Tensor:
    """The finite numbers, ascending."""
    numbers = every_code(form)
    return numbers[numbers.isfinite()].unique()


@FORMATS
@pytest.mark.parametrize("exponent", [-100, -7, 0, 3, 100])
def test_all_256_codes_come_back_as_they_are(form, exponent):
    numbers = every_code(form)
    known = numbers.isfinite()
    top = torch.full_like(numbers, form.top)
    x = torch.stack([torch.where(known, numbers, top)]) * 2.0**exponent
    rows = encode(x, row_scales(x, 0, form), form)
    expected = torch.where(known, torch.arange(256), top.to(form.dtype).view(torch.uint8))
    assert torch.equal(codes(rows, 0, form).view(torch.uint8)[0], expected.to(torch.uint8))
    assert torch.equal(decode(rows, 0, form, torch.float32), x)
    assert scale_of(scales(rows, 0)).item() == 2.0**exponent


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_rounding_edge_is_torchs(form, dtype):
    """Halfway between two codes, and the next number of fp32 to either side of it."""
    known = finite(form)
    middle = (known[1:] + known[:-1]) / 2  # exact in fp32
    infinity = torch.tensor(math.inf)
    edges = [middle, middle.nextafter(infinity), middle.nextafter(-infinity)]
    x = torch.cat([torch.stack(edges).flatten(), known]).unsqueeze(0)
    rows = encode(x.to(dtype), row_scales(x, 0, form), form)
    assert scale_of(scales(rows, 0)).item() == 1.0  # the largest is the top
    assert torch.equal(codes(rows, 0, form).view(torch.uint8), x.to(form.dtype).view(torch.uint8))


@FORMATS
def test_a_number_above_the_top_is_clamped(form):
    """As amax was rounded to fp32: a cast to e5m2 would give infinity."""
    x = torch.tensor([[form.top * (1 + 1e-9), form.top * 1.5, -form.top * 100]]).double()
    rows = encode(x, torch.tensor([[127]], dtype=torch.uint8), form)
    found = decode(rows, 0, form, torch.float64)
    assert found.tolist() == [[form.top, form.top, -form.top]]


@FORMATS
def test_a_scale_is_the_least_power_of_two_that_holds_the_largest(form):
    edges = [2.0**e * f for e, f in itertools.product((-80, -3, 0, 5, 90), (1.0, 1.5, 1.75, 1.9))]
    edges += [math.nextafter(form.top, math.inf), form.top]
    x = torch.tensor(edges, dtype=torch.float32)
    x = torch.cat([x, x.nextafter(torch.tensor(math.inf)), x.nextafter(torch.tensor(0.0))])
    found = scale_of(scale_bytes(x, form))
    for number, scale in zip(x.tolist(), found.tolist(), strict=True):
        assert math.frexp(scale)[0] == 0.5  # a power of two
        assert number / scale <= form.top < 2 * number / scale, (number, scale)


@FORMATS
def test_zeros_and_numbers_that_are_not_finite(form):
    x = torch.zeros(4, 64)
    x[1, 40], x[2, 3], x[3, 9] = math.nan, math.inf, 2.0**-140
    rows = encode(x, row_scales(x, 32, form), form)
    found = decode(rows, 32, form, torch.float32)
    assert scales(rows, 32)[:3].tolist() == [[1, 1], [1, NOT_FINITE], [NOT_FINITE, 1]]
    assert torch.equal(found[0], x[0]) and found[3].isfinite().all()
    assert not found[1, 32:].isfinite().any() and torch.equal(found[1, :32], x[1, :32])
    assert not found[2, :32].isfinite().any() and torch.equal(found[2, 32:], x[2, 32:])


def test_the_byte_of_a_maximum_is_the_maximum_of_bytes():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).exp().mul(100).pow(5)
    x = torch.cat([x, torch.tensor([0.0, math.inf, 3e38, 1e-40])]).sort().values
    found = scale_bytes(x, E4M3).int()
    assert (found.diff() >= 0).all() and found[-1] == NOT_FINITE and found[-2] < NOT_FINITE


@pytest.mark.parametrize("block", [0, 32, 128])
def test_a_rows_length_tells_its_codes(block):
    for count in range(1, 200):
        k = count * (block or 16)
        length = row_bytes(k, block)
        assert length % 16 == 0 and codes_in(length, block) == k
        assert length - k < 16 + (k // block if block else 0) + 1


@FORMATS
@pytest.mark.parametrize("block, k", [(0, 48), (32, 96), (128, 384)])
def test_a_row_holds_codes_scales_and_zeros(form, block, k):
    x = torch.randn(7, k, generator=torch.Generator().manual_seed(1))
    byte = row_scales(x, block, form)
    for given in (x, x.t().contiguous().t()):  # as w, as w^T
        rows = encode(given, byte, form)
        assert rows.shape == (7, row_bytes(k, block)) and rows.dtype == torch.uint8
        assert torch.equal(scales(rows, block), byte)
        assert not rows[:, k + byte.shape[1] :].any()
        assert torch.equal(codes(rows, block, form).float(), _cast(x, byte, form))
    error = (decode(rows, block, form, torch.float32) - x).abs()
    bits = 4 if form is E4M3 else 3
    assert (error <= x.abs() * 2.0**-bits + scale_of(byte).max() * 2.0**-10).all()


def _cast(x, byte, form):
    """torch's cast of x over its scales."""
    scale = scale_of(byte).repeat_interleave(x.shape[1] // byte.shape[1], 1)
    return (x.double() / scale.double()).float().to(form.dtype).float()


@FORMATS
@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_in_fp64_is_rounded_once(form, sign):
    """Just above the middle of two codes fp32 has the middle itself, a tie: it would go down."""
    numbers = finite(form).double()
    numbers = numbers[numbers >= 0]
    middle = (numbers[1:] + numbers[:-1]) / 2
    for off, wanted in ((1 + 2.0**-40, numbers[1:]), (1 - 2.0**-40, numbers[:-1])):
        x = sign * torch.cat([middle * off, numbers[-1:]])[None]
        rows = encode(x, scale_bytes(numbers[-1:], form)[None], form)
        assert torch.equal(decode(rows, 0, form, torch.float64)[0, :-1], sign * wanted)
