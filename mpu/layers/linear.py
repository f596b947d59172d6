# SPDX-License-Identifier: Apache-2.0
"""Cut a matmul over tensor-parallel ranks, by columns or by rows: forward, dgrad and wgrad.

Column: Y = X A^T with A's rows (output features) cut, A = [A_1; ...; A_t]; each rank computes its
own columns of Y.
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

dgrad (dx = dy A) and wgrad (dA = dy^T x) are separate: wgrad goes through the context's queue, so a
pipeline may run it later; a deferred wgrad keeps only shards and gathers them again. A frozen
weight has no wgrad, so x is not saved; if no earlier layer trains there is no dgrad. The layer's
OverlapMethod (mpu/overlap/method.py) implements the all-gather (start_all_gather) and the
reduce-scatter (matmul_reduce_scatter). The layer's Recipe makes the operands: the tensors that are
multiplied, saved and sent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpu.comm.transport import Label
from mpu.context import LayerContext
from mpu.gradients import use
from mpu.overlap.choices import OverlapMap
from mpu.overlap.method import OverlapMethod
from mpu.param import Placement, Region, divide, parameter, placement_of
from mpu.torch_private import linear_pointwise


def onednn_linear(x: Tensor) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return oneDNN's x w^T for fp32 on a CPU, where it is the fastest available kernel, else None.

    It is the operator that torch's own compiler emits there. F.linear and torch.mm call MKL's
    sgemm, which takes 1.1 to 2 times as long on the shapes of a step. For meta tensors it is
    F.linear, whose result has the same shape.
    """
    if x.dtype != torch.float32 or x.device.type not in ("cpu", "meta"):
        return None
    onednn = linear_pointwise()
    if onednn is None or x.is_meta:
        return onednn and F.linear
    return partial(onednn, B=None, attr="none", scalars=[], algorithm="")


@dataclass(eq=False)
class Operands:
    """Operands that SwiGLU writes, instead of tensors, for the linears before and after it.

    x: the operands of `down`, of its forward and of its wgrad. dy: the operands of `gate_up`, of
    its dgrad and of its wgrad. Those of wgrad are already transposed; None: wgrad needs none.
    """

    x: tuple[Tensor, Tensor | None] | None = None
    dy: tuple[Tensor, Tensor | None] | None = None

    def take(self, role: str) -> tuple[Tensor, Tensor | None] | None:
        """Return the operands for "x" or "dy" and drop them; None: there are none."""
        made: tuple[Tensor, Tensor | None] | None = getattr(self, role)
        setattr(self, role, None)
        return made


class Recipe:
    """How a parallel linear multiplies; subclass it for another arithmetic, such as float8.

    An operand is the form of a tensor that is multiplied, saved for backward and sent: rows
    [..., k], summed over k. This recipe's operands are the tensors themselves, in their own dtype.

    on_gpu: the layer's (LayerContext.on_gpu). keeps: whether the operand of a weight is cached from
    one micro-batch to the next.
    """

    on_gpu = False
    keeps = False
    follows_swiglu = False  # whether SwiGLU writes operands between two layers with this recipe

    def __init__(self, on_gpu: bool = False) -> None:
        self.on_gpu = on_gpu

    def of_any_layer(self) -> "Recipe":
        """Return the recipe without the state of a layer: here itself."""
        return self

    def operand(self, x: Tensor, role: str, cut: str) -> Tensor:
        """Return the operand for x, w or dy, before it is sent or saved; for "wt", that of w^T.

        cut: the dimension that tensor-parallel ranks divide: "rows", "k", or "sp": rows, under SP.
        """
        return x.t() if role == "wt" else x

    def for_wgrad(self, x: Tensor, operand: Tensor) -> Tensor:
        """Return the input of wgrad for x or dy: here their operand."""
        return operand

    def row(self, k: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Return the length and the dtype of an operand's row, given k elements of a dtype."""
        return k, dtype

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x w^T: x [..., i], weight [o, i] -> [..., o]."""
        return (onednn_linear(x) or F.linear)(x, weight)

    def dgrad(self, dy: Tensor, weight: Tensor) -> Tensor:
        """Return dy w: dy [..., o], the operand of w^T [i, o] -> [..., i]."""
        return self.product(dy, weight)

    def accumulate(
        self, main_grad: Tensor, fresh: bool, x: Tensor, dy: Tensor, turned: str = ""
    ) -> None:
        """Add dy^T x to main_grad [o, i], or overwrite it if `fresh`: x [n, i], dy [n, o].

        turned: which of the two, "x" or "dy", already is the operand of its transpose. On a GPU one
        matmul adds in place, in fp32 for bf16. On a CPU a product in fp32, or in a dtype other than
        main_grad's, is first rounded to its own dtype, then added (docs/numerics.md).
        """
        assert not turned, "this recipe takes no transposed operands"
        onednn = None if self.on_gpu else onednn_linear(x)
        if onednn is not None:
            # pass the narrower one as x: the other is then packed as a weight, once
            wide = len(main_grad) > main_grad.shape[1]
            product = onednn(x.t(), dy.t()).t() if wide else onednn(dy.t(), x.t())
            main_grad.copy_(product) if fresh else main_grad.add_(product)
        elif x.dtype == main_grad.dtype:
            torch.mm(dy.t(), x, out=main_grad) if fresh else main_grad.addmm_(dy.t(), x)
        elif not self.on_gpu or (x.itemsize, main_grad.dtype) != (2, torch.float32):
            product = torch.mm(dy.t(), x)
            main_grad.copy_(product) if fresh else main_grad.add_(product)
        elif fresh:
            torch.mm(dy.t(), x, out=main_grad, out_dtype=main_grad.dtype)
        else:
            torch.addmm(main_grad, dy.t(), x, out=main_grad, out_dtype=main_grad.dtype)


class _ParallelLinear(nn.Module):
    """Base class of both layers: a weight, its Recipe and its OverlapMethod."""

    cuts: dict[str, str]  # see Recipe.operand
    takes: Region  # the part of the input that a rank holds
    gives: Region  # the part of the output

    def __init__(
        self, sizes: tuple[int, int], weight: nn.Parameter, ctx: LayerContext, recipe: Recipe | None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = sizes
        self.bias: nn.Parameter | None = None
        self.weight, self.ctx, self.recipe = weight, ctx, recipe or Recipe(ctx.on_gpu)
        if self.recipe.on_gpu != ctx.on_gpu:
            raise ValueError(
                f"{type(self.recipe).__name__} was made with on_gpu={self.recipe.on_gpu}, but its "
                f"layer's context has on_gpu={ctx.on_gpu}: make it with ctx.on_gpu"
            )
        self.method: OverlapMethod = OverlapMap().method(ctx.tp, ctx.sp)  # until `use_overlap`
        phases = ("forward", "backward", "wgrad")
        self.on_forward, self.on_backward, self.on_wgrad = (Label(self, phase) for phase in phases)

    def operand(self, x: Tensor, role: str) -> Tensor:
        """Return the operand for x in the role "x" or "dy"."""
        return self.recipe.operand(x, role, self.cuts[role])

    def operand_of_weight(self, role: str) -> Tensor:
        """Return the operand of the local weight: "w" [o, i], "wt" [i, o]; then call `end_use`.

        With Recipe.keeps it is made once for all micro-batches of a step, unless the weight is
        sharded (ZeRO stage 3).
        """
        sink, key = self.ctx.sink, (self.weight, role)
        kept = sink.weight_rows.get(key)
        if kept is not None:
            return kept
        made = self.operand(sink.acquire(self.weight), role)
        if self.recipe.keeps and not sink.is_sharded(self.weight):
            sink.weight_rows[key] = made
        return made

    def end_use(self) -> None:
        """End the use of the weight, which the sink may then free."""
        self.ctx.sink.end_use(self.weight)

    def wgrad(self, x: Tensor, dy: Tensor, turned: str = "") -> None:
        """Add dy^T x to the weight's main gradient: whole operands x [..., i], dy [..., o]."""
        sink = self.ctx.sink
        main_grad, fresh = sink.grad_slot(self.weight)
        self.recipe.accumulate(main_grad, fresh, x.flatten(0, -2), dy.flatten(0, -2), turned)
        sink.register_grad_ready(self.weight)

    def extra_repr(self) -> str:
        """Return the sizes and the rank."""
        tp = self.ctx.tp
        return f"{self.in_features} -> {self.out_features}, rank {tp.rank} of {tp.size}"


def column_placement(
    width: int, sections: tuple[int, ...], ctx: LayerContext, pad_to: int = 0
) -> Placement:
    """Return the Placement of a [sum(sections), width] weight cut by rows, as embeddings are too.

    pad_to: round the local rows of a single section up to a multiple of this.
    """
    tp = ctx.tp
    if pad_to:
        (rows,) = sections
        local = -(-rows // (pad_to * tp.size)) * pad_to
    else:
        local = sum(
            divide("tensor-parallel", n, tp, "output features of a column-parallel layer")
            for n in sections
        )
    return Placement((sum(sections), width), 0, tp, sections, local)


def column_vector(
    sections: int | Sequence[int], *, ctx: LayerContext, pad_to: int = 0
) -> nn.Parameter:
    """Return an uninitialised vector, cut like the rows of a column-parallel weight with these
    sections: a bias, or a gain per feature. pad_to: as in ColumnParallelLinear.
    """
    sizes = (sections,) if isinstance(sections, int) else tuple(sections)
    place = column_placement(1, sizes, ctx, pad_to)
    return parameter(replace(place, shape=place.shape[:1]), ctx.dtype, ctx.device, ctx.sink)


class ColumnParallelLinear(_ParallelLinear):
    """y = x A^T + bias, A [o, i] cut by rows: x [s/t, b, i] (SP) or [s, b, i] -> y [s, b, o/t].

    out_features: one size, or several fused into one matmul (q, k, v; gate, up), each cut on its
    own. pad_to: round the local rows of a single section up to a multiple of this (vocabulary).
    weight: share this parameter (tied embeddings) instead of making one. output_layer: it is the
    model's last layer, whose weight gradients --defer-embedding-wgrad-compute defers. bias: add a
    bias, cut like the rows. Raises ValueError if a section is not divisible by the tensor-parallel
    size.
    """

    cuts = {"x": "sp", "w": "rows", "dy": "k", "wt": "k"}
    takes, gives = Region.SEQUENCE_PARALLEL, Region.TENSOR_PARALLEL

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        *,
        ctx: LayerContext,
        pad_to: int = 0,
        weight: nn.Parameter | None = None,
        recipe: Recipe | None = None,
        output_layer: bool = False,
        bias: bool = False,
    ) -> None:
        sections = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        if weight is None:
            place = column_placement(in_features, sections, ctx, pad_to)
            weight = parameter(place, ctx.dtype, ctx.device, ctx.sink)
        super().__init__((in_features, sum(sections)), weight, ctx, recipe)
        self.output_layer = output_layer
        if bias:
            self.bias = column_vector(sections, ctx=ctx, pad_to=pad_to)

    def output_sections(self) -> list[tuple[int, int]]:
        """Return, for each section of the output, (features of all ranks, features of this one)."""
        place, t = placement_of(self.weight), self.ctx.tp.size
        if len(place.sections) == 1:
            return [(place.shape[0], place.local_size)]
        return [(size, size // t) for size in place.sections]

    def forward(self, x: Tensor, operands: Operands | None = None) -> Tensor:
        """Multiply, gathering x along s first under SP. operands: source of dy's in backward."""
        y: Tensor = AllGatherMatmul.apply(x, self.weight, self, operands)
        return y if self.bias is None else y + use(self.bias, self.ctx.sink)


class AllGatherMatmul(torch.autograd.Function):
    """y = gather(x) w^T. Its dgrad is MatmulReduceScatter's forward. Saves only the shard of x."""

    @staticmethod
    def forward(
        saved_ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        layer: ColumnParallelLinear,
        operands: Operands | None,
    ) -> Tensor:
        """x [s/t, b, i] (SP) or [s, b, i] -> [s, b, o/t]."""
        operand = layer.operand(x, "x")
        saved_ctx.layer, saved_ctx.operands = layer, operands
        if saved_ctx.needs_input_grad[1]:
            saved_ctx.save_for_backward(layer.recipe.for_wgrad(x, operand))
        method = layer.method.of("gather", operand, len(weight))
        gathering = method.start_all_gather(operand, layer.on_forward)
        y = gathering.multiply(layer.operand_of_weight("w"), layer.recipe.product)
        gathering.close()
        layer.end_use()
        return y

    @staticmethod
    def backward(saved_ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, None]:
        """Return dx, of x's shape, from dy [s, b, o/t], or from the operands that SwiGLU wrote.

        sequential    gather x -> wait -> dgrad -> scatter dx -> wait -> wgrad
        overlapped    [gather x | dgrad] -> [scatter dx | wgrad]
        """
        layer: ColumnParallelLinear = saved_ctx.layer
        queue, recipe = layer.ctx.queue, layer.recipe
        made = saved_ctx.operands and saved_ctx.operands.take("dy")
        operand, turned = made or (layer.operand(dy, "dy"), None)
        method = layer.method.of("scatter", operand, layer.weight.shape[1])  # for all of backward
        deferred = queue.defers(layer.output_layer)
        x = next(iter(saved_ctx.saved_tensors), None)  # None: the weight is frozen
        dx = scattering = again = None
        if x is not None and not deferred:
            again = method.start_all_gather_overlapped(x, layer.on_backward)
        if saved_ctx.needs_input_grad[0]:
            w, label = layer.operand_of_weight("wt"), layer.on_backward
            dx, scattering = method.matmul_reduce_scatter(operand, w, recipe.dgrad, label)
            layer.end_use()
        if x is not None:
            dy_operand = recipe.for_wgrad(dy, operand) if turned is None else turned
            which = "" if turned is None else "dy"
            shard = x.detach() if deferred else x  # x itself would keep the graph alive

            def wgrad() -> None:
                gathering = again or method.start_all_gather_overlapped(shard, layer.on_wgrad)
                layer.wgrad(gathering.gathered(), dy_operand, which)
                gathering.close()

            queue.put(wgrad, (shard, dy_operand), layer.output_layer)
        if scattering is not None:
            scattering.wait()
        return dx, None, None, None


class RowParallelLinear(_ParallelLinear):
    """y = sum_i x_i A_i^T + bias, A [o, i] cut by columns: x [s, b, i/t] -> y [s, b, o] or, under
    SP, [s/t, b, o].

    bias: add a bias; every rank holds all of it, and adds it after the sum. Raises ValueError if
    in_features is not divisible by the tensor-parallel size.
    """

    cuts = {"x": "k", "w": "k", "dy": "sp", "wt": "rows"}
    takes, gives = Region.TENSOR_PARALLEL, Region.SEQUENCE_PARALLEL

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        ctx: LayerContext,
        recipe: Recipe | None = None,
        bias: bool = False,
    ) -> None:
        local = divide(
            "tensor-parallel", in_features, ctx.tp, "input features of a row-parallel layer"
        )
        place = Placement((out_features, in_features), dim=1, axis=ctx.tp, local_size=local)
        weight = parameter(place, ctx.dtype, ctx.device, ctx.sink)
        super().__init__((in_features, out_features), weight, ctx, recipe)
        if bias:
            self.bias = ctx.replicated_parameter((out_features,), Region.SEQUENCE_PARALLEL)

    def forward(self, x: Tensor, operands: Operands | None = None) -> Tensor:
        """Multiply, then sum over the ranks, each keeping its part of s under SP. operands: those
        of x, if SwiGLU wrote them; x itself is then not read.
        """
        y: Tensor = MatmulReduceScatter.apply(x, self.weight, self, operands)
        return y if self.bias is None else y + use(self.bias, self.ctx.sink)


class MatmulReduceScatter(torch.autograd.Function):
    """y = scatter(sum over ranks of x w^T). Its dgrad is AllGatherMatmul's forward."""

    @staticmethod
    def forward(
        saved_ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        layer: RowParallelLinear,
        operands: Operands | None,
    ) -> Tensor:
        """x [s, b, i/t] -> [s/t, b, o] (SP) or [s, b, o]."""
        made, product = operands and operands.take("x"), layer.recipe.product
        operand, turned = made or (layer.operand(x, "x"), None)
        saved_ctx.layer, saved_ctx.turned = layer, "" if turned is None else "x"
        if saved_ctx.needs_input_grad[1]:
            saved_ctx.save_for_backward(
                layer.recipe.for_wgrad(x, operand) if turned is None else turned
            )
        method, w = layer.method.of("scatter", operand, len(weight)), layer.operand_of_weight("w")
        y, scattering = method.matmul_reduce_scatter(operand, w, product, layer.on_forward)
        layer.end_use()
        scattering.wait()
        return y

    @staticmethod
    def backward(saved_ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, None]:
        """dy [s/t, b, o] (SP) or [s, b, o] -> dx [s, b, i/t]. A deferred wgrad keeps dy's shard."""
        layer: RowParallelLinear = saved_ctx.layer
        queue, recipe = layer.ctx.queue, layer.recipe
        operand = layer.operand(dy, "dy")
        method = layer.method.of("gather", operand, layer.weight.shape[1])
        x = next(iter(saved_ctx.saved_tensors), None)  # None: the weight is frozen
        dx = gathering = arrived = None
        if saved_ctx.needs_input_grad[0]:
            gathering = method.start_all_gather(operand, layer.on_backward)
        dy_operand = operand if x is None else recipe.for_wgrad(dy, operand)
        if x is not None and not queue.defers():
            arrived = gathering
            if dy_operand is not operand:  # wgrad's input is gathered during dgrad
                arrived = method.start_all_gather_overlapped(dy_operand, layer.on_wgrad)
        if gathering is not None:
            dx = gathering.multiply(layer.operand_of_weight("wt"), recipe.dgrad)
            layer.end_use()
            if arrived is not gathering:
                gathering.close()
        if x is not None:
            saved, which = x.detach() if queue.defers() else x, saved_ctx.turned

            def wgrad() -> None:
                shard = dy_operand
                full_dy = arrived or method.start_all_gather_overlapped(shard, layer.on_wgrad)
                layer.wgrad(saved, full_dy.gathered(), which)
                full_dy.close()

            queue.put(wgrad, (saved, dy_operand))
        return dx, None, None, None


def use_overlap(model: nn.Module, overlap: OverlapMap) -> OverlapMethod | None:
    """Set the overlap method of every parallel linear of a model, the same on all ranks.

    Returns that method, or None if the model has no such layer.
    """
    layers = [m for m in model.modules() if isinstance(m, _ParallelLinear)]
    method = overlap.method(layers[0].ctx.tp, layers[0].ctx.sp) if layers else None
    for layer in layers:
        layer.method = method or layer.method
    return method
