# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, RoPE and SwiGLU: the operations between the matmuls, each in one pass over memory.

    RMSNorm      y = x / sqrt(mean(x^2) + eps) * w    Zhang and Sennrich 2019
    apply_rope   rotate q and k by their position     Su et al. 2021; the angles: mpu/layers/rope.py
    swiglu       silu(gate) * up                      Shazeer 2020

Each has three implementations (docs/kernels.md): csrc/fused.cpp for a CPU, called here; mpu/kernels
for a GPU (Triton), and torch's operations otherwise, both called by fused_gpu.py.
"""

from collections.abc import Callable, Sequence
from ctypes import c_double, c_int64, c_void_p
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from mpu import native
from mpu.context import LayerContext
from mpu.layers import fused_gpu
from mpu.layers.linear import AllGatherMatmul, ColumnParallelLinear, Operands, RowParallelLinear
from mpu.layers.norm_backends import norm_backend
from mpu.param import Region
from mpu.torch_private import is_result_of

KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}  # as in csrc/fused.cpp
PLACES = ("cpu", "meta")
C_TYPES: dict[type, Any] = {int: c_int64, float: c_double, type(None): c_void_p}


def fits(*tensors: Tensor, accumulate: torch.dtype | None = None) -> bool:
    """Return whether csrc/fused.cpp is built and supports these: contiguous CPU tensors, one dtype.

    Meta tensors, which represent those of a CPU or a GPU, count as supported: `call` then does
    nothing, and only the results of the library, or of Triton's kernels, are allocated.
    accumulate: the dtype that sums must have, if any; the library sums fp64 in fp64, else in fp32.
    """
    first = tensors[0]
    dtype = first.dtype
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    return (
        dtype in KINDS
        and accumulate in (None, sums)
        and all(t.device.type in PLACES and t.dtype == dtype and t.is_contiguous() for t in tensors)
        and (first.is_meta or native.load() is not None)
    )


def call(
    name: str, dtype: torch.dtype, first: Tensor, *others: Tensor | int | float | None
) -> None:
    """Call weft_<name> of csrc/fused.cpp: kind, threads, first, others, with tensors as pointers.
    For meta tensors, which have no addresses, do nothing.

    Arguments are not checked here but by `fits` and the like; a rehearsal checks every call against
    mpu/kernels/by_address.py.
    """
    if first.is_meta:
        return
    library = native.load()
    assert library is not None
    given = (KINDS[dtype], torch.get_num_threads(), first, *others)
    getattr(library, f"weft_{name}")(
        *[c_void_p(a.data_ptr()) if isinstance(a, Tensor) else C_TYPES[type(a)](a) for a in given]
    )


def attention_is_fast(q: Tensor, units: int) -> bool:
    """Return whether csrc/attention.h supports q, is fast, and `units` occupy all threads."""
    library = native.load()
    return (
        library is not None
        and q.device.type == "cpu"
        and q.dtype in KINDS
        and torch.get_num_threads() <= units
        and bool(library.weft_attention_is_fast())
    )


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * w over the last dimension, in the accumulation dtype.

    region: where it is used; the default is hidden states [s/t, b, h]. A norm inside a head, on
    [s, b, a/t, d], is in Region.TENSOR_PARALLEL. The sink sums the gradients of w accordingly.
    zero_centered: set by a subclass if the norm multiplies by 1 + w (Gemma; Megatron's
    --apply-layernorm-1p). In bf16 1 + w is in the accumulation dtype, which torch's operations
    support and the fused kernels do not. Raises ValueError if --norm-backend names a package and
    the norm is zero-centered.
    """

    zero_centered = False

    def __init__(
        self,
        hidden_size: int,
        *,
        ctx: LayerContext,
        eps: float = 1e-5,
        region: Region = Region.SEQUENCE_PARALLEL,
    ) -> None:
        super().__init__()
        self.ctx, self.eps = ctx, eps
        self.takes = self.gives = region  # the part of the activations that a rank holds
        self.check_backend(ctx.norm_backend)
        self.passes = norm_backend(ctx.norm_backend)  # used if csrc/ does not support it
        self.weight = ctx.replicated_parameter((hidden_size,), region)

    def check_backend(self, name: str) -> None:
        """Raise ValueError if a package (--norm-backend) would compute a different function."""
        if self.zero_centered and name != "weft":
            raise ValueError(
                f"--norm-backend {name}: {type(self).__name__} multiplies by 1 + w, which only "
                "--norm-backend weft supports: omit the flag"
            )

    def forward(self, x: Tensor) -> Tensor:
        """x [..., h] -> [..., h]."""
        return _RMSNorm.apply(x, None, self.weight, self)[0]

    def factor(self, w: Tensor) -> Tensor:
        """Return the factor of x, given the whole weight: w itself, or 1 + w."""
        return 1 + w.to(self.ctx.accumulate) if self.zero_centered else w


class ResidualRMSNorm(RMSNorm):
    """RMSNorm of a residual stream, fused with the preceding residual add: one pass.

    Backward is one pass too: it adds the stream's gradient to that of the norm.
    """

    def forward(  # type: ignore[override]
        self, stream: Tensor, branch: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return norm(stream + branch) and stream + branch. A missing branch counts as zero."""
        return _RMSNorm.apply(stream, branch, self.weight, self)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        saved_ctx: Any, x: Tensor, branch: Tensor | None, weight: nn.Parameter, layer: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        saved_ctx.layer, saved_ctx.adds = layer, branch is not None
        saved_ctx.set_materialize_grads(False)
        kind, h = layer.ctx.accumulate, x.shape[-1]
        w = layer.factor(layer.ctx.sink.acquire(weight))
        if w.shape != (h,) or (branch is not None and branch.shape != x.shape):
            added = "" if branch is None else f" and a branch {tuple(branch.shape)}"
            raise ValueError(f"a norm of {len(w)} features got {tuple(x.shape)}{added}")
        if fits(x, w, *() if branch is None else (branch,), accumulate=kind):
            y, r = torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=kind)
            total = None if branch is None else torch.empty_like(x)
            call("norm_forward", x.dtype, x, branch, w, total, y, r, x.numel() // h, h, layer.eps)
            x = x if total is None else total
        else:
            y, x, r = layer.passes.norm_forward(x, branch, w, layer.eps, kind)
        layer.ctx.sink.end_use(weight)
        saved_ctx.save_for_backward(x, r)
        return y, x

    @staticmethod
    def backward(
        saved_ctx: Any, dy: Tensor | None, more: Tensor | None
    ) -> tuple[Tensor, Tensor | None, None, None]:
        # with r = 1 / sqrt(mean(x^2) + eps) and p = dy * x, over n rows of h:
        #   dw = sum_n r p;   dx = r (dy * w) - x r^3 (p . w) / h, plus the stream's gradient
        layer: RMSNorm = saved_ctx.layer
        x, r = saved_ctx.saved_tensors
        sink, kind, h = layer.ctx.sink, layer.ctx.accumulate, x.shape[-1]
        dy = torch.zeros_like(x) if dy is None else dy.contiguous()
        w, more = sink.acquire(layer.weight), None if more is None else more.contiguous()
        w = layer.factor(w)
        if fits(x, dy, w, *() if more is None else (more,), accumulate=kind):
            dx = torch.empty_like(x)
            parts = torch.zeros((torch.get_num_threads(), h), dtype=kind, device=x.device)
            call("norm_backward", x.dtype, x, w, r, dy, more, dx, parts, x.numel() // h, h)
            if layer.weight.requires_grad:
                sink.add(layer.weight, parts.sum(0))
        else:
            given = (x, w, r, dy, more, layer.eps)
            dx = layer.passes.norm_backward(*given, sink=sink, weight=layer.weight)
        sink.end_use(layer.weight)
        if layer.weight.requires_grad:
            sink.register_grad_ready(layer.weight)
        return dx, dx if saved_ctx.adds else None, None, None


def apply_rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, groups: int, rotary: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v [s, b, n, d] of qkv [s, b, (heads + 2 groups) d], q and k rotated.

    rotary: number of leading elements of a head to rotate, as in GPT-NeoX and Phi; 0: all d. cos,
    sin: [s, 1 or b, 1, rotary/2]. The rotation is computed in their dtype, the result is in qkv's.
    Raises ValueError if they have another shape.

    While autograd records, the result of a ColumnParallelLinear is rotated in place, since its
    backward does not read it: copy any other part of qkv that you need before.
    """
    (s, b, _), d = qkv.shape, qkv.shape[2] // (heads + 2 * groups)
    half = (rotary or d) // 2
    if (rotary or d) % 2:
        raise ValueError(f"apply_rope: RoPE rotates pairs, but {rotary or d} elements are odd")
    if cos.shape != sin.shape or tuple(cos.shape) not in ((s, 1, 1, half), (s, b, 1, half)):
        raise ValueError(
            f"apply_rope: cos {tuple(cos.shape)} and sin {tuple(sin.shape)} must be [{s}, 1 or "
            f"{b}, 1, {half}]: [tokens, 1 or batch, 1, rotary_size / 2] (rotary_size of the "
            f"config, by default the head size, {d})"
        )
    if 2 * half < d:
        return _partly_rotated(qkv, cos, sin, heads, groups)
    if getattr(qkv, "is_rotated", False):
        raise ValueError(
            "apply_rope: this tensor is already rotated, in place: a layer that attends twice "
            "gives the first call a copy, qkv.clone()"
        )
    own = torch.is_grad_enabled() and is_result_of(qkv, AllGatherMatmul)
    if own:
        qkv.is_rotated = True  # type: ignore[attr-defined]
    return _Rope.apply(qkv, cos, sin, (heads, groups, groups), own)


def _partly_rotated(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.unflatten(2, (heads + 2 * groups, -1)).split([heads, groups, groups], 2)
    rotary = [x[..., : 2 * cos.shape[-1]] for x in (q, k, v)]  # apply_rope also needs a v
    first, second, _ = apply_rope(torch.cat(rotary, 2).flatten(2), cos, sin, heads, groups)
    q, k = (torch.cat([y, x[..., y.shape[-1] :]], -1) for x, y in ((q, first), (k, second)))
    return q, k, v


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        saved_ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, sizes: tuple[int, ...], own: bool
    ) -> tuple[Tensor, ...]:
        saved_ctx.cos, saved_ctx.sin, saved_ctx.turned = cos, sin, sizes[0] + sizes[1]
        x = qkv.contiguous().view(*qkv.shape[:2], sum(sizes), -1)
        saved_ctx.native = fits(x, accumulate=cos.dtype) and fits(cos, sin)
        if saved_ctx.native:
            out = _rotate(saved_ctx, x, 1.0, own)
        else:
            out = fused_gpu.rope(x, sizes, cos, sin, own)
        if own:
            increment_version(qkv)
        return out.split(sizes, 2)

    @staticmethod
    def backward(saved_ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        # a rotation's transpose is the rotation by the opposite angle
        if saved_ctx.native:
            dx = _rotate(saved_ctx, torch.cat(grads, 2).contiguous(), -1.0, True)
        else:
            dx = fused_gpu.rope_backward(grads, saved_ctx.cos, saved_ctx.sin)
        return dx.flatten(2), None, None, None, None


def _rotate(saved_ctx: Any, x: Tensor, sign: float, own: bool) -> Tensor:
    (s, b, n, d), cos = x.shape, saved_ctx.cos
    out = x.data if own else torch.empty_like(x)
    share = s * b // (cos.numel() // (d // 2))  # b if the batch shares its positions, else 1
    sizes = (s * b, n, saved_ctx.turned, d, share, sign)
    call("rope", x.dtype, x, cos, saved_ctx.sin, out, *sizes)
    return out


def swiglu(
    x: Tensor, gate_up: ColumnParallelLinear | None = None, down: RowParallelLinear | None = None
) -> Tensor:
    """Return silu(gate) * up of x's halves: [..., 2f] -> [..., f]. Saves its input only.

    With two linears it runs between them: x [s/t, b, h] -> down(swiglu(gate_up(x))) [s/t, b, h].
    In float8 with block or tensor scales it then writes the operands of `down`, and in backward
    those of `gate_up`, instead of its result, which is neither written nor read. The operands'
    bytes are the same. The tensors that autograd passes there, one NaN expanded, must not be read.
    """
    if gate_up is None or down is None:
        if x.shape[-1] % 2:
            raise ValueError(f"swiglu: gate and up are {tuple(x.shape)}: the last dim must be even")
        return _SwiGLU.apply(x)
    recipe, operands = down.recipe, Operands()
    own = type(gate_up) is ColumnParallelLinear and type(down) is RowParallelLinear
    follows = recipe.follows_swiglu and recipe is gate_up.recipe and gate_up.bias is None
    if not own or not follows or down.ctx.sink.watched:
        return down(swiglu(gate_up(x)))
    h, makes = gate_up(x, operands), cast(FollowsSwiGLU, recipe)
    if h.shape[:-1].numel() % (makes.block or 1):  # an evaluation's tokens: backward would fail
        return down(swiglu(h))
    trains = torch.is_grad_enabled() and down.weight.requires_grad
    return down(_SwiGLUOperands.apply(h, gate_up, makes, operands, trains), operands)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(saved_ctx: Any, gate_up: Tensor) -> Tensor:
        saved_ctx.save_for_backward(gate_up)
        return _swiglu(gate_up)

    @staticmethod
    def backward(saved_ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = saved_ctx.saved_tensors
        return _swiglu_backward(gate_up, dy.contiguous())


def _swiglu(gate_up: Tensor) -> Tensor:
    if not fits(gate_up):
        return fused_gpu.swiglu(gate_up)
    size = gate_up.shape[-1] // 2
    y = gate_up.new_empty((*gate_up.shape[:-1], size))
    call("swiglu_forward", y.dtype, gate_up, y, y.numel() // size, size)
    return y


def _swiglu_backward(gate_up: Tensor, dy: Tensor) -> Tensor:
    if not fits(gate_up, dy):
        return fused_gpu.swiglu_backward(gate_up, dy)
    grad, size = torch.empty_like(gate_up), dy.shape[-1]
    call("swiglu_backward", dy.dtype, gate_up, dy, grad, dy.numel() // size, size)
    return grad


class FollowsSwiGLU(Protocol):
    """A Recipe that follows SwiGLU: mpu/layers/float8/recipe.py."""

    block: int

    def swiglu(
        self, gate_up: Tensor, dy: Tensor | None, turned: bool, result: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor | None]: ...
    def unread(self, shape: Sequence[int]) -> Tensor: ...


class _SwiGLUOperands(torch.autograd.Function):
    """SwiGLU between two linears of one recipe."""

    @staticmethod
    def forward(
        saved_ctx: Any,
        h: Tensor,
        gate_up: ColumnParallelLinear,
        recipe: FollowsSwiGLU,
        operands: Operands,
        trains: bool,
    ) -> Tensor:
        saved_ctx.save_for_backward(h)
        saved_ctx.trains, saved_ctx.recipe = gate_up.weight.requires_grad, recipe
        saved_ctx.operands = operands
        operands.x = recipe.swiglu(h, None, trains, lambda: _swiglu(h))
        return recipe.unread((*h.shape[:-1], h.shape[-1] // 2))

    @staticmethod
    def backward(saved_ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        (h,), recipe, dy = saved_ctx.saved_tensors, saved_ctx.recipe, dy.contiguous()
        saved_ctx.operands.dy = recipe.swiglu(
            h, dy, saved_ctx.trains, lambda: _swiglu_backward(h, dy)
        )
        return recipe.unread(h.shape), None, None, None, None
