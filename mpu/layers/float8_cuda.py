# SPDX-License-Identifier: Apache-2.0
"""Multiply rows of float8 on CUDA by torch's scaled_mm: each scaling in the layout it asks for.

    tensorwise   one fp32 scale                                       compute capability 8.9, 9 up
    rowwise      fp32 [n, 1]                                          the same
    blockwise    fp32 [n, k/128] column by column; of a weight        9.0 alone
                 [k/128 up to a multiple of 4, n/128] column by column
    mxfp8        bytes (e8m0) in tiles of 128 x 4, padded             10.0 up

Codes are multiplied where they lie: rows of k codes a row of bytes apart.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mpu.layers.float8_rows import BLOCKS, Format, codes, scale_of, scales

CAPABLE = {  # compute capabilities, and the devices that have them
    "tensorwise": ((8, 9), (99, 9), "8.9 or more (Ada, Hopper, Blackwell)"),
    "rowwise": ((8, 9), (99, 9), "8.9 or more (Ada, Hopper, Blackwell)"),
    "blockwise": ((9, 0), (9, 9), "9.0 (Hopper); on Blackwell take mxfp8"),
    "mxfp8": ((10, 0), (99, 9), "10.0 or more (Blackwell); on Hopper take blockwise"),
}


def unsupported(scaling: str, device: torch.device) -> str:
    """Return why a GPU cannot multiply so, or "" where it can."""
    found = torch.cuda.get_device_capability(device)
    low, high, needed = CAPABLE[scaling]
    if low <= found <= high:
        return ""
    name = torch.cuda.get_device_name(device)
    return (
        f"--fp8-recipe {scaling} needs a GPU of compute capability {needed}: {name} has "
        f"{found[0]}.{found[1]}"
    )


class Operand(NamedTuple):
    """Rows of one format."""

    rows: Tensor
    form: Format


def multiply(
    a: Operand, b: Operand, scaling: str, dtype: torch.dtype, square: bool, fast: bool = False
) -> Tensor:
    """Return a b^T [n, m] of rows a [n], b [m]. square: b's scales are those of 128 x 128 blocks.

    fast: sums may be kept in fewer bits within a tile, as is usual in forward. mxfp8 comes out in
    bf16 at most, and is converted.
    """
    block = BLOCKS[scaling]
    kind, swizzle = F.ScalingType, None
    of_a, of_b = scales(a.rows, block), scales(b.rows, block)
    if scaling == "tensorwise":
        kinds = kind.TensorWise, kind.TensorWise
        ready = scale_of(of_a[0]), scale_of(of_b[0])
    elif scaling == "rowwise":
        kinds = kind.RowWise, kind.RowWise
        ready = scale_of(of_a), scale_of(of_b).t()
    elif scaling == "blockwise":
        kinds = kind.BlockWise1x128, kind.BlockWise128x128 if square else kind.BlockWise1x128
        ready = _by_columns(of_a), _squares(of_b) if square else _by_columns(of_b)
    else:
        kinds, swizzle = (kind.BlockWise1x32, kind.BlockWise1x32), F.SwizzleType.SWIZZLE_32_4_4
        ready = swizzled(of_a), swizzled(of_b)
    out = torch.bfloat16 if scaling == "mxfp8" else dtype
    y = F.scaled_mm(
        codes(a.rows, block, a.form), codes(b.rows, block, b.form).t(),
        ready[0], kinds[0], ready[1], kinds[1],
        swizzle_a=swizzle, swizzle_b=swizzle, output_dtype=out, use_fast_accum=fast,
    )  # fmt: skip
    return y.to(dtype)


def _by_columns(byte: Tensor) -> Tensor:
    """Return scales of 1 x 128 blocks [n, k/128], with stride 1 along n."""
    return scale_of(byte.t().contiguous()).t()


def _squares(byte: Tensor) -> Tensor:
    """Return scales of 128 x 128 blocks: bytes [m, k/128] -> [k/128 padded to 4, m/128]."""
    squares = byte[::128]
    return scale_of(F.pad(squares, (0, -squares.shape[1] % 4))).t()


def swizzled(byte: Tensor) -> Tensor:
    """Return e8m0 scales in the order of tensor cores: bytes [n, k/32], padded to tiles of 128 x 4.

    A tile's rows r and columns c stand at 16 (r mod 32) + 4 (r div 32) + c; tiles row by row.
    """
    n, blocks = byte.shape
    padded = F.pad(byte, (0, -blocks % 4, 0, -n % 128))
    tiles = padded.view(len(padded) // 128, 4, 32, -1, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(torch.float8_e8m0fnu)
