# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels, compiled: results against float64 or torch's bits, and speed against torch's.

Each row draws odd and large shapes, compares, and then times the kernel at the sizes of a layer of
Llama 3 8B. A kernel's bytes are those that it declares of its launch.
On a CPU the same runs in Triton's interpreter at small sizes, where the seconds say nothing.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.gpu.launched import KERNELS, launches
from tests.gpu.row import Row, Skip, Stopwatch
from tests.mpu.kernels import elementwise

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
EPS = 2.0**-23  # of fp32


def without_triton(row: Row) -> str:
    """Say why no kernel of Triton runs on the row's device, or return ""."""
    try:
        import triton
    except ImportError:
        return "this Python has no triton"
    if not row.cuda and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        return f"triton {triton.__version__}: the interpreter of 3.7 is needed"
    return ""


def covered(measure: Callable[[Row], None]) -> Callable[[Row], None]:
    """Skip the row where there is no Triton; fail it where a kernel of KERNELS did not run."""

    def row_of(row: Row) -> None:
        if why := without_triton(row):
            raise Skip(why)
        if not row.cuda:
            elementwise.as_on_a_gpu()
        torch.manual_seed(1)
        with launches() as seen, row.device:
            measure(row)
        names = {kernel.fn.__name__ for kernel, _ in seen}
        missing = sorted(set(KERNELS[row.name]) - names)
        row.check(f"launched {', '.join(sorted(names))}", len(missing), 0, missing=missing)

    return row_of


def bytes_of(run: Callable[[], object]) -> float:
    """Return the bytes that the launches of a function read and write, as declared."""
    with launches() as seen:
        run()
    return float(sum(kernel.declared.cost(given).bytes for kernel, given in seen))


def speed(row: Row, what: str, ours: Callable[[], object], theirs: Callable[[], object]) -> None:
    """Time a kernel and what torch does instead, and write both."""
    clock, nbytes = Stopwatch(row), bytes_of(ours)
    mine, torchs = clock(ours), clock(theirs)
    numbers = mine.numbers(nbytes) | {"torch_seconds": torchs.seconds}
    row.say(what, **numbers, times_torch=torchs.seconds / mine.seconds, bytes=nbytes)


def _against_float64(
    row: Row, operation: Callable[..., float], shapes: list[tuple[int, int]]
) -> None:
    """Write the worst error of an operation of elementwise.py, in units of the last place."""
    name = operation.__name__
    for dtype in DTYPES:
        worst = 0.0
        for rows, width in shapes:
            for added in (False, True):
                torch.manual_seed(rows * width)
                worst = max(worst, operation(dtype, rows, width, added))
        short = str(dtype).removeprefix("torch.")
        row.check(f"{name} {short}, units", worst, elementwise.MOST[name])


def _shapes(row: Row, *large: tuple[int, int]) -> list[tuple[int, int]]:
    return [(3, 17), (37, 64)] + ([] if row.tiny else [(5, 1025), (200, 6), *large])


@covered
def norm(row: Row) -> None:
    """RMSNorm with and without the residual's add, and rows that are longer than a program's."""
    from mpu.kernels import rms_norm

    _against_float64(row, elementwise.norm, _shapes(row, (4097, 4096)))
    _against_float64(row, elementwise.long_norm, [(3, 17), (13, 64)])
    rms_norm.PARTS, rms_norm.TILE = PARTS  # which the cases above change
    s, h = row.sizes.seq, row.sizes.hidden
    x, branch, dy, dh = (torch.randn(s, 1, h).bfloat16() for _ in range(4))
    w = torch.randn(h).bfloat16()
    speed(
        row, "norm forward with add", lambda: rms_norm.norm_forward(x, branch, w, 1e-5),
        lambda: F.rms_norm(x + branch, (h,), w, 1e-5),
    )  # fmt: skip
    _, total, inverse = rms_norm.norm_forward(x, branch, w, 1e-5)
    main = torch.zeros(h)
    leaf, weight = total.clone().requires_grad_(), w.clone().requires_grad_()
    y = F.rms_norm(leaf, (h,), weight, 1e-5)

    def backward() -> None:
        parts = rms_norm.norm_backward(total, w, inverse, dy, dh)[1]
        rms_norm.fold(parts, main, False)

    def torchs() -> None:
        dx, _ = torch.autograd.grad(y, (leaf, weight), dy, retain_graph=True)
        dx.add_(dh)

    speed(row, "norm backward with add", backward, torchs)


PARTS = (512, 8192)  # rms_norm.PARTS and rms_norm.TILE, held equal by a test


@covered
def rope(row: Row) -> None:
    """RoPE of q and k, with v copied or left."""
    from mpu.kernels.rope import rope as turn
    from mpu.layers import fused_gpu

    shapes = [(1, 1), (3, 17), (2, 64)] + ([] if row.tiny else [(129, 64)])
    _against_float64(row, elementwise.rope, shapes)
    z, half = row.sizes, row.sizes.head_dim // 2
    x = torch.randn(z.seq, 1, z.heads + 2 * z.groups, z.head_dim).bfloat16()
    angles = torch.rand(z.seq, 1, 1, half)
    cos, sin = angles.cos(), angles.sin()
    parts, out = x.split([z.heads, z.groups, z.groups], 2), torch.empty_like(x)
    speed(
        row, "rope", lambda: turn(parts, cos, sin, out, copy=True),
        lambda: fused_gpu._rotate(x, cos, sin, z.heads + z.groups, 1.0),
    )  # fmt: skip


@covered
def swiglu(row: Row) -> None:
    """SwiGLU forward and backward."""
    from mpu.kernels.swiglu import swiglu_backward, swiglu_forward

    _against_float64(row, elementwise.swiglu, _shapes(row, (1030, 14336)))
    s, f = row.sizes.seq, row.sizes.ffn
    x, dy = torch.randn(s, 1, 2 * f).bfloat16(), torch.randn(s, 1, f).bfloat16()
    gate, up = x.chunk(2, -1)
    speed(row, "swiglu forward", lambda: swiglu_forward(x), lambda: F.silu(gate) * up)
    leaf = x.clone().requires_grad_()
    first, second = leaf.chunk(2, -1)
    y = F.silu(first) * second
    speed(
        row, "swiglu backward", lambda: swiglu_backward(x, dy),
        lambda: torch.autograd.grad(y, leaf, dy, retain_graph=True),
    )  # fmt: skip


@covered
def loss(row: Row) -> None:
    """The softmax's statistics and its gradient in place, against float64.

    With S the log of the sum of exp, p = exp(l - S): the log-sum-exp within 4 eps (1 + |S|), the
    gradient within |weight| eps (4 p (1 + |l| + |S|) + 2 [target]), rounded to its dtype, which the
    interpreter cuts off.
    """
    from mpu.kernels.cross_entropy import softmax_gradient, softmax_stats

    shapes = [(5, 17, 19, 1.0), (3, 4100, 4100, 30.0)]
    shapes += [] if row.tiny else [(33, 128256, 128384, 3.0), (2, 9001, 9008, 1000.0)]
    for dtype in (torch.float32, torch.bfloat16):
        of_sum = of_gradient = of_padding = 0.0
        for n, real, width, scale in shapes:
            rows = torch.full((n, width), 1e6, dtype=dtype)
            rows[:, :real] = (torch.randn(n, real) * scale).to(dtype)
            labels, weight = torch.randint(0, real, (n,)), torch.rand(n) - 0.5
            exact = rows[:, :real].double()
            log_sum = exact.logsumexp(1)
            out = torch.full((3, n), float("nan"))
            softmax_stats(rows, labels, 0, real, out)
            found = (out[0] + out[1].log()).double()
            of_sum = max(
                of_sum, ((found - log_sum).abs() / (4 * EPS * (1 + log_sum.abs()))).max().item()
            )
            assert torch.equal(out[2].double(), exact.gather(1, labels[:, None])[:, 0])
            softmax_gradient(rows, labels, 0, real, (out[0] + out[1].log()), weight)
            share, hit = (exact - log_sum[:, None]).exp(), F.one_hot(labels, real)
            want = weight.double()[:, None] * (share - hit)
            bound = EPS * (4 * share * (1 + exact.abs() + log_sum.abs()[:, None]) + 2 * hit)
            bound *= weight.abs()[:, None]
            bound += want.abs() * (2.0**-7 if dtype == torch.bfloat16 else EPS) + 2.0**-125
            error = (rows[:, :real].double() - want).abs() / bound
            of_gradient = max(of_gradient, error.max().item())
            of_padding = max(of_padding, rows[:, real:].abs().max().item() if width > real else 0.0)
        short = str(dtype).removeprefix("torch.")
        row.check(f"log-sum-exp {short}, of its bound", of_sum, 1.0)
        row.check(f"gradient of logits {short}, of its bound", of_gradient, 1.0)
        row.check(f"gradient of padding {short}", of_padding, 0.0)
    n, v = (64, 512) if row.tiny else (2048, row.sizes.vocab)
    rows, labels = torch.randn(n, v).bfloat16(), torch.randint(0, v, (n,))
    out, weight = torch.empty(3, n), torch.ones(n)
    leaf = rows.clone().requires_grad_()

    def ours() -> None:
        softmax_stats(rows, labels, 0, v, out)
        softmax_gradient(rows, labels, 0, v, out[0] + out[1].log(), weight)
        rows.copy_(leaf.detach())  # not of the kernels; the same is added below

    def torchs() -> None:
        value = F.cross_entropy(leaf.float(), labels, reduction="sum")
        torch.autograd.grad(value, leaf)
        rows.copy_(leaf.detach())

    speed(row, f"cross entropy of {n} tokens, forward and backward", ours, torchs)


@covered
def swiglu_rows(row: Row) -> None:
    """SwiGLU into rows of float8, bit by bit those of its result; and the time of both ways."""
    from mpu.context import LayerContext
    from mpu.kernels.swiglu import swiglu_backward, swiglu_forward
    from mpu.layers.float8 import rows as float8
    from mpu.layers.float8.recipe import Float8

    ctx = LayerContext(dtype=torch.bfloat16, device=row.device, on_gpu=False)

    def way(scaling: str, x: Tensor, dy: Tensor | None, fused: bool) -> tuple[Tensor, ...]:
        """Return rows and those of the transpose: by the kernels, or of SwiGLU's result."""
        recipe = Float8(scaling, "hybrid", ctx)
        with mock.patch.object(float8, "on_triton", lambda x: True):
            if fused:
                return recipe.swiglu(x, dy, True, lambda: x)  # type: ignore[return-value]
            y = swiglu_forward(x) if dy is None else swiglu_backward(x, dy)
            rows = recipe.operand(y, "x" if dy is None else "dy", "k")
            form = float8.E4M3 if dy is None else recipe.dy
            return rows, recipe.of_transpose(rows, form)

    scalings, s, f = ("blockwise", "mxfp8", "tensorwise"), row.sizes.seq, row.sizes.ffn
    for scaling in scalings:
        wrong = 0
        for n, width in [(128, 256)] + ([] if row.tiny else [(1024, 14336), (640, 384)]):
            x, dy = torch.randn(n, 2 * width).bfloat16(), torch.randn(n, width).bfloat16()
            for given in (None, dy):
                pair = way(scaling, x, given, True), way(scaling, x, given, False)
                wrong += sum(not torch.equal(a, b) for a, b in zip(*pair, strict=True))
        row.check(f"rows of SwiGLU, {scaling}: tensors of other bytes", wrong, 0)
    x, dy = torch.randn(s, 2 * f).bfloat16(), torch.randn(s, f).bfloat16()
    for scaling, given in itertools.product(scalings, (None, dy)):
        name = f"SwiGLU {'forward' if given is None else 'backward'} into rows, {scaling}"
        speed(row, name, *(partial(way, scaling, x, given, fused) for fused in (True, False)))


@covered
def float8_rows(row: Row) -> None:
    """Rows of float8 bit by bit as torch makes them: scales, codes, padding, of x, x^T and rows."""
    from mpu.layers.float8 import rows as float8
    from mpu.layers.float8.rows import E4M3, E5M2, encode, made, remade, row_scales

    def both(make: Callable[[], Tensor]) -> list[Tensor]:
        found = []
        for on in (False, True):
            with mock.patch.object(float8, "on_triton", lambda x, on=on: on):
                found.append(make())
        return found

    sizes = [(33, 160, 0), (40, 160, 32), (128, 384, 128)]
    sizes += [] if row.tiny else [(1, 16, 0), (1030, 4096, 0), (256, 14336, 128), (8, 1024, 32)]
    for form in (E4M3, E5M2):
        for dtype in (torch.float32, torch.bfloat16):
            wrong = 0
            for n, k, block in sizes:
                x = (torch.randn(n, k) * torch.randn(n, 1).mul(4).exp()).to(dtype)
                x[-1, :4] = torch.tensor([448.0, 1e-30, -0.0, 3e38])
                for given in (x, x.t().contiguous().t()):
                    scales = row_scales(given, block, form)
                    cases = [
                        lambda: row_scales(given, block, form),  # noqa: B023
                        lambda: encode(given, scales, form),  # noqa: B023
                        lambda: made(given, block, form),  # noqa: B023
                    ]
                    if not n % (block or 16):
                        kept = encode(given, scales, form)
                        cases.append(lambda: remade(kept, block, form))  # noqa: B023
                    wrong += sum(not torch.equal(*both(case)) for case in cases)
            short = str(dtype).removeprefix("torch.")
            row.check(f"rows of {form.dtype} from {short}: cases of other bytes", wrong, 0)
    s, h = row.sizes.seq, row.sizes.hidden
    x = torch.randn(s, h).bfloat16()
    for block, name in ((0, "a scale a row"), (128, "a scale for 128"), (32, "a scale for 32")):

        def ours(block: int = block) -> Tensor:
            with mock.patch.object(float8, "on_triton", lambda x: True):
                return made(x, block, E4M3)

        def torchs(block: int = block) -> Tensor:
            with mock.patch.object(float8, "on_triton", lambda x: False):
                return made(x, block, E4M3)

        speed(row, f"rows, {name}", ours, torchs)
    rows = made(x, 0, E4M3)

    def again(on: bool) -> Tensor:
        with mock.patch.object(float8, "on_triton", lambda x: on):
            return remade(rows, 0, E4M3)

    speed(row, "rows of a transpose, a scale a row", lambda: again(True), lambda: again(False))


@covered
def parts(row: Row) -> None:
    """The sum of ranks' parts, in torch's order: the bits of torch's sum."""
    from mpu.comm import collectives
    from mpu.kernels.sum_of_parts import sum_of_parts

    for dtype in DTYPES:
        wrong = 0
        for count in (2, 3, 8):
            for shape in ((5, 3, 7), (2, 1024), (1,)):
                x = (torch.randn(count, *shape) * 3).exp().to(dtype)
                x[::2] *= -1
                got, want = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
                sum_of_parts(x, got)
                collectives.sum_of_parts(x, want)
                wrong += not torch.equal(got, want)
        row.check(
            f"sum of parts {str(dtype).removeprefix('torch.')}: cases of other bits", wrong, 0
        )
    n = 1024 if row.tiny else 1 << 25
    x, out = torch.randn(8, n).bfloat16(), torch.empty(n).bfloat16()
    speed(
        row, "sum of 8 parts", lambda: sum_of_parts(x, out),
        lambda: torch.sum(x, 0, dtype=torch.float32).to(x.dtype),
    )  # fmt: skip


@covered
def expert_rows(row: Row) -> None:
    """The rows of a token at its experts: their weighted sum, and the gradients of both."""
    from mpu.kernels import expert_rows as ours
    from mpu.layers.dispatch import _gradients, _sum

    tokens, k, width = (37, 3, 130) if row.tiny else (8192, 8, 2048)
    flat = torch.randperm(tokens * k)
    place = torch.argsort(flat).view(tokens, k)
    rows, dy = torch.randn(tokens * k, width).bfloat16(), torch.randn(tokens, width).bfloat16()
    weights, out, drows = torch.rand(tokens, k), torch.empty_like(dy), torch.empty_like(rows)
    dweights = torch.empty_like(weights)

    def added() -> None:
        ours.sum_rows(rows, place, weights, out)

    def backward() -> None:
        ours.combine_backward(rows, place, weights, dy, drows, dweights)

    added()
    backward()
    wide = rows.double(), weights.double()
    exact = _sum(wide[0], place, wide[1]), *_gradients(*wide, flat, place, dy.double(), False)
    names = ("sum", "gradients of rows", "gradients of weights")
    for name, got, want in zip(names, (out, drows, dweights), exact, strict=True):
        row.check(f"rows of experts, {name}: units", elementwise.units(got, want), 8)
    speed(row, "rows of experts, added", added, lambda: _sum(rows, place, weights))
    speed(
        row, "rows of experts, backward", backward,
        lambda: _gradients(rows, weights, flat, place, dy, False),
    )  # fmt: skip


@covered
def grouped_wgrad(row: Row) -> None:
    """Weight gradients of experts in one launch: against float64 and a matmul for each expert."""
    from mpu.kernels import grouped_wgrad as ours
    from mpu.layers.experts import Counts, PaddedRows, runs

    recipe, models = PaddedRows(row.cuda), {"odd": ([5, 0, 17, 1], 33, 18)}
    if not row.tiny:
        models |= {"Qwen3": ([512] * 128, 1536, 2048), "Mixtral": ([2048] * 8, 28672, 4096)}
    for name, (each, o, i) in models.items():
        x, dy = (torch.randn(sum(each), width).bfloat16() for width in (i, o))
        counts, main = Counts.of(each, torch.tensor(each)), torch.randn(len(each), o, i)
        found, before = main.clone(), main[:4].double()
        ours.grouped_wgrad(x, dy, counts.ends, found, False)
        worst = 0.0
        for e, low, high in [*runs(counts)][: len(before)]:
            exact = before[e] + dy[low:high].double().t() @ x[low:high].double()
            worst = max(worst, ((found[e] - exact).norm() / exact.norm()).item())
        row.check(f"weight gradients of experts, {name}", worst, 1e-5)

        def once(x: Tensor = x, dy: Tensor = dy, main: Tensor = main, at: Any = counts) -> None:
            ours.grouped_wgrad(x, dy, at.ends, main, False)

        def each_alone(
            x: Tensor = x, dy: Tensor = dy, main: Tensor = main, at: Any = counts
        ) -> None:
            for e, low, high in runs(at):
                if high > low:
                    recipe.accumulate(main[e], False, x[low:high], dy[low:high])

        speed(row, f"weight gradients of experts, {name}", once, each_alone)


@covered
def maxima(row: Row) -> None:
    """The largest attention logit of each head, causal, in a window and in documents."""
    from mpu.kernels.max_logits import max_logits
    from mpu.layers.attention.max_logits import largest

    for d in (64, 80, 128):
        worst = 0.0
        for s, window, documents in ((37, 0, ()), (70, 16, ()), (50, 0, (1, 17, 32))):
            b = 1 if documents else 2
            q, k = torch.randn(b, 4, s, d).bfloat16(), torch.randn(b, 2, s, d).bfloat16()
            ends = torch.tensor((0, *documents)).cumsum(0).int() if documents else None
            got = torch.full((4,), -torch.inf)
            max_logits(q, k, got, causal=True, window=window, ends=ends)
            back = torch.arange(s)[:, None] - torch.arange(s)
            looks = (back >= 0) & (back < (window or s))
            if documents:
                of = torch.arange(3).repeat_interleave(torch.tensor(documents))
                looks &= of[:, None] == of
            scores = q.double() @ k.double().repeat_interleave(2, 1).mT * d**-0.5
            want = scores.masked_fill(~looks, -torch.inf).amax((0, 2, 3))
            worst = max(worst, float(((got - want) / want).abs().max()))
        row.check(f"largest logits, heads of {d}: relative error", worst, 64 * EPS)
    s = 64 if row.tiny else 8192
    q, k = torch.randn(1, 32, s, 128).bfloat16(), torch.randn(1, 8, s, 128).bfloat16()
    noted = torch.full((32,), -torch.inf)
    speed(
        row, f"largest logits of 32 heads, {s} tokens",
        lambda: max_logits(q, k, noted, causal=True),
        lambda: largest(q, k, "tril", torch.float32, row.cuda),
    )  # fmt: skip
