# SPDX-License-Identifier: Apache-2.0
"""Multiply in float8: a Recipe whose operands are rows of codes with their scales.

    forward  y  = x w^T     rows of x, k = i; rows of w, k = i
    dgrad    dx = dy w      rows of dy, k = o; rows of w^T, k = o: requantized from the rows of w
    wgrad    dw = dy^T x    rows of dy^T and x^T, k = tokens: requantized from those of dy and x

    scaling      a scale for                           of a weight      requantized rows are exact
    tensorwise   the whole tensor, of all ranks        the same         always: the same codes
    rowwise      a row                                 the same         except for underflow
    blockwise    128 numbers of a row                  128 x 128        w: always; dy, x: as rowwise
    mxfp8        32 numbers of a row                   the same         except for underflow

Every scale is a power of two (mpu/layers/float8/rows.py), so multiplying by it is exact, and the
point at which a sum of products is scaled changes no bit. If a scale spans several ranks, they
first agree on it by the maximum of their bytes, so that rows are the same bytes in every layout.
Tensor-parallel ranks divide features and, under sequence parallelism, tokens; context-parallel
ranks divide tokens.

On CUDA torch's scaled_mm multiplies (mpu/layers/float8/cuda.py). Elsewhere `product` decodes the
rows, multiplies in the accumulation dtype and rounds once: it emulates the arithmetic only.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from mpu.comm.collectives import MAX, all_reduce
from mpu.comm.transport import Axis, Label
from mpu.context import LayerContext
from mpu.layers.float8 import cuda as float8_cuda
from mpu.layers.float8.delayed import AmaxHistory, Delayed, Slot
from mpu.layers.float8.rows import (
    ALIGN,
    BLOCKS,
    E4M3,
    E5M2,
    Format,
    by_kernels,
    decode,
    encode,
    made,
    remade,
    row_bytes,
    row_scales,
    swiglu_rows,
    swiglu_scale,
)
from mpu.layers.linear import ColumnParallelLinear, Recipe, RowParallelLinear
from mpu.param import placement_of

FORMATS = {"e4m3": E4M3, "hybrid": E5M2}  # of dy; x and w are always e4m3


def format_of_dy(scaling: str, name: str) -> Format:
    """Return the format of dy. With a scale for each block it is e4m3: torch supports no other on
    CUDA (mpu/kernels/by_address.py), and with a scale per block the range of e5m2 is not needed.
    """
    return E4M3 if BLOCKS[scaling] else FORMATS[name]


@dataclass(frozen=True, eq=False)
class Float8(Recipe):
    """The recipe of one scaling."""

    scaling: str
    format: str
    ctx: LayerContext
    wgrad: bool = True  # weight gradients in float8; else from unquantized x and dy
    # rows of w and w^T are made once per step, as in Transformer Engine, not per micro-batch
    keeps: bool = False
    slot: Slot | None = None  # for delayed scaling: the amaxes of the layer
    # for delayed scaling: the same recipe without `slot`, which all layers share
    plain: "Float8 | None" = None
    on_gpu: bool = field(init=False)
    nothing: Tensor = field(init=False, repr=False)  # one NaN: see `unread`

    def __post_init__(self) -> None:
        object.__setattr__(self, "on_gpu", self.ctx.on_gpu)
        nothing = torch.full((1,), torch.nan, dtype=self.ctx.dtype, device=self.ctx.device)
        object.__setattr__(self, "nothing", nothing)

    def __str__(self) -> str:
        scaling = self.scaling if self.slot is None else "delayed"
        return f"{scaling} {self.format}{'' if self.wgrad else ', wgrad in bf16'}"

    def of_any_layer(self) -> Recipe:
        """Return the recipe without the state of a layer."""
        return self.plain or self

    @property
    def block(self) -> int:
        """Return how many numbers of a row share a scale; 0: all of them."""
        return BLOCKS[self.scaling]

    @property
    def follows_swiglu(self) -> bool:  # type: ignore[override]
        """Return whether SwiGLU writes operands directly. A rowwise scale needs the whole row, and
        that of the transpose all tokens, so nothing would be saved. Delayed scaling, which records
        amaxes, and wgrad in bf16 need the unquantized tensor.
        """
        return self.scaling != "rowwise" and self.slot is None and self.wgrad

    @property
    def dy(self) -> Format:
        """Return the format of dy."""
        return format_of_dy(self.scaling, self.format)

    def operand(self, x: Tensor, role: str, cut: str) -> Tensor:
        """Return rows, uint8 [..., row_bytes], of x [..., k]. All ranks of tp must call it."""
        if role == "wt":
            rows = self._transposed(x, cut)
        else:
            rows = self._rows(x, role, cut, wide=role == "w" and not self.block)
        if self.on_gpu and role in ("w", "wt"):
            float8_cuda.prepare(rows, self.scaling)
        return rows

    def _rows(self, x: Tensor, role: str, cut: str, wide: bool = False) -> Tensor:
        flat, form = x.flatten(0, -2), self.dy if role == "dy" else E4M3
        axes = self.shared(role, cut)
        if self.scaling == "tensorwise" or axes:
            scales = self._scales(flat, form, axes, role)
            if role == "w":
                x.float8_scales = scales  # type: ignore[attr-defined]
            rows = encode(flat, scales.expand(len(flat), -1), form, wide, self.on_gpu)
        else:
            square = self.scaling == "blockwise" and role == "w"
            rows = made(flat, self.block, form, square, wide, self.on_gpu)
        return rows if x.dim() == 2 else rows.view(*x.shape[:-1], rows.shape[1])

    def _scales(self, x: Tensor, form: Format, axes: Sequence[Axis], role: str) -> Tensor:
        scales = row_scales(x, self.block, form, self.on_gpu)
        if self.scaling == "tensorwise":
            scales = scales.amax(0, keepdim=True)
        if self.slot is not None:
            self.slot.note(role, scales)
            if self.slot.filled:
                return self.slot.scale(role, scales)
        self.agree(scales, axes)
        return scales

    def _transposed(self, w: Tensor, cut: str) -> Tensor:
        """Return the rows of w^T, given w: exact except for underflow.

        They are requantized from the rows of w, which are recomputed with the scales of the last
        forward, so that backward uses the same weight as forward. Where the codes would be the same
        (tensorwise, blockwise), they are made from w directly.
        """
        cut_of_w = "k" if cut == "rows" else "rows"
        scales: Tensor | None = getattr(w, "float8_scales", None)
        if self.scaling not in ("tensorwise", "blockwise"):
            if scales is None:
                rows = self._rows(w, "w", cut_of_w)
            else:
                rows = encode(w, scales, E4M3, on_gpu=self.on_gpu)
            agree = self._agreed(self.shared("wt", cut))
            return self._remade(rows, E4M3, False, agree, not self.block)
        if self.scaling == "blockwise":
            return made(w.t(), self.block, E4M3, square=True, on_gpu=self.on_gpu)
        if scales is None:
            scales = self._scales(w, E4M3, self.shared("w", cut_of_w), "w")
        by_row = scales.expand(w.shape[1], -1)
        return encode(w.t(), by_row, E4M3, wide=True, on_gpu=self.on_gpu)

    def _remade(
        self,
        rows: Tensor,
        form: Format,
        same: bool,
        agree: Callable[[Tensor], None] | None,
        wide: bool,
    ) -> Tensor:
        return remade(rows, self.block, form, same, agree, wide=wide, on_gpu=self.on_gpu)

    def agree(self, scales: Tensor, axes: Sequence[Axis]) -> None:
        """Replace bytes of scales by their maximum over the ranks of the axes, in place."""
        for axis in axes:
            all_reduce(scales, axis, op=MAX, label=Label(None, "float8 scales"))

    def _agreed(self, axes: Sequence[Axis]) -> Callable[[Tensor], None] | None:
        return partial(self.agree, axes=axes) if axes else None

    def shared(self, role: str, cut: str) -> tuple[Axis, ...]:
        """Return the axes over which a scale is shared.

        For blocks there are none (`check`, and training/flags). cut: see Recipe.operand.
        """
        tp, cp = self.ctx.tp, self.ctx.grid.cp
        if self.scaling == "tensorwise":
            over_tp, over_cp = cut != "sp" or self.ctx.sp, role in ("x", "dy")
        else:
            over_tp, over_cp = self.scaling == "rowwise" and cut == "k", False
        found = ((tp, over_tp), (cp, over_cp))
        return tuple(axis for axis, divided in found if divided and axis.size > 1)

    def swiglu(
        self, gate_up: Tensor, dy: Tensor | None, turned: bool, result: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the rows of SwiGLU's result [..., f], the "x" of the next layer, and those of its
        transpose if `turned`; if dy [..., f] is given, the rows of the gradient [..., 2f], the "dy"
        of the previous layer.

        gate_up: [..., 2f]. result: computes the result itself, if no kernel supports these. With
        one scale for the tensor SwiGLU is computed twice: for the scale, and for the codes.
        """
        role, form = ("x", E4M3) if dy is None else ("dy", self.dy)
        if not by_kernels(gate_up, self.on_gpu) or not gate_up.is_contiguous():
            rows = self.operand(result(), role, "k")
            return rows, self.of_transpose(rows.flatten(0, -2), form) if turned else None
        flat, scale = gate_up.flatten(0, -2), None
        flat_dy = None if dy is None else dy.flatten(0, -2)
        if self.scaling == "tensorwise":
            scale = swiglu_scale(flat, flat_dy, form)
            self.agree(scale, self.shared(role, "k"))
        wide = dy is not None and self.scaling != "mxfp8"  # none for x, which is saved for backward
        rows, other = swiglu_rows(flat, flat_dy, scale, self.block, form, turned=turned, wide=wide)
        return rows.view(*gate_up.shape[:-1], rows.shape[1]), other

    def unread(self, shape: Sequence[int]) -> Tensor:
        """Return a tensor of NaN for a result that is never read, as its operands are used."""
        return self.nothing.expand(*shape).data

    def for_wgrad(self, x: Tensor, operand: Tensor) -> Tensor:
        """Return the rows, or x itself if wgrad is not in float8."""
        return operand if self.wgrad else x

    def row(self, k: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Return the length of a row in bytes."""
        return row_bytes(k, self.block), torch.uint8

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x w^T in the layers' dtype: rows of x [..., k] and of w [o, k] -> [..., o]."""
        return self._multiply(x, weight, E4M3, forward=True)

    def dgrad(self, dy: Tensor, weight: Tensor) -> Tensor:
        """Return dy w: rows of dy [..., o] and of w^T [i, o] -> [..., i]."""
        return self._multiply(dy, weight, self.dy, forward=False)

    def _multiply(self, x: Tensor, weight: Tensor, form: Format, forward: bool) -> Tensor:
        lead, x = x.shape[:-1], x.flatten(0, -2)
        if self.on_gpu:
            pair = float8_cuda.Operand(x, form), float8_cuda.Operand(weight, E4M3)
            y = float8_cuda.multiply(*pair, self.scaling, self.ctx.dtype, fast=forward)
        else:
            wide = self.ctx.accumulate
            numbers = decode(x, self.block, form, wide), decode(weight, self.block, E4M3, wide)
            y = super().product(*numbers).to(self.ctx.dtype)
        return y.view(*lead, y.shape[-1])

    def of_transpose(self, rows: Tensor, form: Format) -> Tensor:
        """Return wgrad's rows, of dy^T or x^T, requantized from rows [n] of dy or x."""
        same, wide = self.scaling == "tensorwise", self.scaling != "mxfp8"
        cp = self.ctx.grid.cp  # a row of dy^T or x^T spans the tokens, which these ranks divide
        divided = self.scaling == "rowwise" and cp.size > 1
        return self._remade(rows, form, same, self._agreed((cp,) if divided else ()), wide)

    def accumulate(
        self, main_grad: Tensor, fresh: bool, x: Tensor, dy: Tensor, turned: str = ""
    ) -> None:
        """Add dy^T x to main_grad [o, i], or overwrite it if `fresh`: rows of x [n], of dy [n].

        turned: which of the two, "x" or "dy", already is rows of the transpose.
        """
        if not self.wgrad:
            super().accumulate(main_grad, fresh, x, dy, turned)
            return
        form = self.dy
        left = dy if turned == "dy" else self.of_transpose(dy, form)
        right = x if turned == "x" else self.of_transpose(x, E4M3)
        if self.on_gpu:
            pair = float8_cuda.Operand(left, form), float8_cuda.Operand(right, E4M3)
            product = float8_cuda.multiply(*pair, self.scaling, torch.float32)
            main_grad.copy_(product) if fresh else main_grad.add_(product)
            return
        dtype = self.ctx.accumulate
        dy = decode(left, self.block, form, dtype).t()
        x = decode(right, self.block, E4M3, dtype).t()
        super().accumulate(main_grad, fresh, x, dy)

    def check(self, name: str, layer: ColumnParallelLinear | RowParallelLinear) -> None:
        """Raise ValueError if a layer's sizes on this rank do not fit blocks or alignment."""
        unit, t = self.block or ALIGN, layer.ctx.tp.size
        sections = placement_of(layer.weight).sections or (layer.out_features,)
        column = isinstance(layer, ColumnParallelLinear)
        for size in (*(n // t if column else n for n in sections), layer.weight.shape[1]):
            if size % unit:
                raise ValueError(
                    f"--fp8-recipe {self.scaling}: {name} has {size} features on a rank at "
                    f"--tensor-model-parallel-size {t}, which is not a multiple of {unit}: "
                    + ("a block would lie across ranks" if self.block else "rows are not aligned")
                )


def use_float8(
    model: nn.Module,
    recipe: Float8,
    in_bf16: Container[int] = (),
    delayed: Delayed | None = None,
) -> None:
    """Set the recipe of the parallel linears in a model's numbered blocks ("layers.3.mlp.down").

    in_bf16: the numbers of blocks to leave unchanged. Layers outside of blocks (the head) and
    layers for which the model set its own recipe are also unchanged. delayed: use delayed scaling;
    the context's sink owns the amaxes. Raises ValueError as Float8.check does.
    """
    found: dict[str, ColumnParallelLinear | RowParallelLinear] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, (ColumnParallelLinear, RowParallelLinear)):
            continue
        number = next((int(part) for part in name.split(".") if part.isdigit()), None)
        if number is None or number in in_bf16 or type(layer.recipe) is not Recipe:
            continue
        recipe.check(name, layer)
        found[name] = layer
    amaxes, ctx = None, recipe.ctx
    if delayed is not None and found:
        for name, layer in found.items():
            if (axis := placement_of(layer.weight).axis) is not ctx.tp:
                raise ValueError(
                    f"--fp8-recipe delayed: {name} is sharded over {axis.name}, but amaxes are "
                    "stored only for layers that are sharded over tp: use --fp8-recipe tensorwise"
                )
        names, like = [f"{name}.weight" for name in found], next(model.parameters())
        amaxes = AmaxHistory(names, delayed, recipe.dy, ctx, like)
        ctx.sink.step_states.append(amaxes)
    for i, layer in enumerate(found.values()):
        slot = None if amaxes is None else Slot(amaxes, i)
        layer.recipe = recipe if slot is None else replace(recipe, slot=slot, plain=recipe)
