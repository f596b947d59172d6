# SPDX-License-Identifier: Apache-2.0
"""The grouped matmuls of a mixture of experts: forward, dgrad and wgrad.

    n rows, in the order of their experts   E experts, of which this rank holds E/ep
    i in features   o out features

    GroupedLinear   y[rows of e] = x[rows of e] A_e^T    x [n, i], A [E/ep, o, i] -> y [n, o]
    Experts         down(swiglu(gate_up(x)))             x [n, h] -> [n, h]
    RouterLinear    logits = x A^T, in the accumulation dtype    x [T, h], A [E, h] -> [T, E]

Rows are assigned to experts beforehand (mpu/layers/dispatch.py). The matrices of all experts of a
rank are one parameter. It is cut over the axis ep, so gradients are summed over edp, the ranks that
hold the same experts (mpu.grid.DATA). An expert without rows has a gradient of zeros.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpu.context import LayerContext
from mpu.kernels import available
from mpu.layers.fused import swiglu
from mpu.layers.linear import Recipe
from mpu.param import Placement, Region, divide, parameter

STEP = 16  # minimum distance between two padded sizes, in rows
Later = list[Callable[[], None]]  # backward work deferred until it can hide communication


class Counts(NamedTuple):
    """Numbers of rows of each expert of this rank; the rows of experts follow one another.

    ends: the end of each expert's rows, int32 on the device, so that kernels do not wait for the
    host.
    """

    each: tuple[int, ...]
    ends: Tensor

    @classmethod
    def of(cls, each: Sequence[int], on_device: Tensor) -> "Counts":
        """Return the counts, given on the host and, with the same values, on the device [E/ep]."""
        return cls(tuple(each), on_device.cumsum(0, dtype=torch.int32))


class PaddedRows(Recipe):
    """A Recipe for inputs whose number of rows changes with every call, as an expert's does.

    On a CPU oneDNN generates code for each number of rows, 0.6 MB each time. It caches the code of
    its last 1,024 products, and torch that of 1,024 more. So on a CPU rows are padded to one of a
    few sizes (`padded_rows`). oneDNN does not multiply fp64.
    """

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x w^T: x [n, i], weight [o, i] -> [n, o]."""
        return super().product(_padded(x), weight)[: len(x)]

    def accumulate(
        self, main_grad: Tensor, fresh: bool, x: Tensor, dy: Tensor, turned: str = ""
    ) -> None:
        """Add dy^T x to main_grad [o, i], or overwrite it if `fresh`: x [n, i], dy [n, o]."""
        super().accumulate(main_grad, fresh, _padded(x), _padded(dy), turned)


RECIPE = PaddedRows()  # for products only, which do not depend on on_gpu


def padded_rows(rows: int) -> int:
    """Round up to a size: multiples of 16 up to 512, then 16 sizes between two powers of 2.

    So at most 15 rows, or 1/16 of them, are added, and there are 144 sizes up to 65,536 rows.
    """
    step = max(STEP, (1 << (rows - 1).bit_length()) // 32)
    return -(-rows // step) * step


def pads(x: Tensor) -> bool:
    """Return whether rows like these are padded to one of a few sizes."""
    return x.device.type == "cpu" and x.dtype != torch.float64


def _padded(x: Tensor) -> Tensor:
    """Return x [n, i] padded with rows of zeros to the next size: a copy, unless n is a size."""
    n, size = len(x), padded_rows(len(x)) if pads(x) else len(x)
    if n == size:
        return x
    out = x.new_empty((size, x.shape[1]))
    out[:n], out[n:] = x, 0
    return out


class GroupedLinear(nn.Module):
    """y = x A_e^T for the rows of each expert e.

    sections: sizes, along o, of the matrices that are fused into each expert's (gate, up). Raises
    ValueError if the experts do not divide over the ranks of ep.
    """

    def __init__(
        self, experts: int, in_features: int, sections: Sequence[int], *, ctx: LayerContext
    ) -> None:
        super().__init__()
        ep, out = ctx.grid.ep, sum(sections)
        local = divide("expert-parallel", experts, ep, "the number of experts")
        place = Placement(
            (experts * out, in_features), 0, ep, tuple(sections) * experts, local * out,
            whole_sections=True, fused=len(sections),
        )  # fmt: skip
        self.experts, self.in_features, self.out_features = local, in_features, out
        self.ctx, self.recipe = ctx, PaddedRows(ctx.on_gpu)
        self.weight = parameter(place, ctx.dtype, ctx.device, ctx.sink)

    def forward(self, x: Tensor, counts: Counts, later: Later | None = None) -> Tensor:
        """x [n, i] -> [n, o]. counts: rows of each expert of this rank, n in total.

        later: receives the wgrad of backward, to be run by the consumer of the gradient of x.
        """
        each = counts.each
        if sum(each) != len(x) or len(each) != self.experts:
            raise RuntimeError(
                f"{type(self).__name__} ({self.extra_repr()}) was given {len(x)} rows and counts "
                f"of {list(each)}: there must be a count for each expert, with the rows as sum"
            )
        y: Tensor = _GroupedMatmul.apply(x, self.weight, self, counts, later)
        return y

    def acquire(self) -> Tensor:
        """Return the whole local weight as [E/ep, o, i]; call `end_use` after its use."""
        return self.ctx.sink.acquire(self.weight).view(-1, self.out_features, self.in_features)

    def end_use(self) -> None:
        """End the use of the weight, which the sink may then free."""
        self.ctx.sink.end_use(self.weight)

    def wgrad(self, x: Tensor, dy: Tensor, counts: Counts) -> None:
        """Add dy^T x of each expert's rows to the weight's main gradient."""
        main_grad, fresh = self.ctx.sink.grad_slot(self.weight)
        grads = main_grad.view(-1, self.out_features, self.in_features)
        grouped_wgrad(grads, fresh, x, dy, counts, self.recipe)
        self.ctx.sink.register_grad_ready(self.weight)

    def extra_repr(self) -> str:
        """Return the sizes and the rank."""
        ep = self.ctx.grid.ep
        sizes = f"{self.experts} x {self.in_features} -> {self.out_features}"
        return f"{sizes}, rank {ep.rank} of {ep.size}"


def runs(counts: Counts) -> Iterator[tuple[int, int, int]]:
    """Yield (expert, first row, last row + 1) of each expert."""
    for e, high in enumerate(accumulate(counts.each)):
        yield e, high - counts.each[e], high


def grouped_product(
    x: Tensor, weights: Tensor, counts: Counts, on_gpu: bool = False
) -> Tensor:
    """Return x w_e^T of each expert's rows: x [n, i], weights [E, o, i] -> [n, o].

    on_gpu: LayerContext's. In bf16 on a GPU it is one kernel, torch's grouped_mm; otherwise a loop
    over the experts. For meta tensors it is one matmul with the same FLOPs.
    """
    if x.is_meta:
        return RECIPE.product(x, weights[0])
    if on_gpu and x.dtype == torch.bfloat16 and len(x):
        y: Tensor = F.grouped_mm(x, weights.transpose(1, 2), offs=counts.ends)
        return y
    y = x.new_empty((len(x), weights.shape[1]))
    for e, low, high in runs(counts):
        if high > low:
            first, end = low, high
            if pads(x):  # rows of other experts in place of zeros: no copy
                end = min(low + padded_rows(high - low), len(x))
                first = max(0, min(low, end - padded_rows(high - low)))
            product = RECIPE.product(x[first:end], weights[e])
            y[low:high] = product[low - first : high - first]
    return y


def grouped_wgrad(
    grads: Tensor, fresh: bool, x: Tensor, dy: Tensor, counts: Counts, recipe: Recipe
) -> None:
    """Add dy_e^T x_e of each expert's rows to grads [E, o, i], or overwrite them if `fresh`.

    x [n, i], dy [n, o]. For 16-bit rows and fp32 gradients it is one Triton kernel; otherwise a
    loop over the experts.
    """
    halves = x.dtype in (torch.bfloat16, torch.float16) and grads.dtype == torch.float32
    if halves and available.launches(x):
        from mpu.kernels import grouped_wgrad as kernel

        kernel.grouped_wgrad(x.contiguous(), dy.contiguous(), counts.ends, grads, fresh)
        return
    for e, low, high in runs(counts):
        if high > low:
            recipe.accumulate(grads[e], fresh, x[low:high], dy[low:high])
        elif fresh:
            grads[e].zero_()


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        saved_ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        layer: GroupedLinear,
        counts: Counts,
        later: Later | None,
    ) -> Tensor:
        saved_ctx.layer, saved_ctx.counts, saved_ctx.later = layer, counts, later
        if saved_ctx.needs_input_grad[1]:
            saved_ctx.save_for_backward(x)
        y = grouped_product(x, layer.acquire(), counts, layer.ctx.on_gpu)
        layer.end_use()
        return y

    @staticmethod
    def backward(saved_ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        layer: GroupedLinear = saved_ctx.layer
        counts: Counts = saved_ctx.counts
        dy, dx, queue = dy.contiguous(), None, layer.ctx.queue
        if saved_ctx.needs_input_grad[0]:
            weights = layer.acquire().transpose(1, 2)
            dx = grouped_product(dy, weights, counts, layer.ctx.on_gpu)
            layer.end_use()
        if not saved_ctx.needs_input_grad[1]:
            return dx, None, None, None, None
        (x,) = saved_ctx.saved_tensors
        x = x.detach() if queue.defers() else x  # a deferred closure must not keep the graph alive

        work = queue.later(lambda: layer.wgrad(x, dy, counts), (x, dy))
        # the producer of x receives dx and runs the work, unless dx is not needed
        if saved_ctx.later is not None and dx is not None and not queue.defers():
            saved_ctx.later.append(work)
        else:
            work()
        return dx, None, None, None, None


class Experts(nn.Module):
    """The SwiGLU MLPs of this rank's experts; gate and up of each are one matmul."""

    def __init__(self, experts: int, hidden: int, ffn: int, *, ctx: LayerContext) -> None:
        super().__init__()
        self.gate_up = GroupedLinear(experts, hidden, (ffn, ffn), ctx=ctx)
        self.down = GroupedLinear(experts, ffn, (hidden,), ctx=ctx)

    def forward(self, x: Tensor, counts: Counts, later: Later | None = None) -> Tensor:
        """x [n, h], rows in the order of their experts -> [n, h]. later: see GroupedLinear; it gets
        the wgrad of gate_up.
        """
        return self.down(swiglu(self.gate_up(x, counts, later)), counts)


class RouterLinear(nn.Module):
    """logits = x A^T; logits and the gradient of A [E, h] are computed in the accumulation dtype.

    Every rank holds all of A and applies it to its own part of s, so each rank's gradient is
    partial.
    """

    takes = gives = Region.SEQUENCE_PARALLEL  # the part of the activations that a rank holds

    def __init__(self, hidden: int, experts: int, *, ctx: LayerContext) -> None:
        super().__init__()
        self.ctx = ctx
        self.weight = ctx.replicated_parameter((experts, hidden), Region.SEQUENCE_PARALLEL)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, h] -> [T, E]."""
        logits: Tensor = _Router.apply(x, self.weight, self)
        return logits


class _Router(torch.autograd.Function):
    @staticmethod
    def forward(saved_ctx: Any, x: Tensor, weight: nn.Parameter, layer: RouterLinear) -> Tensor:
        saved_ctx.layer = layer
        if saved_ctx.needs_input_grad[1]:
            saved_ctx.save_for_backward(x)
        kind, sink = layer.ctx.accumulate, layer.ctx.sink
        saved_ctx.dtype = x.dtype
        logits = F.linear(x.to(kind), sink.acquire(weight).to(kind))
        sink.end_use(weight)
        return logits

    @staticmethod
    def backward(saved_ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None]:
        layer: RouterLinear = saved_ctx.layer
        sink, kind, dx = layer.ctx.sink, layer.ctx.accumulate, None
        if saved_ctx.needs_input_grad[0]:
            dx = torch.mm(dy, sink.acquire(layer.weight).to(kind)).to(saved_ctx.dtype)
            sink.end_use(layer.weight)
        if saved_ctx.needs_input_grad[1]:
            (x,) = saved_ctx.saved_tensors
            sink.add(layer.weight, torch.mm(dy.t(), x.to(kind)))
            sink.register_grad_ready(layer.weight)
        return dx, None, None
