# SPDX-License-Identifier: Apache-2.0
"""Measure a layer of experts against transformers', and two ranks of experts against one process.

    python benchmarks/bench_moe.py [layer ep] [--sizes tiny small] [--pairs 9]

layer      forward and backward of one mixture of experts, in fp32 on all cores, beside
           MixtralSparseMoeBlock of transformers with experts_implementation="grouped_mm", from the
           same weights and tokens. Beside it the matmuls of the experts alone, as long as the rows
           are the same: of this bound Weft reaches the share in the last column
ep         steps of pretrain_llama.py with --expert-model-parallel-size 2, two processes of one
           thread, beside one process of two threads that trains on the same global batch

The two sides of a pair run one right after the other, so that a machine whose speed drifts is fair
to both. A row has the median of the pairs' ratios and their range; above 1 Weft, or two ranks, are
faster.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks.bench_step import BATCH, SIZES, command, model_flags, output
from model.moe import MoEConfig, SparseMLP
from mpu.context import LayerContext
from mpu.layers.experts import RECIPE, grouped_product
from mpu.recompute import Decisions

ROOT = Path(__file__).resolve().parent.parent
EXPERTS, TOPK = 8, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", choices=["layer", "ep", []], help="left out: all")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--pairs", type=int, default=9)
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    print(f"torch {torch.__version__}, {cores} cores; {EXPERTS} experts, {TOPK} a token, fp32")
    for what in args.what or ["layer", "ep"]:
        for size in args.sizes:
            print(layer(size, args.pairs) if what == "layer" else ep(size, args.pairs), flush=True)


def spread(ratios: list[float]) -> str:
    """Return the median of some ratios, and their range."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def layer(size: str, pairs: int) -> str:
    """Return the row of one layer."""
    h, _, _, _, f, _, s = SIZES[size]
    torch.manual_seed(0)
    ours, theirs = weft(h, f), transformers_block(h, f)
    copy_weights(ours, theirs)
    x = torch.randn(s, BATCH, h)
    dy = torch.randn(s, BATCH, h)
    own = step_of(ours, x, dy)
    other = step_of(theirs, x, dy)
    assert torch.allclose(own(), other(), rtol=1e-3, atol=1e-4), "the two compute something else"
    limit = bound(ours, x)
    took = [(best(own), best(other), best(limit)) for _ in range(pairs)]
    ratios = [b / a for a, b, _ in took]
    a, b, c = (statistics.median(column) for column in zip(*took, strict=True))
    return (
        f"layer {size:<6} Weft {a * 1e3:6.2f} ms   transformers {b * 1e3:6.2f} ms   "
        f"ratio {spread(ratios)}   matmuls {c * 1e3:6.2f} ms, {c / a:.0%} of it"
    )


def best(step: Callable[[], Any], seconds: float = 0.4) -> float:
    """Return the seconds of one call: the median of those that fit."""
    took, end = list[float](), time.perf_counter() + seconds
    while len(took) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        step()
        took.append(time.perf_counter() - begin)
    return statistics.median(took)


def weft(h: int, f: int) -> SparseMLP:
    config = MoEConfig(100, h, f, 1, 2, 2, num_experts=EXPERTS, moe_router_topk=TOPK)
    return SparseMLP(config, LayerContext(), Decisions())


def transformers_block(h: int, f: int) -> Any:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=h, intermediate_size=f, num_local_experts=EXPERTS, num_experts_per_tok=TOPK
    )
    config._experts_implementation = "grouped_mm"
    return MixtralSparseMoeBlock(config)


@torch.no_grad()
def copy_weights(ours: SparseMLP, theirs: Any) -> None:
    for param in ours.parameters():
        param.normal_(0, 0.02)
    theirs.gate.weight.copy_(ours.router.weight)
    theirs.experts.gate_up_proj.copy_(ours.experts.gate_up.acquire())
    theirs.experts.down_proj.copy_(ours.experts.down.acquire())


def step_of(block: Any, x: Tensor, dy: Tensor) -> Callable[[], Tensor]:
    """Return forward and backward of a block, with fresh gradients; it returns that of x."""

    def step() -> Tensor:
        given = x.detach().requires_grad_()
        if isinstance(block, SparseMLP):
            block.ctx.sink.begin_step()
        else:
            block.zero_grad(set_to_none=True)
        y = block(given)
        (y[0] if isinstance(y, tuple) else y).backward(dy)
        assert given.grad is not None
        return given.grad

    return step


def bound(ours: SparseMLP, x: Tensor) -> Callable[[], None]:
    """Return the products of the experts, forward, dgrad and wgrad, of the rows of x."""
    with torch.no_grad():
        counts = ours.decide(ours.router(x.flatten(0, 1)), BATCH).plan.counts
    products = []
    for linear in (ours.experts.gate_up, ours.experts.down):
        weight = linear.acquire().detach()
        rows = torch.randn(sum(counts), linear.in_features)
        products.append((weight, rows, torch.randn(sum(counts), linear.out_features)))

    def run() -> None:
        for weight, rows, dy in products:
            grouped_product(rows, weight, counts)
            grouped_product(dy, weight.transpose(1, 2), counts)
            first, made = 0, torch.empty_like(weight)
            for e, count in enumerate(counts):
                some = slice(first, first + count)
                RECIPE.accumulate(made[e], True, rows[some], dy[some])
                first += count

    return run


def ep(size: str, pairs: int) -> str:
    """Return the row of two ranks."""
    steps = 8 if size == "tiny" else 2
    took = [(train(size, 2, steps), train(size, 1, steps)) for _ in range(pairs)]
    ratios = [alone / two for two, alone in took]
    tokens = BATCH * SIZES[size][-1]
    two, alone = (tokens / statistics.median(column) for column in zip(*took, strict=True))
    return (
        f"ep    {size:<6} two ranks {two:8.0f} tokens/s   one process {alone:8.0f} tokens/s   "
        f"ratio {spread(ratios)}"
    )


def train(size: str, ranks: int, steps: int) -> float:
    """Return the median seconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.json"
        flags = f"""--num-experts {EXPERTS} --moe-router-topk {TOPK} --train-iters {2 + steps}
            --micro-batch-size {BATCH // ranks} --global-batch-size {BATCH} --log-json {log}
            --expert-model-parallel-size {ranks} --moe-token-dispatcher-type auto"""
        words = [*command(ranks), str(ROOT / "pretrain_llama.py"), *model_flags(size)]
        output([*words, *flags.split()], ranks)
        rows = [json.loads(line) for line in log.read_text().splitlines()]
    return statistics.median([row["step_seconds"] for row in rows if "loss" in row][2:])


if __name__ == "__main__":
    main()
