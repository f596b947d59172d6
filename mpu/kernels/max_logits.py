# SPDX-License-Identifier: Apache-2.0
"""The largest attention logit of each head, over queries and the keys that they attend to.

A program handles ROWS queries of one head. It iterates over their keys, KEYS at a time, and keeps
the largest product at each of ROWS x KEYS positions in registers: no logit is stored. Programs
combine their results by an atomic maximum, which is exact and so the same in any order. The query
at index i attends to keys [low, high), as in attention's forward:

    low     the largest of i - window + 1, the start of its document, and 0
    high    i + 1 if causal, else the number of keys

If only some queries attend to a key of a tile, the other products are masked; there are at most two
such runs of tiles, and between them nothing is masked.
"""

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mpu.kernels.declared import Cost, declared
from mpu.kernels.launch import INTERPRETED, cdiv, next_power_of_2

# queries, keys, warps and stages by the head size, padded to a power of two: they fit the 99 KiB of
# shared memory that a block has on some GPUs (tests/mpu/kernels/test_max_logits.py)
TILES = {64: (128, 128, 8, 3), 128: (128, 64, 8, 3), 256: (64, 64, 4, 2)}
BITS = 24  # maximum bits of the number of documents


def max_logits(
    q: Tensor,
    k: Tensor,
    noted: Tensor,
    *,
    causal: bool,
    window: int = 0,
    ends: Tensor | None = None,
) -> None:
    """Update `noted` [a] by each head's largest q k^T / sqrt(d): q [b, a, s, d], k [b, g, S, d].

    noted: contiguous, in fp32. q, k: 16-bit, with stride 1 in d, which is at most 256. causal:
    query i attends to keys up to i. window: it attends to keys from i - window + 1 on; 0: from the
    first on. ends: int32 [documents + 1], the first query of each document, and s: a query attends
    only within its document. NaN counts as infinity.
    """
    (b, heads, s, d), (groups, keys) = q.shape, k.shape[1:3]
    width = max(16, next_power_of_2(d))
    rows, columns, warps, stages = (16, 16, 4, 1) if INTERPRETED else TILES[max(64, width)]
    max_logits_kernel.launch(
        (b * heads, cdiv(s, rows)),
        q=q, k=k, noted=noted, ends=ends, s=s, keys=keys, window=window or s + keys,
        documents=1 if ends is None else len(ends) - 1, heads=heads, share=heads // groups,
        scale=d**-0.5, q_b=q.stride(0), q_n=q.stride(1), q_s=q.stride(2), k_b=k.stride(0),
        k_n=k.stride(1), k_s=k.stride(2), CAUSAL=causal, PACKED=ends is not None, SIZE=d,
        WIDTH=width, ROWS=rows, KEYS=columns, BITS=BITS, DOT_F32=INTERPRETED,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def cost(a: Mapping[str, Any]) -> Cost:
    """Return the cost: queries and keys are read once, and each allowed pair is multiplied.
    Documents, whose lengths are on the device, are assumed to be equally long.
    """
    (b, heads, s, d), (groups, keys) = a["q"].shape, a["k"].shape[1:3]
    documents = a["documents"]
    length = s / documents
    far = min(a["window"], length)  # keys of the last query
    if a["CAUSAL"]:
        pairs = documents * far * (length - (far - 1) / 2)
    else:  # a triangle above the diagonal has a window of 1
        pairs = s * (s + 1) / 2 if a["window"] == 1 else s * keys
    moved = b * (heads * s + groups * keys) * d * a["q"].element_size()
    return Cost(moved, 2.0 * b * heads * d * pairs, ("noted",), ("noted",))


@declared(cost, q="half rows", k="rows same", noted="whole float32", ends="whole int32")
@triton.jit(do_not_specialize=["s", "keys", "window", "documents"])
def max_logits_kernel(
    q, k, noted, ends, s, keys, window, documents, heads, share, scale, q_b, q_n, q_s, k_b, k_n,
    k_s, CAUSAL: tl.constexpr, PACKED: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BITS: tl.constexpr, DOT_F32: tl.constexpr,
):  # fmt: skip
    """Compute one head's maximum over ROWS queries. The last queries, with most keys, run first."""
    batch, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS
    # rows beyond the last query repeat it, with the same keys
    row = tl.minimum(first + tl.arange(0, ROWS), s - 1)
    low = tl.maximum(row - window + 1, 0)
    if PACKED:
        # by bisection, unrolled: after a loop Triton would not prefetch keys
        number = tl.zeros_like(row)
        for bit in tl.static_range(BITS):
            further = number + (1 << (BITS - 1 - bit))
            begin = tl.load(ends + further, further < documents, s)
            number = tl.where(begin <= row, further, number)
        low = tl.maximum(low, tl.load(ends + number))
    high = tl.minimum(row + 1, keys) if CAUSAL else tl.zeros_like(row) + keys
    # tiles of [start, open) and [close, stop) are masked, those of [open, close) are whole
    stop = (tl.max(high, 0) + KEYS - 1) // KEYS * KEYS
    start = tl.min(low, 0) // KEYS * KEYS
    open = tl.minimum((tl.max(low, 0) + KEYS - 1) // KEYS * KEYS, stop)
    close = tl.maximum(tl.min(high, 0) // KEYS * KEYS, open)
    q += batch.to(tl.int64) * q_b + head.to(tl.int64) * q_n
    k += batch.to(tl.int64) * k_b + (head // share).to(tl.int64) * k_n
    x = load_rows(q, row, q_s, SIZE, WIDTH, DOT_F32)
    column = tl.arange(0, KEYS)
    top = tl.full((ROWS, KEYS), -float("inf"), tl.float32)
    for at in range(open, close, KEYS):
        y = load_rows(k, at + column, k_s, SIZE, WIDTH, DOT_F32)
        top = larger(top, tl.dot(x, y.T, input_precision="ieee"))
    for i in range(start, open + stop - close, KEYS):
        key = tl.where(i < open, i, i + close - open) + column
        y = load_rows(k, tl.minimum(key, keys - 1), k_s, SIZE, WIDTH, DOT_F32)
        seen = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
        top = larger(top, tl.where(seen, tl.dot(x, y.T, input_precision="ieee"), -float("inf")))
    top = tl.where(top == top, top, float("inf"))
    tl.atomic_max(noted + head, tl.max(tl.max(top, 1), 0) * scale, sem="relaxed")


@triton.jit
def larger(x, y):
    """Return the larger of each pair; NaN if one of them is NaN."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def load_rows(x, row, stride, SIZE: tl.constexpr, WIDTH: tl.constexpr, DOT_F32: tl.constexpr):
    """Return rows of SIZE elements, zero-padded to WIDTH. DOT_F32: as in product.py."""
    lane = tl.arange(0, WIDTH)[None, :]
    there = x + row.to(tl.int64)[:, None] * stride + lane
    value = tl.load(there) if SIZE == WIDTH else tl.load(there, lane < SIZE, 0.0)
    return value.to(tl.float32) if DOT_F32 else value
