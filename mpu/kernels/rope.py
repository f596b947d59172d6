# SPDX-License-Identifier: Apache-2.0
"""Rotate q and k and concatenate q, k and v: the split of fused qkv, in both directions.

forward    q, k, v are slices of qkv: out may be qkv itself; v is then not touched
backward   dq, dk, dv are separate tensors, and become one dqkv, rotated back

first' = first cos - second sin;  second' = second cos + first sin     over halves of a head
"""

from collections.abc import Mapping, Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mpu.kernels.declared import Cost, declared
from mpu.kernels.launch import next_power_of_2

LANES = 2048  # elements of half heads that a program holds at once


def cost(a: Mapping[str, Any]) -> Cost:
    """Return the cost: q and k, and v if copied, are read and written; the angles are read."""
    moved = sum(a[name].nbytes for name in ("q", "k") + ("v",) * a["COPY"])
    return Cost(2 * moved + a["cos"].nbytes + a["sin"].nbytes, 0.0, ("out",))


@declared(
    cost, q="rows same", k="rows same", v="rows same", out="whole same", cos="rows sums",
    sin="rows sums like",
)  # fmt: skip
@triton.jit
def rope_kernel(
    q, k, v, out, cos, sin, batch, heads, groups, half, q_s, q_b, q_n, k_s, k_b, k_n, v_s, v_b, v_n,
    angle_s, angle_b, BACK: tl.constexpr, COPY: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Rotate all heads of one token. BACK: by the opposite angle. COPY: copy v, too."""
    row = tl.program_id(0).to(tl.int64)
    i, j = row // batch, row % batch
    lane = tl.arange(0, HALF)
    angle = i * angle_s + j * angle_b + lane
    c = tl.load(cos + angle, lane < half, 0.0)[None, :]
    s = tl.load(sin + angle, lane < half, 0.0)[None, :]
    if BACK:
        s = -s
    out += row * (heads + 2 * groups) * 2 * half
    rotate(q + i * q_s + j * q_b, q_n, out, c, s, heads, half, True, HEADS, HALF)
    out += heads * 2 * half
    rotate(k + i * k_s + j * k_b, k_n, out, c, s, groups, half, True, HEADS, HALF)
    if COPY:
        out += groups * 2 * half
        rotate(v + i * v_s + j * v_b, v_n, out, c, s, groups, half, False, HEADS, HALF)


@triton.jit
def rotate(
    x, step, out, c, s, count, half, ROTATE: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr
):
    """Rotate `count` heads, `step` elements apart, into adjacent places; without ROTATE copy them.
    """
    lane = tl.arange(0, HALF)[None, :]
    for start in range(0, count, HEADS):
        head = start + tl.arange(0, HEADS)[:, None]
        inside = (head < count) & (lane < half)
        there, here = head * step + lane, head * 2 * half + lane
        first, second = tl.load(x + there, inside), tl.load(x + there + half, inside)
        if ROTATE:
            a, b = first.to(c.dtype), second.to(c.dtype)
            first, second = a * c - b * s, b * c + a * s
        tl.store(out + here, first.to(out.dtype.element_ty), inside)
        tl.store(out + here + half, second.to(out.dtype.element_ty), inside)


def rope(
    qkv: Sequence[Tensor], cos: Tensor, sin: Tensor, out: Tensor, *, copy: bool, back: bool = False
) -> None:
    """Write q, k, v [s, b, n, d], concatenated, to `out`, with q and k rotated, or rotated back.

    out: contiguous. Without `copy` all three are slices of it, and v is unchanged. A head is
    contiguous. cos, sin: [s, 1 or b, 1, d/2] with the same layout, in the dtype of the arithmetic.
    """
    q, k, v = qkv
    s, b, heads, d = q.shape
    half, angles = next_power_of_2(d // 2), cos.expand(s, b, 1, d // 2)
    rope_kernel.launch(
        (s * b,),
        q=q, k=k, v=v, out=out, cos=cos, sin=sin, batch=b, heads=heads, groups=k.shape[2],
        half=d // 2, q_s=q.stride(0), q_b=q.stride(1), q_n=q.stride(2), k_s=k.stride(0),
        k_b=k.stride(1), k_n=k.stride(2), v_s=v.stride(0), v_b=v.stride(1), v_n=v.stride(2),
        angle_s=angles.stride(0), angle_b=angles.stride(1), BACK=back,
        COPY=copy, HALF=half,
        HEADS=min(next_power_of_2(heads), max(1, LANES // half)),
    )  # fmt: skip
