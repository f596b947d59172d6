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

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from mpu.comm.overlap import all_gather_matmul, matmul_reduce_scatter
from mpu.comm.paths import Path, path_of
from mpu.context import LayerContext
from mpu.param import Placement, cut, parameter


class _Linear(nn.Module):
    """A weight of the sink's, for the matmuls of mpu/comm/overlap.py."""

    ctx: LayerContext

    @property
    def path(self) -> Path:
        """How the parts of x, or of y, travel."""
        return path_of(self.ctx.overlap.mode, self.ctx.overlap.choices, self.ctx.tp, self.ctx.sp)

    @property
    def deferring(self) -> bool:
        """True where a pipeline runs weight gradients later."""
        return self.ctx.queue.deferring

    def take(self, weight: nn.Parameter) -> Tensor:
        """Return the weight, whole."""
        return self.ctx.sink.materialize(weight)

    def give_back(self, weight: nn.Parameter) -> None:
        """Say that it is not needed for now."""
        self.ctx.sink.release(weight)

    def put(self, work: Callable[[], None], kept: Sequence[Tensor] = ()) -> None:
        """Run a weight gradient, now or later; it holds `kept` until then."""
        self.ctx.queue.put(work, kept)

    def add(self, weight: nn.Parameter, x: Tensor, dy: Tensor) -> None:
        """Give the sink dy^T x; the weight gets no other gradient from this use."""
        self.ctx.sink.accumulate(weight, x, dy)
        self.ctx.sink.done(weight)

    def extra_repr(self) -> str:
        """Say the sizes and the rank."""
        tp = self.ctx.tp
        return f"{self.in_features} -> {self.out_features}, rank {tp.rank} of {tp.size}"


class ColumnParallelLinear(_Linear):
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
        return all_gather_matmul(x, [self.weight], self.path, self)[0]


class RowParallelLinear(_Linear):
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
        return matmul_reduce_scatter(x, self.weight, self.path, self)


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
