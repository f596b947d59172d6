# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: the products and the moves of a layer, and the overlap of two micro-batches.

moe-kernels   products of experts, dispatch and combine at two models' sizes: against float64,
              ms, TFLOP/s and GB/s, with even counts, and with skewed ones and an empty expert
ep-overlap    two ranks with and without --overlap-moe-expert-parallel-comm: seconds of a step,
              threads, attention plans that cuDNN built, processes on each GPU
"""

import json
import statistics
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mpu.comm.transport import Axis
from mpu.context import LayerContext
from mpu.interleave import Interleaver
from mpu.layers.dispatch import Dispatcher, Plan, count_of
from mpu.layers.experts import RECIPE, Counts, GroupedLinear, grouped_product, runs
from tests.gpu.launched import Operators
from tests.gpu.logged import logged
from tests.gpu.row import Row, Skip, Stopwatch, sentence


class Layer(NamedTuple):
    """A layer of experts: f is the ffn hidden size of one, T the tokens of a micro-batch."""

    h: int
    f: int
    experts: int
    topk: int
    tokens: int


LAYERS = {
    "Qwen3-30B-A3B": Layer(2048, 768, 128, 8, 8192),
    "Mixtral 8x7B": Layer(4096, 14336, 8, 2, 8192),
}
TINY_LAYERS = {
    "Qwen3-30B-A3B": Layer(64, 48, 16, 4, 96),
    "Mixtral 8x7B": Layer(64, 96, 4, 2, 96),
}
EMPTY = 1  # the expert that nobody chooses where counts are skewed
LOAD = 0.2  # seconds of products before one is timed
# The norm of an error over that of the result, of the worst expert: bf16 rounds by 2^-9 at most;
# fp32 sums of exact products, of up to 8,192 rows.
LIMITS = {"forward": 4e-3, "dgrad": 4e-3, "wgrad": 1e-4}
UNIT = 2.0**-7  # of bf16: rounding changes a number by half of it at most, relative
SUM = 2.0**-20  # of fp32: the same of a sum, relative to the sum of what is added without signs


def kernels(row: Row) -> None:
    """Check and time each model's layer, with even counts and with skewed ones."""
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # as the trainer
    for name, z in (TINY_LAYERS if row.tiny else LAYERS).items():
        for skewed in (False, True):
            label = f"{name}, {'skewed' if skewed else 'even'}"
            row.part(label, lambda z=z, s=skewed, label=label: _layer(row, z, s, label))


def drawn(z: Layer, skewed: bool, device: torch.device) -> Tensor:
    """Return the experts of each token [T, k], all different: as many tokens for each expert.

    skewed: expert e is as likely as 1 / (e + 1), and EMPTY is chosen by nobody.
    """
    if not skewed:
        first = torch.randperm(z.tokens, device=device)[:, None] * z.topk
        return (first + torch.arange(z.topk, device=device)) % z.experts
    likely = 1.0 / torch.arange(1, z.experts + 1, device=device)
    likely[EMPTY] = 0.0
    return torch.multinomial(likely.expand(z.tokens, -1), z.topk)


def _layer(row: Row, z: Layer, skewed: bool, label: str) -> None:
    choice = drawn(z, skewed, row.device)
    load = count_of(choice, z.experts)
    dispatcher = Dispatcher(z.experts, Axis("ep"), "moe-kernels", Interleaver())
    plan = dispatcher.plan(choice, load)
    each = plan.counts.each
    row.say(f"{label}: counts", rows=sum(each), most=max(each), least=min(each), **z._asdict())
    moved, multiplied = list[float](), list[float]()
    row.part(
        f"{label}: moves",
        lambda: moved.append(moves(row, z, label, dispatcher, plan, load)),
    )
    for name, (o, i) in {"gate_up": (2 * z.f, z.h), "down": (z.h, z.f)}.items():
        what = f"{label}: {name}"
        row.part(
            what,
            lambda o=o, i=i, what=what: multiplied.append(products(row, plan.counts, o, i, what)),
        )
    short = f"{label}: products {1e3 * sum(multiplied):.2f} ms, moves {1e3 * sum(moved):.2f} ms"
    row.say(label, products_seconds=sum(multiplied), moves_seconds=sum(moved), in_short=short)


# ---- products of experts ----


def products(row: Row, counts: Counts, o: int, i: int, label: str) -> float:
    """Check and time forward, dgrad and wgrad of all experts: x [n, i], A [E, o, i], dy [n, o].

    `layer` is what the layer does, which operators say; beside it are other ways. Returns the
    seconds of the layer's three.
    """
    n, clock = sum(counts.each), Stopwatch(row, load=LOAD)
    ctx = LayerContext(dtype=torch.bfloat16, device=row.device)
    layer = GroupedLinear(len(counts.each), i, (o,), ctx=ctx)
    with torch.no_grad():
        layer.weight.normal_(0.0, i**-0.5)
    a = layer.acquire().detach()
    x, dy = (torch.randn(n, size, device=row.device).bfloat16() for size in (i, o))
    main = ctx.sink.main_grad(layer.weight)
    main.fill_(float("nan"))  # the first gradient of a step overwrites
    grads = main.view(a.shape)
    ways: dict[str, dict[str, Callable[[], Tensor]]] = {
        "forward": {
            "layer": lambda: grouped_product(x, a, counts, row.cuda),
            "loop": lambda: loop(x, a, counts),
        },
        "dgrad": {
            "layer": lambda: grouped_product(dy, a.transpose(1, 2), counts, row.cuda),
            "loop": lambda: loop(dy, a.transpose(1, 2), counts),
        },
        "wgrad": {
            "layer": lambda: (layer.wgrad(x, dy, counts), grads)[1],
            "grouped_mm in bf16, added": lambda: grads.add_(
                F.grouped_mm(dy.t(), x, offs=counts.ends)
            ),
        },
    }

    def other(product: str, run: Callable[[], Tensor], what: str) -> None:
        """Time a way that the layer does not take; that it cannot run here fails nothing."""
        if product == "wgrad":
            grads.zero_()
        try:
            error = worst(product, run(), x, a, dy, counts)
        except (RuntimeError, AttributeError) as why:
            raise Skip(sentence(why)) from None
        row.say(what, apart=error, **clock(run).numbers(0, flops), loaded=bool(clock.load))

    flops, total = 2.0 * n * o * i, 0.0
    for product, found in ways.items():
        limit = LIMITS[product] if row.cuda else LIMITS["forward"]  # a CPU rounds each to bf16
        for way, run in found.items():
            what = f"{label}, {product}, {way}"
            if way != "layer":
                row.part(what, lambda p=product, run=run, what=what: other(p, run, what))
                continue
            with Operators("grouped") as seen:
                error = worst(product, run(), x, a, dy, counts)
            row.check(what, error, limit, operators=seen.names)
            if product == "wgrad":  # a second micro-batch adds
                error = worst(product, run() / 2, x, a, dy, counts)
                row.check(f"{what}, twice", error, limit)
            took = clock(run)
            total += took.seconds
            row.say(what, **took.numbers(0, flops), loaded=bool(clock.load))
    return total


def loop(x: Tensor, weights: Tensor, counts: Counts) -> Tensor:
    """Return x w_e^T of each expert's rows, by a matmul for each expert."""
    y = x.new_empty((len(x), weights.shape[1]))
    for e, low, high in runs(counts):
        if high > low:
            y[low:high] = RECIPE.product(x[low:high], weights[e])
    return y


def worst(product: str, got: Tensor, x: Tensor, a: Tensor, dy: Tensor, counts: Counts) -> float:
    """Return the largest error of any expert: a norm over that of float64's result.

    Of an expert without rows it is the norm of its weight gradient.
    """
    errors = []
    for e, low, high in runs(counts):
        rows, mine = slice(low, high), got[e] if product == "wgrad" else got[low:high]
        if high == low:
            errors.append(mine.double().norm())
            continue
        if product == "wgrad":
            want = dy[rows].double().t() @ x[rows].double()
        elif product == "forward":
            want = x[rows].double() @ a[e].double().t()
        else:
            want = dy[rows].double() @ a[e].double()
        errors.append((mine.double() - want).norm() / want.norm())
    return torch.stack(errors).max().item()  # a NaN stays one


# ---- dispatch and combine ----


def moves(
    row: Row, z: Layer, label: str, dispatcher: Dispatcher, plan: Plan, load: Tensor
) -> float:
    """Check and time a token's way to its experts and back, forward and backward.

    GB/s are of what must be moved: each input is read once and each output written once. Returns
    the seconds of all.
    """
    n, clock = sum(plan.counts.each), Stopwatch(row)
    x, dy = (torch.randn(z.tokens, z.h, device=row.device).bfloat16() for _ in range(2))
    out, drows = (torch.randn(n, z.h, device=row.device).bfloat16() for _ in range(2))
    weights = torch.rand(z.tokens, z.topk, device=row.device)
    for leaf in (x, out, weights):
        leaf.requires_grad_()
    rows = dispatcher.rows(x, plan)
    y = dispatcher.combine(out, weights, plan)

    def rows_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(rows, x, drows, retain_graph=True)

    def combine_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, (out, weights), dy, retain_graph=True)

    with torch.no_grad():
        _check_moves(row, z, label, plan, {
            "x": x, "rows": rows, "drows": drows, "dx": rows_backward()[0], "out": out, "y": y,
            "weights": weights, "dy": dy,
            **dict(zip(("dout", "dweights"), combine_backward(), strict=True)),
        })  # fmt: skip
    total = 0.0
    small, large = 2.0 * z.tokens * z.h, 2.0 * n * z.h  # bytes in bf16
    for what, run, nbytes in (
        ("plan", lambda: dispatcher.plan(plan.choice, load), 0.0),
        ("dispatch", lambda: dispatcher.rows(x, plan), small + large),
        ("dispatch, backward", rows_backward, small + large),
        ("combine", lambda: dispatcher.combine(out, weights, plan), small + large),
        ("combine, backward", combine_backward, small + 2 * large),
    ):
        took = clock(run)
        total += took.seconds
        row.say(f"{label}: {what}", **took.numbers(nbytes), bytes=nbytes)
    return total


def _check_moves(row: Row, z: Layer, label: str, plan: Plan, given: dict[str, Tensor]) -> None:
    """Compare with sums over a token's pairs, in float64; an error is in units of its bound."""
    place, token = plan.place, plan.flat // z.topk
    row.check(
        f"{label}: dispatch, rows of other bits",
        (given["rows"] != given["x"][token]).any(1).sum().item(), 0,
    )  # fmt: skip
    weights = given["weights"].double()

    def pairs(rows: Tensor) -> Tensor:
        return rows[place].double()  # [T, k, h]

    def within(got: Tensor, parts: Tensor, unit: float) -> float:
        """Return the error of a sum over axis 1 of parts, which is rounded to `unit` at the end."""
        want = parts.sum(1)
        bound = want.abs() * unit + parts.abs().sum(1) * SUM + 1e-30
        return ((got.double() - want).abs() / bound).max().item()

    dots = [given["out"][place[:, j]].double() * given["dy"].double() for j in range(z.topk)]
    own = weights.flatten()[plan.flat][:, None] * given["dy"].double()[token]
    for what, errors in {
        "dispatch, backward": [within(given["dx"], pairs(given["drows"]), UNIT)],
        "combine": [within(given["y"], pairs(given["out"]) * weights[:, :, None], UNIT)],
        "combine, backward of rows": [within(given["dout"], own[:, None], UNIT)],
        "combine, backward of weights": [
            within(given["dweights"][:, j], each, 0.0) for j, each in enumerate(dots)
        ],
    }.items():
        row.check(f"{label}: {what}, of its bound", max(errors), 1.0)


# ---- a forward beside a backward ----

OVERLAP = "--overlap-moe-expert-parallel-comm"
STEPS = 10
RANK = str(Path(__file__).with_name("moe_rank.py"))


def overlap_flags(tiny: bool, ranks: int = 2) -> list[str]:
    """Return the flags of a model whose experts two ranks share, 8 micro-batches a rank."""
    h, f, seq, vocab = (128, 64, 64, 512) if tiny else (1024, 512, 2048, 32000)
    heads = h // 128 if not tiny else 2
    return f"""
        --mock-data --tokenizer-type NullTokenizer --vocab-size {vocab} --num-layers 4
        --hidden-size {h} --ffn-hidden-size {f} --moe-ffn-hidden-size {f} --num-experts 16
        --moe-router-topk 2 --expert-model-parallel-size {ranks}
        --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type seq_aux_loss
        --moe-aux-loss-coeff 1e-2 --num-attention-heads {heads} --seq-length {seq}
        --max-position-embeddings {seq} --swiglu --untie-embeddings-and-output-weights
        --micro-batch-size 1 --global-batch-size {(2 if tiny else 8) * ranks} --lr 1e-4
        --train-iters {3 if tiny else STEPS} --clip-grad 1.0 --bf16 --log-interval 1
    """.split()


def overlap(row: Row) -> None:
    """Run two ranks without the flag and with it; compare losses, and write what each rank had.

    On one GPU the ranks share it over gloo, so an exchange passes through the host's memory; where
    there are two they have one each, over NCCL.
    """
    shared = not row.cuda or torch.cuda.device_count() < 2
    words = overlap_flags(row.tiny)
    words += ["--distributed-backend", "gloo"] if row.cuda and shared else []
    losses, told = dict[str, list[float]](), dict[str, str]()
    for name, more in {"without": [], "with": [OVERLAP]}.items():
        with tempfile.TemporaryDirectory() as folder:
            note = Path(folder) / "note"
            lines = logged(row, [*words, *more], 2, (RANK, str(note)), PLANS_SAID)
            notes = [json.loads(path.read_text()) for path in sorted(note.parent.glob("note.*"))]
        steps = [line for line in lines if "step_seconds" in line]
        losses[name] = [line["loss"] for line in steps]
        steady = steps[1:] if row.tiny else steps[3:]
        row.say(
            f"{name} the overlap", seconds=statistics.median(s["step_seconds"] for s in steady),
            seconds_of_each=[line["step_seconds"] for line in steps], one_gpu=shared, ranks=notes,
        )  # fmt: skip
        told[name] = f"{1e3 * statistics.median(s['step_seconds'] for s in steady):.1f} ms"
        for key, what in COUNTS.items():
            if found := [most(note[key]) for note in notes if note[key]]:
                row.say(f"{name} the overlap: {what} of a rank", of_ranks=found)
                told[name] += f", {what} {found[0]['last']} (+{found[0]['a_step']:g} a step)"
    row.say("both", in_short=", ".join(f"{name} {text}" for name, text in told.items()))
    apart = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    row.check("losses with and without differ by", apart, 0.0 if not row.cuda else 2e-2)


COUNTS = {"threads": "threads", "started": "threads started", "plans": "cuDNN's attention plans"}
PLANS_SAID = {"TORCH_CUDNN_SDPA_CACHE_DEBUG": "1"}  # torch then warns at each look-up of a plan


def most(found: list[int]) -> dict[str, Any]:
    """Return what a count of each step says of a run: the last, and by how much a step added."""
    steps = [after - before for before, after in pairwise(found)]
    return {"last": found[-1], "a_step": statistics.median(steps) if steps else 0}
