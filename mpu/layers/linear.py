# SPDX-License-Identifier: Apache-2.0
"""Cut a matmul over tensor-parallel ranks, by columns or by rows.

Column: Y = X A^T with A's rows (output features) cut, A = [A_1; ...; A_t]; every rank makes its own
columns of Y.
Row:    Y = sum_i X_i A_i^T with A's columns (input features) cut; the partial products are summed.
A column layer followed by a row layer needs one collective each way (Shoeybi et al. 2019); under
sequence parallelism that all-reduce becomes an all-gather before the column layer and a
reduce-scatter after the row layer (Korthikanti et al. 2022).

    s sequence, b micro-batch, i in features, o out features, t tensor-parallel size

                 forward                              backward
    column, SP   x [s/t,b,i] -all-gather-> [s,b,i]    x gathered again under the dgrad matmul,
                 -> y [s,b,o/t]                       dx reduce-scattered under the wgrad matmul
    column       x [s,b,i] -> y [s,b,o/t]             dx all-reduced under the wgrad matmul
    row, SP      x [s,b,i/t] -> partial [s,b,o]       dy [s/t,b,o] gathered once for dgrad and wgrad
                 -reduce-scatter-> y [s/t,b,o]
    row          x [s,b,i/t] -all-reduce-> y [s,b,o]  no communication

dgrad (dx = dy A) and wgrad (dA = dy^T x) are two pieces: wgrad goes through the context's queue, so
a pipeline may run it later; it then kept only shards and gathers them again.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpu.comm.collectives import DONE, all_gather, all_reduce, reduce_scatter
from mpu.context import LayerContext
from mpu.param import Placement, cut, parameter


class ColumnParallelLinear(nn.Module):
    """y = x A^T with A [o, i] cut by rows: x [s/t, b, i] (SP) or [s, b, i] -> y [s, b, o/t]. No
    bias.

    out_features: one size, or several fused into one matmul (q, k, v; gate, up), each cut on its
    own. pad_to: round the local rows of a single section up to a multiple of this (vocabulary).
    weight: share this parameter (tied embeddings) instead of making one. Raises ValueError where a
    section does not divide by the tensor-parallel size.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        *,
        ctx: LayerContext,
        pad_to: int = 0,
        weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        sections = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        self.ctx = ctx
        if weight is None:
            place = column_placement(in_features, sections, ctx, pad_to)
            weight = parameter(place, ctx.dtype, ctx.device, ctx.sink)
        self.weight = weight
        self.in_features, self.out_features = in_features, sum(sections)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply, gathering x along s first under SP."""
        return _ColumnLinear.apply(x, self.weight, self)

    def extra_repr(self) -> str:
        tp = self.ctx.tp
        return f"{self.in_features} -> {self.out_features}, rank {tp.rank} of {tp.size}"


class RowParallelLinear(nn.Module):
    """y = sum_i x_i A_i^T with A [o, i] cut by columns: x [s, b, i/t] -> y [s/t, b, o] (SP) or [s,
    b, o].

    Raises ValueError where in_features does not divide by the tensor-parallel size.
    """

    def __init__(self, in_features: int, out_features: int, *, ctx: LayerContext) -> None:
        super().__init__()
        self.ctx = ctx
        local = cut(
            "tensor-parallel", in_features, ctx.tp, "input features of a row-parallel layer"
        )
        place = Placement((out_features, in_features), dim=1, axis=ctx.tp, local_size=local)
        self.weight = parameter(place, ctx.dtype, ctx.device, ctx.sink)
        self.in_features, self.out_features = in_features, out_features

    def forward(self, x: Tensor) -> Tensor:
        """Multiply, then sum over the ranks, each keeping its part of s under SP."""
        return _RowLinear.apply(x, self.weight, self)

    extra_repr = ColumnParallelLinear.extra_repr


def column_placement(
    width: int, sections: tuple[int, ...], ctx: LayerContext, pad_to: int = 0
) -> Placement:
    """Place a [sum(sections), width] weight cut by rows; `pad_to` rounds one section's local rows
    up.
    """
    tp = ctx.tp
    if pad_to:
        (rows,) = sections
        local = -(-rows // (pad_to * tp.size)) * pad_to
    else:
        local = sum(
            cut("tensor-parallel", n, tp, "output features of a column-parallel layer")
            for n in sections
        )
    return Placement((sum(sections), width), 0, tp, sections, local)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x [s, b, i] times weight^T, weight [o, i] -> [s, b, o].

    In fp32 on a CPU by oneDNN's linear, the operator that torch's own compiler emits there: MKL's
    sgemm, which F.linear calls, is slower by a tenth to a third on these shapes. Everything else is
    F.linear.
    """
    onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if onednn is None or x.device.type != "cpu" or x.dtype != torch.float32:
        return F.linear(x, weight)
    return onednn(x, weight, None, "none", [], "")


def _dgrad(dy: Tensor, weight: Tensor) -> Tensor:
    """dy [s, b, o] times weight [o, i] -> [s, b, i]."""
    return _product(dy, weight.t())


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(f: Any, x: Tensor, weight: nn.Parameter, layer: ColumnParallelLinear) -> Tensor:
        ctx = layer.ctx
        f.layer = layer
        f.save_for_backward(x)  # under SP only the shard is kept
        full = all_gather(x, ctx.tp)[0] if ctx.sp else x
        y = _product(full, ctx.sink.materialize(weight))
        ctx.sink.release(weight)
        return y

    @staticmethod
    def backward(f: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        #   Before:  gather x -> dgrad -> wait -> reduce dx -> wait -> wgrad
        #   Now:     [gather x | dgrad] -> [reduce dx | wgrad]
        layer: ColumnParallelLinear = f.layer
        ctx, weight = layer.ctx, layer.weight
        (x,) = f.saved_tensors
        again = ctx.sp and not ctx.queue.deferring
        full, gathering = all_gather(x, ctx.tp, async_op=True) if again else (x, DONE)
        dx = _dgrad(dy, ctx.sink.materialize(weight))
        ctx.sink.release(weight)
        reduce: Any = reduce_scatter if ctx.sp else all_reduce
        dx, reducing = reduce(dx, ctx.tp, async_op=True)

        def wgrad() -> None:
            gathering.wait()
            whole = all_gather(x, ctx.tp)[0] if ctx.sp and not again else full
            ctx.sink.accumulate(weight, _flat(whole), _flat(dy))
            ctx.sink.done(weight)

        ctx.queue.put(wgrad)
        reducing.wait()
        return dx, None, None


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(f: Any, x: Tensor, weight: nn.Parameter, layer: RowParallelLinear) -> Tensor:
        ctx = layer.ctx
        f.layer = layer
        f.save_for_backward(x)
        partial = _product(x, ctx.sink.materialize(weight))
        ctx.sink.release(weight)
        return (reduce_scatter if ctx.sp else all_reduce)(partial, ctx.tp)[0]

    @staticmethod
    def backward(f: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        layer: RowParallelLinear = f.layer
        ctx, weight = layer.ctx, layer.weight
        (x,) = f.saved_tensors
        full = all_gather(dy, ctx.tp)[0] if ctx.sp else dy
        dx = _dgrad(full, ctx.sink.materialize(weight))
        ctx.sink.release(weight)
        kept = dy if ctx.queue.deferring else full  # a deferred wgrad keeps the shard

        def wgrad() -> None:
            whole = all_gather(dy, ctx.tp)[0] if ctx.sp and kept is dy else kept
            ctx.sink.accumulate(weight, _flat(x), _flat(whole))
            ctx.sink.done(weight)

        ctx.queue.put(wgrad)
        return dx, None, None
