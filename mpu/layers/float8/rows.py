# SPDX-License-Identifier: Apache-2.0
"""Rows of float8: one uint8 tensor that holds codes and their scales, in messages and in memory.

    a row of k numbers   | k codes | a scale for each block of k | zeros, up to a multiple of 16 |

So a row is sent, cut, saved and gathered together with its scales. A scale is a power of two,
2^(byte - 127), as in e8m0; a number is exactly its code times the scale. Byte 255 marks a block
that contains an infinity or a NaN: none of it decodes to a finite number.

On CUDA the kernels of mpu/kernels/float8.py make rows, if Triton is available. For meta tensors
`on_gpu` states whether they represent a GPU's; the kernels' results are then allocated without a
launch. For real tensors their own device decides.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpu.kernels import available

ALIGN = 16  # bytes: the alignment of rows that float8 matmuls require
BLOCKS = {"tensorwise": 0, "rowwise": 0, "blockwise": 128, "mxfp8": 32}  # k of one scale; 0: all
RECIPES = {**{scaling: scaling for scaling in BLOCKS}, "delayed": "tensorwise"}  # their scaling
NOT_FINITE = 255
TOP_TILE = (32, 128)  # tokens and features per program that computes the maximum of SwiGLU


class Format(NamedTuple):
    """A float8 format. top: the largest number, 1.75 x 2^shift.

    fraction, bias: the bits of a code's fraction, and the bias of its exponent.
    """

    dtype: torch.dtype
    top: float
    shift: int
    fraction: int
    bias: int


E4M3 = Format(torch.float8_e4m3fn, 448.0, 8, fraction=3, bias=7)
E5M2 = Format(torch.float8_e5m2, 57344.0, 15, fraction=2, bias=15)


def row_bytes(k: int, block: int) -> int:
    """Return the bytes of a row of k numbers, `block` of them per scale; 0: one scale per row."""
    scales = k // block if block else 1
    return k + -(-scales // ALIGN) * ALIGN


def codes_in(row: int, block: int) -> int:
    """Return k, given row_bytes(k, block)."""
    return row // (block + 1) * block if block else row - ALIGN


def scale_bytes(amax: Tensor, form: Format) -> Tensor:
    """Return the byte of the smallest scale with which no value up to amax (>= 0) exceeds the top.

    That is 2^ceil(log2(amax / top)), at least 2^-126, by arithmetic on the bits of fp32. As bytes
    grow with amax and NOT_FINITE is the largest, the maximum of bytes is the byte of the maximum.
    """
    amax = amax.float()
    # carries into the exponent if the fraction is above that of the top, 1.75
    exponent = (amax.view(torch.int32) + 0x1FFFFF) >> 23
    byte = (exponent - form.shift).clamp_(min=1)
    return torch.where(amax.isfinite(), byte, NOT_FINITE).to(torch.uint8)


def scale_of(byte: Tensor) -> Tensor:
    """Return the scales of bytes in fp32; infinity for NOT_FINITE."""
    return (byte.to(torch.int32) << 23).view(torch.float32)


def row_scales(x: Tensor, block: int, form: Format, on_gpu: bool = False) -> Tensor:
    """Return the byte of each block of k: x [n, k] -> [n, k / block], or [n, 1] for block 0."""
    if by_kernels(x, on_gpu):
        return _kernel_scales((x, *x.shape), block, form)
    blocks = x.unflatten(1, (-1, block or x.shape[1]))
    return scale_bytes(blocks.abs().amax(2), form)


def encode(
    x: Tensor, scales: Tensor, form: Format, wide: bool = False, on_gpu: bool = False
) -> Tensor:
    """Return rows: x [n, k], scales [n, blocks] (bytes) -> [n, row_bytes].

    Numbers are divided by their scale, clamped and rounded to the nearest code, ties to even. The
    clamp is for values above the top, due to fp64 or another amax, which a cast to e5m2 would turn
    into infinity. wide: the kernels also write the scales in fp32 to a second, column-major tensor
    (`scales_in_fp32`).
    """
    (n, k), blocks = x.shape, scales.shape[1]
    if by_kernels(x, on_gpu):
        return _kernel_rows((x, n, k), scales, row_bytes(k, k // blocks), form, wide)
    inverse = scale_of((254 - scales.to(torch.int32)).clamp_(min=0))  # 0 for NOT_FINITE
    numbers = x if x.dtype == torch.float64 else x.float()
    divided = numbers.unflatten(1, (blocks, -1)) * inverse.unsqueeze(2)
    codes = _single(divided.clamp_(-form.top, form.top)).to(form.dtype)
    rows = x.new_empty((n, row_bytes(k, k // blocks)), dtype=torch.uint8)
    rows[:, :k] = codes.view(torch.uint8).flatten(1)
    return finish(rows, k, scales)


def _single(x: Tensor) -> Tensor:
    """Return x in fp32; fp64 is rounded to odd, so that a cast to float8 rounds x only once.

    A number that fp32 cannot represent is truncated and its last bit set (Boldo and Melquiond
    2008).
    """
    if x.dtype != torch.float64:
        return x
    near = x.float()
    error = x.abs() - near.abs().double()
    bits = near.view(torch.int32) - (error < 0).int()  # towards zero
    return (bits | (error != 0).int()).view(torch.float32)


def finish(rows: Tensor, k: int, scales: Tensor) -> Tensor:
    """Write the scales [n, blocks] and the padding after the codes of rows [n, row_bytes]."""
    blocks = scales.shape[1]
    rows[:, k : k + blocks] = scales
    rows[:, k + blocks :] = 0
    return rows


def made(
    x: Tensor,
    block: int,
    form: Format,
    square: bool = False,
    wide: bool = False,
    on_gpu: bool = False,
) -> Tensor:
    """Return rows of x [n, k], with scales that no other rank shares. wide: see `encode`.

    square: a scale also spans `block` rows.
    """
    if by_kernels(x, on_gpu):
        return _made((x, *x.shape), block, form, square, wide)
    scales = row_scales(x, block, form)
    if square:
        scales = scales.unflatten(0, (-1, block)).amax(1).repeat_interleave(block, 0)
    return encode(x, scales, form)


Numbers = tuple[Any, ...]  # a kernel's input: the arguments of Numbers of mpu/kernels/float8.py


def _made(given: Numbers, block: int, form: Format, square: bool, wide: bool) -> Tensor:
    x, n, k, *_ = given
    rows, wide_scales = _outputs(x, n, row_bytes(k, block), k // block if block else 1, wide)
    if not x.is_meta:
        kernels = triton_kernels()
        kernels.rows(kernels.Numbers(*given), block, rows, wide_scales, _codes(form), square)
    return rows


def _kernel_scales(given: Numbers, block: int, form: Format) -> Tensor:
    x, n, k, *_ = given
    out = torch.empty((n, k // block if block else 1), dtype=torch.uint8, device=x.device)
    if not x.is_meta:
        kernels = triton_kernels()
        kernels.row_scales(kernels.Numbers(*given), block, out, _codes(form))
    return out


def _kernel_rows(given: Numbers, scales: Tensor, length: int, form: Format, wide: bool) -> Tensor:
    x, n, *_ = given
    rows, wide_scales = _outputs(x, n, length, scales.shape[1], wide)
    if not x.is_meta:
        kernels = triton_kernels()
        kernels.encode(kernels.Numbers(*given), scales, rows, wide_scales, _codes(form))
    return rows


def _outputs(
    x: Tensor, n: int, length: int, blocks: int, wide: bool
) -> tuple[Tensor, Tensor | None]:
    rows = torch.empty((n, length), dtype=torch.uint8, device=x.device)
    if not wide:
        return rows, None
    wide_scales = torch.empty(blocks * n, dtype=torch.float32, device=x.device)
    wide_scales = wide_scales.view(blocks, n).t() if blocks > 1 else wide_scales[:, None]
    rows.scales_in_fp32 = wide_scales  # type: ignore[attr-defined]
    return rows, wide_scales


def codes(rows: Tensor, block: int, form: Format) -> Tensor:
    """Return a view of the codes of rows [n, row_bytes]: float8 [n, k]."""
    return rows[:, : codes_in(rows.shape[1], block)].view(form.dtype)


def scales(rows: Tensor, block: int) -> Tensor:
    """Return a view of the bytes of the scales, [n, blocks]."""
    k = codes_in(rows.shape[1], block)
    return rows[:, k : k + (k // block if block else 1)]


def decode(rows: Tensor, block: int, form: Format, dtype: torch.dtype) -> Tensor:
    """Return the numbers [n, k] of rows [n, row_bytes]; exact, as dtype is fp32 or fp64."""
    scale = scale_of(scales(rows, block))
    numbers = codes(rows, block, form).to(dtype).unflatten(1, (scale.shape[1], -1))
    return (numbers * scale.unsqueeze(2)).flatten(1)


def remade(
    rows: Tensor,
    block: int,
    form: Format,
    same: bool = False,
    agree: Callable[[Tensor], object] | None = None,
    wide: bool = False,
    on_gpu: bool = False,
) -> Tensor:
    """Return the rows of the transpose: rows [n, row_bytes(k)] -> [k, row_bytes(n)].

    A number changes only if it underflows to a subnormal code, that is, below about 2^-14 (e5m2:
    2^-29) of the largest that now shares its scale. same: a scale spans all rows, or a square of
    blocks, so the codes are the same. agree: combines the new scales of all ranks, in place. wide:
    see `encode`.
    """
    n, k = len(rows), codes_in(rows.shape[1], block)
    if same:
        given = scales(rows, block)
        byte = given[::block].t().repeat_interleave(block, 0) if block else given[:1].expand(k, 1)
    if by_kernels(rows, on_gpu):
        numbers = (rows, k, n, block, k)
        if not same:
            if agree is None:
                return _made(numbers, block, form, False, wide)
            byte = _kernel_scales(numbers, block, form)
            agree(byte)
        return _kernel_rows(numbers, byte, row_bytes(n, block), form, wide)
    if same:
        out = rows.new_empty((k, row_bytes(n, block)))
        out[:, :n] = rows[:, :k].t()
        return finish(out, n, byte)
    decoded = decode(rows, block, form, torch.float32).t()
    byte = row_scales(decoded, block, form)
    if agree:
        agree(byte)
    return encode(decoded, byte, form)


def swiglu_scale(x: Tensor, dy: Tensor | None, form: Format) -> Tensor:
    """Return the byte [1] of the scale of SwiGLU's result or, if dy is given, of its gradient, by
    kernels: x [n, 2f], dy [n, f].
    """
    n, f = len(x), x.shape[1] // 2
    tiles = -(-n // TOP_TILE[0]) * -(-f // TOP_TILE[1])
    out = torch.empty(tiles, dtype=torch.uint8, device=x.device)
    if not x.is_meta:
        from mpu.kernels import swiglu_rows as kernels

        kernels.swiglu_scales(x, dy, out, _codes(form), TOP_TILE)
    return out.amax(0, keepdim=True)


def swiglu_rows(
    x: Tensor,
    dy: Tensor | None,
    scale: Tensor | None,
    block: int,
    form: Format,
    turned: bool,
    wide: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the rows of SwiGLU's result [n, k] or, if dy is given, of its gradient and, if
    `turned`, those of the transpose, equal to those of `remade`, by kernels: x [n, 2f], dy [n, f].

    scale: the byte [1] of the one scale, for block 0. wide: for the transpose; see `encode`.
    """
    n, k = len(x), x.shape[1] if dy is not None else x.shape[1] // 2
    rows, other, wide_scales = _outputs(x, n, row_bytes(k, block), 0, False)[0], None, None
    if turned:
        blocks = n // block if block else 1
        other, wide_scales = _outputs(x, k, row_bytes(n, block), blocks, wide)
    if not x.is_meta:
        from mpu.kernels import swiglu_rows as kernels

        kernels.swiglu_rows(
            x, dy, scale, block, out=rows, turned=other, wide=wide_scales, form=_codes(form)
        )
    return rows, other


def by_kernels(x: Tensor, on_gpu: bool) -> bool:
    """Return whether the kernels support these. A recorded GPU step assumes Triton."""
    return (on_gpu and x.dtype != torch.float64) if x.is_meta else on_triton(x)


def on_triton(x: Tensor) -> bool:
    """Return whether the kernels support these numbers, or these rows."""
    return x.dtype != torch.float64 and available.launches(x)


def triton_kernels() -> Any:
    """Return the kernels: mpu/kernels/float8.py, which needs Triton."""
    from mpu.kernels import float8

    return float8


def _codes(form: Format) -> Any:
    return triton_kernels().Codes(form.fraction, form.bias, form.top, form.shift)
