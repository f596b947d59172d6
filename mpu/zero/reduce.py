# SPDX-License-Identifier: Apache-2.0
"""Sum a bucket's gradients over ranks: the sequence of collectives, for every ZeRO stage.

    extra axes     all_reduce_in_order      norms under sequence parallelism, tied embeddings
    to the owner   reduce_scatter           over the ranks that share a bucket
    instances      reduce_scatter, all_gather    of the owner's sum, if there are several
    stage 0        all_gather               so that every rank has the sums

On NCCL, stage 0 with one instance uses one all_reduce instead. The bits of a sum depend only on the
Reduction and on its number of micro-batches, never on the bucket (docs/numerics.md).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mpu.comm.collectives import all_gather, all_reduce, all_reduce_in_order, reduce_scatter
from mpu.comm.transport import Axis, Handle, Label


class Reduction(NamedTuple):
    """Which data-parallel ranks reduce gradients, and in which dtypes."""

    zero_stage: int
    shard: Axis  # ranks that share a bucket
    replicate: Axis  # ranks that own the same shard in other optimizer instances
    dtype: torch.dtype  # of the reduction
    main_dtype: torch.dtype  # of a rank's own accumulation over micro-batches
    wire_dtype: torch.dtype | None = None  # on the wire; None: main_dtype
    is_async: bool = True  # whether it overlaps with compute


def sum_over_extra_axes(grad: Tensor, axes: tuple[Axis, ...], label: Label) -> None:
    """Sum unsharded gradients over axes that are not data-parallel, in place, synchronously."""
    for axis in axes:
        all_reduce_in_order(grad, axis, label)


def sum_over_data(
    grad: Tensor, grad_shard: Tensor, how: Reduction, label: Label, *, earlier: bool, last: bool
) -> Iterator[Handle]:
    """Sum `grad` into its owners' `grad_shard`; yield the handle of each collective as it starts.

    The caller waits for a handle before it requests the next. earlier: grad_shard holds the sum of
    an earlier micro-batch, to which this one is added. last: no micro-batch of the step follows, so
    instances add their sums. From stage 1 on this keeps no reference to `grad` after its
    reduce-scatter. At stage 0 `grad` also holds the sum.
    """
    own, shard, replicate, stage = grad_shard, how.shard, how.replicate, how.zero_stage
    narrow = how.wire_dtype not in (None, grad.dtype) and shard.size > 1
    if not stage:
        part = grad.numel() // shard.size
        own = grad[shard.rank * part : (shard.rank + 1) * part]
    if stage or not shard.on_gpu(grad) or shard.staged or narrow or replicate.size > 1:
        into = torch.empty_like(own) if earlier else own
        put = grad.to(how.wire_dtype) if narrow else grad
        _, handle = reduce_scatter(put, shard, async_op=how.is_async, into=into, label=label)
        del put
        yield handle
        if stage:
            grad = own  # so that the buffer is freed
        if earlier:
            own.add_(into)
        if replicate.size > 1 and last:
            piece, handle = reduce_scatter(own, replicate, async_op=how.is_async, label=label)
            yield handle
            yield all_gather(piece, replicate, async_op=how.is_async, into=own, label=label)[1]
        if not stage:
            yield all_gather(own, shard, async_op=how.is_async, into=grad, label=label)[1]
    else:
        yield all_reduce(grad, shard, async_op=how.is_async, label=label)[1]
    if not stage and grad.dtype != how.dtype:
        grad_shard.copy_(grad)
