# SPDX-License-Identifier: Apache-2.0
"""The operations of fused.py on a GPU by Triton, or by torch if neither Triton nor csrc/ applies.

Triton's kernels (mpu/kernels) are used for tensors accepted by `on_triton`. torch's operations
accept any tensor, in several passes; they are the reference for the other implementations.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpu import native
from mpu.gradients import GradientSink
from mpu.kernels import available
from mpu.torch_private import silu_backward_

DTYPES = (torch.bfloat16, torch.float32, torch.float64)  # supported by Triton's kernels


def without(device: torch.device) -> str:
    """Return why torch's operations replace the fused ones on a device, or an empty string."""
    if device.type == "cpu":
        return "" if native.load() else native.reason()
    return available.why_not()


def on_triton(*tensors: Tensor, accumulate: torch.dtype | None = None) -> bool:
    """Return whether Triton's kernels support these: contiguous GPU tensors of one dtype.

    accumulate: the dtype that sums must have, if any; kernels sum fp64 in fp64, else in fp32.
    """
    dtype = tensors[0].dtype
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    return (
        available.launches(tensors[0])
        and dtype in DTYPES
        and accumulate in (None, sums)
        and all(t.dtype == dtype and t.is_contiguous() for t in tensors)
    )


def norm_forward(
    x: Tensor, branch: Tensor | None, w: Tensor, eps: float, kind: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm of x + branch, x + branch, and r = 1 / sqrt(mean square + eps) [..., 1]."""
    given = (x, w) if branch is None else (x, branch, w)
    if on_triton(*given, accumulate=kind):
        from mpu.kernels import rms_norm

        return rms_norm.norm_forward(x, branch, w, eps)
    x = x if branch is None else x + branch
    up = x.to(kind)
    length = torch.linalg.vector_norm(up, dim=-1, keepdim=True)
    r = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (up * r).mul_(w).to(x.dtype), x, r


def norm_backward(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    dy: Tensor,
    more: Tensor | None,
    eps: float,
    sink: GradientSink,
    weight: nn.Parameter,
) -> Tensor:
    """Return dx, plus `more` if given; add the gradient of the weight to the sink, unless it is
    frozen.

    eps: unused here, as r already includes it.
    """
    kind, h = r.dtype, x.shape[-1]
    given = (x, w, dy) if more is None else (x, w, dy, more)
    if on_triton(*given, accumulate=kind):
        from mpu.kernels import rms_norm

        dx, parts = rms_norm.norm_backward(x, w, r, dy, more)
        if weight.requires_grad:
            rms_norm.fold(parts, *sink.grad_slot(weight))
        return dx
    rows, grads = x.reshape(-1, h).to(kind), dy.reshape(-1, h).to(kind)
    r, w = r.view(-1, 1), w.to(kind)
    p = grads * rows
    dw = torch.mv(p.t(), r[:, 0])
    pull = torch.mv(p, w)[:, None].mul_(r.pow(3)).div_(h)
    dx = torch.mul(grads, w, out=p).mul_(r).addcmul_(rows, pull, value=-1.0)
    if weight.requires_grad:
        sink.add(weight, dw)
    dx = dx.view(x.shape).to(x.dtype)
    return dx if more is None else dx + more


def rope(x: Tensor, sizes: Sequence[int], cos: Tensor, sin: Tensor, own: bool) -> Tensor:
    """Return x [s, b, n, d] with q and k rotated; `sizes` are the heads of q, k and v in n.

    own: Triton may write to the memory of x.
    """
    if on_triton(x, accumulate=cos.dtype) and _of_one_layout(cos, sin):
        from mpu.kernels import rope as kernel

        out = x.data if own else torch.empty_like(x)
        kernel.rope(x.split(list(sizes), 2), cos, sin, out, copy=not own)
        return out
    return _rotate(x, cos, sin, sizes[0] + sizes[1], 1.0)


def _of_one_layout(cos: Tensor, sin: Tensor) -> bool:
    """Return whether the kernel may read both, as it takes the strides of cos only."""
    return cos.stride() == sin.stride() and cos.dtype == sin.dtype and cos.stride(-1) == 1


def rope_backward(grads: Sequence[Tensor], cos: Tensor, sin: Tensor) -> Tensor:
    """Return dq, dk and dv concatenated along n [s, b, n, d], with dq and dk rotated back."""
    dq, dk, dv = (g if g.stride(-1) == 1 else g.contiguous() for g in grads)
    if on_triton(dq[:0], accumulate=cos.dtype) and _of_one_layout(cos, sin):
        from mpu.kernels import rope as kernel

        s, b, n, d = dq.shape
        dx = dq.new_empty((s, b, n + 2 * dk.shape[2], d))
        kernel.rope((dq, dk, dv), cos, sin, dx, copy=True, back=True)
        return dx
    return _rotate(torch.cat((dq, dk, dv), 2), cos, sin, dq.shape[2] + dk.shape[2], -1.0)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, turned: int, sign: float) -> Tensor:
    out = torch.empty_like(x)
    out[:, :, turned:].copy_(x[:, :, turned:])
    half = x.shape[-1] // 2
    source, target = x[:, :, :turned], out[:, :, :turned]
    if x.dtype != cos.dtype:
        source, target = source.to(cos.dtype), torch.empty_like(source, dtype=cos.dtype)
    first, second = source[..., :half], source[..., half:]
    torch.mul(first, cos, out=target[..., :half]).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=target[..., half:]).addcmul_(first, sin, value=sign)
    if x.dtype != cos.dtype:
        out[:, :, :turned].copy_(target)
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of gate_up's halves."""
    if on_triton(gate_up):
        from mpu.kernels.swiglu import swiglu_forward

        return swiglu_forward(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def swiglu_backward(gate_up: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient: silu(g) = g sig(g), silu'(g) = sig(g) (1 + g (1 - sig(g)))."""
    if on_triton(gate_up, dy):
        from mpu.kernels import swiglu as kernel

        return kernel.swiglu_backward(gate_up, dy)
    grad = torch.empty_like(gate_up)
    gate, up = gate_up.chunk(2, -1)
    d_gate, d_up = grad.chunk(2, -1)
    torch.mul(dy, F.silu(gate), out=d_up)
    torch.mul(dy, up, out=d_gate)
    silu_backward_(d_gate, gate)
    return grad
