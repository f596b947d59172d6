# SPDX-License-Identifier: Apache-2.0
"""Multiply rows of float8 on CUDA by torch's scaled_mm: each scaling in the layout it requires.

    tensorwise   one fp32 scale, at an address divisible by 16        compute capability 8.9, 9 up
    rowwise      fp32 [n, 1]                                          the same; see `result_dtype`
    blockwise    fp32 [n, k/128], column-major; of a weight           9.0 only
                 [k/128 up to a multiple of 4, n/128], column-major
    mxfp8        bytes (e8m0) in tiles of 128 x 4, padded             10.0 up

Codes are multiplied in place: k codes per row, with the row's bytes as stride. Scales are copied to
the layout above, unless the kernel that made the rows has done so. cublasLt rejects a tensorwise
scale at any other address (CUBLAS_STATUS_NOT_SUPPORTED; seen with cublasLt 13.1 on an H200).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mpu.layers.float8.rows import BLOCKS, Format, codes, scales

CAPABLE = {  # lowest and highest compute capability, and devices that have them
    "tensorwise": ((8, 9), (99, 9), "8.9 or more (Ada, Hopper, Blackwell)"),
    "rowwise": ((8, 9), (99, 9), "8.9 or more (Ada, Hopper, Blackwell)"),
    "blockwise": ((9, 0), (9, 9), "9.0 (Hopper); on Blackwell use mxfp8"),
    "mxfp8": ((10, 0), (99, 9), "10.0 or more (Blackwell); on Hopper use blockwise"),
}


def unsupported(scaling: str, device: torch.device) -> str:
    """Return why a GPU does not support a scaling, or "" if it does."""
    found = torch.cuda.get_device_capability(device)
    return lacks(scaling, found, torch.cuda.get_device_name(device))


def lacks(scaling: str, found: tuple[int, int], name: str) -> str:
    """Return why a GPU of a compute capability does not support a scaling, or "" if it does."""
    low, high, needed = CAPABLE[scaling]
    if low <= found <= high:
        return ""
    return (
        f"--fp8-recipe {scaling} needs a GPU of compute capability {needed}: {name} has "
        f"{found[0]}.{found[1]}"
    )


class Operand(NamedTuple):
    """Rows of one format."""

    rows: Tensor
    form: Format


def prepare(rows: Tensor, scaling: str) -> None:
    """Lay out a weight's scales once, as it may be multiplied with the rows of several ranks."""
    rows.scales_as_b = _layout(rows, scaling, weight=True, of_a=False)  # type: ignore[attr-defined]


def multiply(
    a: Operand, b: Operand, scaling: str, dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """Return a b^T [n, m] of rows a [n], b [m]. A `b` passed to `prepare` before is a weight.

    fast: sums within a tile may use fewer bits, as is usual in forward; ignored for block scales,
    whose sums are in fp32 (as for all three products of Transformer Engine's Float8BlockScaling).
    A result in bf16 is converted to `dtype`.
    """
    block, kind = BLOCKS[scaling], F.ScalingType
    ready = getattr(b.rows, "scales_as_b", None)
    kinds = {
        "tensorwise": (kind.TensorWise, kind.TensorWise),
        "rowwise": (kind.RowWise, kind.RowWise),
        "blockwise": (kind.BlockWise1x128, kind.BlockWise1x128),
        "mxfp8": (kind.BlockWise1x32, kind.BlockWise1x32),
    }[scaling]
    if scaling == "blockwise" and ready is not None:
        kinds = kind.BlockWise1x128, kind.BlockWise128x128
    of_a = _layout(a.rows, scaling, weight=False, of_a=True)
    of_b = _layout(b.rows, scaling, weight=False, of_a=False) if ready is None else ready
    swizzle = F.SwizzleType.SWIZZLE_32_4_4 if scaling == "mxfp8" else None
    out = result_dtype(scaling, dtype, a.rows.device)
    y = F.scaled_mm(
        codes(a.rows, block, a.form), codes(b.rows, block, b.form).t(),
        of_a, kinds[0], of_b, kinds[1],
        swizzle_a=swizzle, swizzle_b=swizzle, output_dtype=out,
        use_fast_accum=fast and not block,
    )  # fmt: skip
    return y.to(dtype)


def result_dtype(scaling: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of scaled_mm's result: bf16 where it has no fp32.

    Products of rows are in fp32 by cuBLAS alone: on compute capability 9.0 and CUDA 12.9 or later.
    Elsewhere torch uses CUTLASS (https://github.com/pytorch/pytorch/pull/187569).
    """
    if scaling == "mxfp8":
        return torch.bfloat16
    if scaling == "rowwise" and device.type == "cuda" and dtype == torch.float32:
        cuda = tuple(map(int, (torch.version.cuda or "13.0").split(".")))
        if torch.cuda.get_device_capability(device) != (9, 0) or cuda < (12, 9):
            return torch.bfloat16
    return dtype


def _layout(rows: Tensor, scaling: str, weight: bool, of_a: bool) -> Tensor:
    """Return the scales of rows in the layout that scaled_mm requires for a (of_a) or b."""
    byte = scales(rows, BLOCKS[scaling])
    if scaling == "mxfp8":
        return swizzled(byte)
    noted = getattr(rows, "scales_in_fp32", None)  # by the kernel that made the rows
    if scaling == "tensorwise":
        return (wide(byte[:1]) if noted is None else noted[:1]).view(1)
    if scaling == "rowwise":
        by_row = wide(byte) if noted is None else noted
        return by_row if of_a else by_row.t()
    if not weight:
        return wide(byte.t()).t() if noted is None else noted  # stride 1 along n
    squares = byte[::128]
    return wide(F.pad(squares, (0, -squares.shape[1] % 4))).t()


def wide(byte: Tensor) -> Tensor:
    """Return the scales of bytes in fp32, as a contiguous tensor, in one launch.

    They equal those of scale_of, except for 255, which is NaN in e8m0.
    """
    return byte.view(torch.float8_e8m0fnu).to(torch.float32, memory_format=torch.contiguous_format)


def swizzled(byte: Tensor) -> Tensor:
    """Return e8m0 scales in tensor-core order: bytes [n, k/32], padded to tiles of 128 x 4.

    Row r and column c of a tile are at 16 (r mod 32) + 4 (r div 32) + c; tiles are row-major.
    """
    n, blocks = byte.shape
    padded = F.pad(byte, (0, -blocks % 4, 0, -n % 128))
    tiles = padded.view(len(padded) // 128, 4, 32, -1, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(torch.float8_e8m0fnu)
