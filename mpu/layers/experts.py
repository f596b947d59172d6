# SPDX-License-Identifier: Apache-2.0
"""Multiply each row by its expert's matrix: forward, dgrad and wgrad of a mixture of experts.

    n rows, in the order of their experts   E experts, of which this rank holds E/ep
    i in features   o out features

    GroupedLinear   y[rows of e] = x[rows of e] A_e^T    x [n, i], A [E/ep, o, i] -> y [n, o]
    Experts         down(swiglu(gate_up(x)))             x [n, h] -> [n, h]
    RouterLinear    logits = x A^T, in the accumulation dtype    x [T, h], A [E, h] -> [T, E]

Whose rows they are is decided before (mpu/layers/dispatch.py). The matrices of all experts of a
rank are one parameter. The axis ep deals them out, so gradients are summed over edp, the ranks that
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

STEP = 16  # rows between two sizes, at least
Later = list[Callable[[], None]]  # work of a backward that waits for something to hide


class Counts(NamedTuple):
    """Rows of each expert of this rank, which follow one another.

    ends: where each expert's end, int32 on the device, so that a kernel need not wait for the host.
    """

    each: tuple[int, ...]
    ends: Tensor

    @classmethod
    def of(cls, each: Sequence[int], on_device: Tensor) -> "Counts":
        """Return the counts that the host has read of a device's, [E/ep]."""
        return cls(tuple(each), on_device.cumsum(0, dtype=torch.int32))


class PaddedRows(Recipe):
    """Multiply numbers of rows that change from call to call, as those of an expert do.

    oneDNN, which multiplies on a CPU, generates code for each number of rows, 0.6 MB each time. It
    keeps that of its last 1,024 products, and torch that of 1,024 more. So rows are added there up
    to one of a few sizes (`padded_rows`). oneDNN does not multiply fp64.
    """

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x w^T: x [n, i], weight [o, i] -> [n, o]."""
        return super().product(_padded(x), weight)[: len(x)]

    def accumulate(
        self, main_grad: Tensor, fresh: bool, x: Tensor, dy: Tensor, turned: str = ""
    ) -> None:
        """Add dy^T x to main_grad [o, i], or overwrite it if `fresh`: x [n, i], dy [n, o]."""
        super().accumulate(main_grad, fresh, _padded(x), _padded(dy), turned)


RECIPE = PaddedRows()  # of products, which are the same on every device


def padded_rows(rows: int) -> int:
    """Return the next size: the multiples of 16 up to 512, then 16 from one power of 2 to the next.

    So at most 15 rows are added, or a 16th of them, and up to 65,536 rows have 144 sizes.
    """
    step = max(STEP, (1 << (rows - 1).bit_length()) // 32)
    return -(-rows // step) * step


def pads(x: Tensor) -> bool:
    """Return whether products of these rows are of a few sizes only."""
    return x.device.type == "cpu" and x.dtype != torch.float64


def _padded(x: Tensor) -> Tensor:
    """Return x [n, i] with rows of zeros up to the next size, a copy unless it has that."""
    n, size = len(x), padded_rows(len(x)) if pads(x) else len(x)
    if n == size:
        return x
    out = x.new_empty((size, x.shape[1]))
    out[:n], out[n:] = x, 0
    return out


class GroupedLinear(nn.Module):
    """y = x A_e^T for the rows of each expert e.

    sections: sizes of the matrices that are fused into each expert's (gate, up), along o. Raises
    ValueError where the experts do not divide over the ranks of ep.
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
        """x [n, i] -> [n, o]. counts: rows of each expert of this rank, n in all.

        later: takes the wgrad of backward, for who gets the gradient of x to run.
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
        """Return the whole local weight as [E/ep, o, i]; then call `end_use`."""
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
    """Yield (expert, first row, last row + 1)."""
    for e, high in enumerate(accumulate(counts.each)):
        yield e, high - counts.each[e], high


def grouped_product(
    x: Tensor, weights: Tensor, counts: Counts, on_gpu: bool = False
) -> Tensor:
    """Return x w_e^T of each expert's rows: x [n, i], weights [E, o, i] -> [n, o].

    on_gpu: LayerContext's. In bf16 on a GPU it is one kernel, torch's grouped_mm; elsewhere a loop
    over the experts. On meta tensors it is one matmul of as many FLOPs.
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

    x [n, i], dy [n, o]. Triton adds rows of 16 bits to fp32 in one kernel; elsewhere it is a loop
    over the experts.
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
        x = x.detach() if queue.defers() else x  # else the graph lives on

        work = queue.later(lambda: layer.wgrad(x, dy, counts), (x, dy))
        # whoever made x gets dx, and runs the work, unless nobody needs dx
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
        """x [n, h], rows in the order of their experts -> [n, h]. later: as GroupedLinear's, for
        the wgrad of gate_up.
        """
        return self.down(swiglu(self.gate_up(x, counts, later)), counts)


class RouterLinear(nn.Module):
    """logits = x A^T, computed in the accumulation dtype, and so is the gradient of A [E, h].

    Every rank holds A whole and applies it to its own part of s, so its gradient is partial there.
    """

    takes = gives = Region.SEQUENCE_PARALLEL  # what of the activations a rank has

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
