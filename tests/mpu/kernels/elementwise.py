# SPDX-License-Identifier: Apache-2.0
"""What runs in Triton's interpreter: the elementwise kernels against torch in float64, and counts.

A case compares what a kernel's caller returns with the same formula in float64, on the same
numbers. `units` is the largest error in units of the result's last place, of the larger of an
element and the result's root mean square: sums cancel, so single elements may be near 0.
"""

import numpy as np
import torch
import torch.nn.functional as F


def as_on_a_gpu():
    """Let the interpreter round as GPUs do, to nearest: to bf16, which it cuts off, and to float8,
    no further than the top.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, convert = InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp
    if cast.__name__ == "nearest":
        return
    float8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}

    def rounded(x, to):
        source, target = x.dtype.scalar, to.scalar
        numbers = torch.from_numpy(np.ascontiguousarray(x.data))
        if (source, target) == (tl.float32, tl.bfloat16):
            data = numbers.bfloat16().view(torch.int16).numpy().view(np.uint16)
        elif source == tl.float32 and target in float8:
            top = torch.finfo(float8[target]).max
            data = numbers.clamp(-top, top).to(float8[target]).view(torch.uint8).numpy()
        elif source in float8 and target == tl.float32:
            data = numbers.view(float8[source]).float().numpy()
        else:
            return None
        return TensorHandle(data, target)

    def nearest(builder, x, to):
        return cast(builder, x, to) if (found := rounded(x, to)) is None else found

    def to_float8(builder, x, to, mode):
        return convert(builder, x, to, mode) if (found := rounded(x, to)) is None else found

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp = nearest, to_float8


def units(got, want):
    """Return the largest error of a result in units of its last place."""
    if not got.numel():
        return 0.0
    scale = want.abs().clamp_min(want.square().mean().sqrt())
    error = (got.double() - want).abs() / (scale * torch.finfo(got.dtype).eps)
    return error.max().item() if got.isfinite().all() else float("inf")


def draw(dtype, *shape):
    return torch.randn(shape).bfloat16().to(dtype)


def norm(dtype, rows, width, added):
    """added: a branch and the stream's gradient. Runs of rows are short, and the last is ragged.

    The error of a sum of n terms one after another grows as the root of n, where errors of rounding
    are independent (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2).
    """
    from mpu.kernels import rms_norm
    from mpu.kernels.rms_norm import fold, norm_backward, norm_forward

    rms_norm.PARTS, rms_norm.TILE = (3, 128) if added else (512, 8192)
    x, dy, dh = (draw(dtype, rows, 1, width) for _ in range(3))
    branch, w = draw(dtype, rows, 1, width) if added else None, draw(dtype, width)
    y, h, r = norm_forward(x, branch, w, 1e-3)
    total = x if branch is None else x + branch
    assert torch.equal(h, total) and r.shape == (rows, 1, 1)
    exact, weight = total.double().requires_grad_(), w.double().requires_grad_()
    want = exact / (exact.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    want.backward(dy.double())
    dx, parts = norm_backward(h, w, r, dy, dh if added else None)
    before = draw(parts.dtype, width)
    fold(parts, main := before.clone(), False)
    fold(parts, alone := torch.full_like(main, float("nan")), True)
    wanted = exact.grad + (dh.double() if added else 0)
    of_sums = max(units(alone, weight.grad), units(main, before + weight.grad))
    run = -(-rows // rms_norm.PARTS)  # rows that are added one after another
    return max(units(y, want.detach()), units(dx, wanted), of_sums / max(1.0, run**0.5 / 4))


def long_norm(dtype, rows, width, added):
    """Rows that a program does not hold: in pieces of 16 numbers."""
    from mpu.kernels import rms_norm

    before = rms_norm.WIDEST, rms_norm.LONG
    rms_norm.WIDEST, rms_norm.LONG = dict.fromkeys(rms_norm.WIDEST, 4), 16
    try:
        return norm(dtype, rows, width, added)
    finally:
        rms_norm.WIDEST, rms_norm.LONG = before


def rope(dtype, rows, width, added):
    """added: the batch shares its positions, and q, k and v are turned where they lie."""
    from mpu.kernels.rope import rope

    heads, groups, b, d = 5, 2, 3, 2 * width
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angles = torch.rand(rows, 1 if added else b, 1, width, dtype=torch.float64) * 6
    cos, sin = (f(angles).to(wide) for f in (torch.cos, torch.sin))
    sizes, worst = (heads, groups, groups), 0.0
    for back in (False, True):
        x = draw(dtype, rows, b, sum(sizes), d)
        first, second = x.double().chunk(2, -1)
        s = -sin.double() if back else sin.double()
        want = torch.cat([first * cos - second * s, second * cos + first * s], -1)
        want[:, :, heads + groups :] = x[:, :, heads + groups :]
        parts = x.split(sizes, 2)
        if back:  # as attention leaves them
            parts = [p.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3) for p in parts]
        out = x if added and not back else torch.full_like(x, float("nan"))
        rope(parts, cos, sin, out, copy=out is not x, back=back)
        worst = max(worst, units(out, want))
    return worst


def swiglu(dtype, rows, width, added):
    """added: gates where the sigmoid is 1 or 0."""
    from mpu.kernels.swiglu import swiglu_backward, swiglu_forward

    x, dy = 4 * draw(dtype, rows, 1, 2 * width), draw(dtype, rows, 1, width)
    if added:
        x[0, 0, : min(2, width)] = torch.tensor([200.0, -200.0])[: min(2, width)]
    exact = x.double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    want = F.silu(gate) * up
    want.backward(dy.double())
    return max(units(swiglu_forward(x), want.detach()), units(swiglu_backward(x, dy), exact.grad))


OPERATIONS = (norm, rope, swiglu)
# units in the last place; a bf16 result is rounded once, its weight gradient is in fp32. On GPUs
# exp(-g) is 2^(-g log2 e), whose exponent is rounded: up to 0.72 |g| units, of gates of |g| <= 20
MOST = {"norm": 8.0, "long_norm": 8.0, "rope": 2.0, "swiglu": 16.0}


def run_cases(comm, cases):
    """Run each operation on this rank's share of the cases; return the worst units by dtype."""
    as_on_a_gpu()
    torch.set_num_threads(1)
    worst = {}
    for operation, dtype, rows, width, added in cases[comm.rank :: comm.size]:
        torch.manual_seed(rows * width)
        key = operation.__name__, str(dtype).removeprefix("torch.")
        worst[key] = max(worst.get(key, 0.0), operation(dtype, rows, width, added))
    return worst


def block(comm, triton):
    """Run a layer's fused operations between matmuls; return outputs and all gradients."""
    import pytest

    from mpu.context import LayerContext
    from mpu.layers import fused, fused_gpu
    from mpu.layers.fused import ResidualRMSNorm, RMSNorm, apply_rope, swiglu
    from mpu.layers.linear import ColumnParallelLinear

    torch.manual_seed(5)
    ctx = LayerContext()
    first, last = ResidualRMSNorm(12, ctx=ctx), RMSNorm(12, ctx=ctx)
    second, qkv = ResidualRMSNorm(12, ctx=ctx), ColumnParallelLinear(12, 20, ctx=ctx)
    for layer in (first, second, last, qkv):
        layer.weight.data.normal_()
    x, dy = torch.randn(5, 2, 12, requires_grad=True), torch.randn(5, 2, 6)
    cos, sin = torch.rand(2, 5, 1, 1, 2)
    with pytest.MonkeyPatch.context() as patch:
        if triton:
            patch.setattr(fused, "fits", lambda *tensors, accumulate=None: False)
            patch.setattr(fused_gpu, "on_triton", lambda *tensors, accumulate=None: True)
        for _ in range(2):  # gradients of weights are added to those before
            y, h = first(x)
            q, k, v = apply_rope(qkv(y), cos, sin, 3, 1)
            y, h = second(h, (q * torch.cat([k, v, k], 2)).flatten(2))
            y = swiglu(last(h) + y)
            y.backward(dy)
    return [y.detach(), h.detach(), x.grad, *ctx.sink.main.values()]


class Counted:
    """Count bytes that a launch loads and stores, each address once a direction."""

    def __init__(self, patch):
        from triton.runtime import interpreter

        self.read, self.written = set(), set()
        load, store = interpreter._interpreter.load, interpreter._interpreter.store
        outer = self

        class Library:
            """Triton's own, but for these two."""

            def __getattr__(self, name):
                return getattr(interpreter_library, name)

            def load(self, pointers, mask, other, dtype):
                outer.read |= spread(pointers, mask, np.dtype(dtype).itemsize)
                return load(pointers, mask, other, dtype)

            def store(self, pointers, value, mask):
                outer.written |= spread(pointers, mask, value.dtype.itemsize)
                return store(pointers, value, mask)

        interpreter_library = interpreter._interpreter
        patch.setattr(interpreter, "_interpreter", Library())

    def bytes(self):
        return sum(size for found in (self.read, self.written) for _, size in found)


def spread(pointers, mask, size):
    return {(int(p), size) for p in pointers[mask].ravel()}


def count(comm, case):
    """Return {kernel: (bytes counted in its launch, bytes declared)} of an operation."""
    import pytest

    from mpu.kernels.launch import Kernel

    as_on_a_gpu()
    found, launch = {}, Kernel.launch

    def counting(kernel, grid, *args, **kwargs):
        given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        with pytest.MonkeyPatch.context() as patch:
            counted = Counted(patch)
            launch(kernel, grid, *args, **kwargs)
        said = kernel.declared.cost(given).bytes
        found.setdefault(kernel.fn.__name__, []).append((counted.bytes(), said))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernel, "launch", counting)
        operation, *rest = case
        operation(*rest)
    return found
