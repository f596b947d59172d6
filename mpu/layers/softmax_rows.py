# SPDX-License-Identifier: Apache-2.0
"""The softmax of the loss by Triton or torch, if csrc/fused.cpp does not support the tensors.

On CUDA mpu/kernels/cross_entropy.py reads the logits once in forward and once in backward, where
it overwrites them with their gradient. If Triton is not installed, and for fp64, torch computes it
in several passes, some rows at a time.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mpu.layers.fused_gpu import on_triton

ROWS = 64  # rows at a time on a CPU: they stay in the cache for all passes
PASS_BYTES = 1 << 28  # bytes at a time, in fp32, on CUDA: few launches, little memory


def stats(rows: Tensor, targets: Tensor, first: int, vocab_size: int, out: Tensor) -> None:
    """Compute softmax_stats of mpu/layers/cross_entropy.py."""
    real = _real(rows, first, vocab_size)
    if _by_kernels(rows, out.dtype):
        from mpu.kernels import cross_entropy as kernels

        kernels.softmax_stats(rows, targets, first, real, out)
        return
    if not real:
        out.zero_()[0].fill_(torch.finfo(out.dtype).min)
        return
    top, total, chosen = out
    for some in _slices(rows):
        chunk = rows[some, :real].to(out.dtype)
        top[some] = chunk.amax(-1)
        total[some] = (chunk - top[some, None]).exp_().sum(-1)
    here, column = _places(targets, first, real)
    chosen.copy_(rows.gather(-1, column[:, None])[:, 0]).masked_fill_(~here, 0.0)


def gradient(
    rows: Tensor, targets: Tensor, first: int, vocab_size: int, log_sum: Tensor, dloss: Tensor
) -> None:
    """Compute softmax_gradient of mpu/layers/cross_entropy.py; dloss: [n], in log_sum's dtype."""
    real = _real(rows, first, vocab_size)
    if _by_kernels(rows, log_sum.dtype):
        from mpu.kernels import cross_entropy as kernels

        kernels.softmax_gradient(rows, targets, first, real, log_sum, dloss)
        return
    here, column = _places(targets, first, real)
    at = torch.arange(len(rows), device=rows.device)
    for some in _slices(rows):
        chunk = rows[some, :real].to(log_sum.dtype)  # a view of the logits where dtypes agree
        chunk.sub_(log_sum[some, None]).exp_().mul_(dloss[some, None])
        if real:
            chunk[at[: len(chunk)], column[some]] -= dloss[some] * here[some]
        if chunk.dtype != rows.dtype:
            rows[some, :real] = chunk
    rows[:, real:] = 0


def _by_kernels(rows: Tensor, accumulate: torch.dtype) -> bool:
    """Return whether Triton's kernels support these logits: they compute in fp32."""
    return rows.dtype != torch.float64 and on_triton(rows, accumulate=accumulate)


def _real(rows: Tensor, first: int, vocab_size: int) -> int:
    """Return the number of columns that are not padding."""
    return min(max(vocab_size - first, 0), rows.shape[1])


def _places(targets: Tensor, first: int, real: int) -> tuple[Tensor, Tensor]:
    """Return whether each target is in these columns, and its column, or 0 if it is not."""
    column = targets - first
    here = (column >= 0) & (column < real)
    return here, column.masked_fill(~here, 0)


def _slices(rows: Tensor) -> Iterator[slice]:
    step = ROWS if rows.is_cpu else max(ROWS, PASS_BYTES // (4 * rows.shape[1]))
    return (slice(i, i + step) for i in range(0, len(rows), step))
