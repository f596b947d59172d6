# SPDX-License-Identifier: Apache-2.0
"""Compare a layer of experts with transformers', and two ranks of experts with one process.

    python benchmarks/bench_moe.py [layer ep] [--sizes tiny small] [--pairs 9] [--cpu]
    sudo python benchmarks/bench_moe.py overlap interleaved [--link 1gbit]

layer      forward and backward of one mixture of experts, in fp32 on all cores, against
           MixtralSparseMoeBlock of transformers with experts_implementation="grouped_mm", with the
           same weights and tokens. The bound is the experts' matmuls alone on the same numbers of
           rows; the last column has its share of Weft's time
ep         steps of pretrain_llama.py with --expert-model-parallel-size 2, two processes of one
           thread, against one process of two threads that trains on the same global batch

overlap    forward and backward of one mixture with a shared expert, its experts on two ranks joined
           by a link of that rate (two network namespaces: Linux, root, iproute2), tokens spread
           evenly: as it is; with a wait right after the start of every exchange; and with free
           exchanges, which are copies. Hidden is the share of the exchanges' time for which the
           first does not wait: by medians, and in brackets by the least times, since noise adds
           more to the longer times
interleaved  the same for forwards and backwards of a step of 8 micro-batches and 2 layers without a
           shared expert: with --overlap-moe-expert-parallel-comm; without it; without it and with
           free exchanges

The two sides of a pair run right after each other, so that drifts of the machine's speed affect
both equally. A row has the median of the pairs' ratios and their range; above 1, Weft or two ranks
are faster.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks.bench_pipeline import Link
from benchmarks.bench_step import BATCH, SIZES, command, model_flags, output
from model.moe import MoEConfig, SparseMLP
from mpu.comm import mappings
from mpu.comm.collectives import barrier
from mpu.comm.transport import DONE
from mpu.context import LayerContext
from mpu.launch import Launch
from mpu.layers import dispatch
from mpu.layers.experts import RECIPE, grouped_product
from mpu.pipeline.schedules import build as build_schedule
from mpu.recompute import Decisions
from pretrain_llama import LlamaRun, build, make_grid, prepare, run_schedule
from training.data.batch import Batch
from training.faults.monitor import FailureMonitor
from training.flags.parse import parse
from training.run.rendezvous import meet
from training.run.start import connect

ROOT = Path(__file__).resolve().parent.parent
EXPERTS, TOPK = 8, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "what", nargs="*", help="layer, ep, overlap, interleaved (default: the first two)"
    )
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--link", default="1gbit", metavar="RATE", help="as tc writes it (1gbit)")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)  # one of overlap
    parser.add_argument(
        "--cpu", action="store_true",
        help="for layer: measure CPU seconds of one thread, as on a busy machine",
    )
    args = parser.parse_args()
    rows: dict[str, Callable[[str], str]] = {
        "layer": lambda size: layer(size, args.pairs, args.cpu),
        "ep": lambda size: ep(size, args.pairs),
        "overlap": lambda size: overlap("overlap", size, args.pairs, args.link),
        "interleaved": lambda size: overlap("interleaved", size, args.pairs, args.link),
    }
    if args.rank:
        of_rank = one_rank if args.what == ["overlap"] else one_rank_interleaved
        return of_rank(args.sizes[0], args.pairs, args.rank)
    if unknown := set(args.what) - set(rows):
        parser.error(f"{', '.join(sorted(unknown))}: must be one of {', '.join(rows)}")
    cores = len(os.sched_getaffinity(0))
    print(f"torch {torch.__version__}, {cores} cores; {EXPERTS} experts, {TOPK} a token, fp32")
    for what in args.what or ["layer", "ep"]:
        for size in args.sizes:
            print(rows[what](size), flush=True)


def spread(ratios: list[float]) -> str:
    """Return the median of some ratios, and their range."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def layer(size: str, pairs: int, cpu: bool = False) -> str:
    """Return the row of `layer`."""
    clock = time.process_time if cpu else time.perf_counter
    if cpu:
        torch.set_num_threads(1)
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
    took = [tuple(best(side, clock) for side in (own, other, limit)) for _ in range(pairs)]
    ratios = [b / a for a, b, _ in took]
    a, b, c = (statistics.median(column) for column in zip(*took, strict=True))
    return (
        f"layer {size:<6} Weft {a * 1e3:6.2f} ms   transformers {b * 1e3:6.2f} ms   "
        f"ratio {spread(ratios)}   matmuls {c * 1e3:6.2f} ms, {c / a:.0%} of it"
    )


def best(step: Callable[[], Any], clock: Callable[[], float], seconds: float = 0.4) -> float:
    """Return the seconds of one call: the median of the calls within `seconds`, three at least."""
    took, end = list[float](), clock() + seconds
    while len(took) < 3 or clock() < end:
        begin = clock()
        step()
        took.append(clock() - begin)
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
    """Return a function that runs forward and backward of a block and returns the gradient of x."""

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
    """Return a function that computes the experts' matmuls, forward, dgrad and wgrad, for x."""
    with torch.no_grad():
        counts = ours.decide(ours.router(x.flatten(0, 1)), BATCH).plan.counts
    products = []
    for linear in (ours.experts.gate_up, ours.experts.down):
        weight = linear.acquire().detach()
        rows = torch.randn(sum(counts.each), linear.in_features)
        products.append((weight, rows, torch.randn(sum(counts.each), linear.out_features)))

    def run() -> None:
        for weight, rows, dy in products:
            grouped_product(rows, weight, counts)
            grouped_product(dy, weight.transpose(1, 2), counts)
            first, made = 0, torch.empty_like(weight)
            for e, count in enumerate(counts.each):
                some = slice(first, first + count)
                RECIPE.accumulate(made[e], True, rows[some], dy[some])
                first += count

    return run


def ep(size: str, pairs: int) -> str:
    """Return the row of `ep`."""
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


SIDES = {
    "overlap": ("as it is", "waited for at once", "free"),
    "interleaved": ("interleaved", "one after the other", "free"),
}


def overlap(what: str, size: str, pairs: int, rate: str) -> str:
    """Return the row of `overlap` or `interleaved`, of two ranks on a link."""
    with tempfile.TemporaryDirectory() as folder, Link(rate, burst="256kb") as link:
        file = Path(folder) / "seconds.json"
        words = [sys.executable, __file__, what, "--rank", str(file), "--sizes", size]
        link.run([*words, "--pairs", str(pairs)])
        took = json.loads(file.read_text())
    sides = [*zip(*took, strict=True)]
    middle, least = ([find(side) for side in sides] for find in (statistics.median, min))
    told = "   ".join(
        f"{side} {a * 1e3:.0f} ({b * 1e3:.0f}) ms"
        for side, a, b in zip(SIDES[what], middle, least, strict=True)
    )
    share = f"hidden {hidden(*middle):.0%} ({hidden(*least):.0%})"
    return f"{what:<7} {size:<6} {told}   {share} at {rate}"


def hidden(own: float, at_once: float, free: float) -> float:
    """Return the share of the exchanges' time for which the first side does not wait."""
    return 1 - (own - free) / (at_once - free)


def one_rank(size: str, pairs: int, file: Path) -> None:
    """Run one rank of `overlap`; rank 0 writes the seconds of each side of each pair."""
    f = SIZES[size][4]
    run = joined(
        size, f"--global-batch-size 4 --num-layers 1 --moe-shared-expert-intermediate-size {f}"
    )
    config, grid = run.config, run.grid
    block = run.model.layers["0"].mlp
    x = torch.randn(config.model.seq_length, 2, config.model.hidden_size)
    dy = torch.randn_like(x)
    real, took = dispatch.all_to_all, list[list[float]]()

    def at_once(*given: Any, **more: Any) -> Any:
        y, handle = real(*given, **more)
        handle.wait()
        return y, DONE

    for _ in range(1 + pairs):
        took.append([])
        for verb in (real, at_once, free):
            given = x.detach().requires_grad_()
            run.sink.begin_step(1)
            barrier(grid.world)
            with patch.object(dispatch, "all_to_all", verb):
                begin = time.perf_counter()
                block(given).backward(dy)
                took[-1].append(time.perf_counter() - begin)
    if grid.rank == 0:
        file.write_text(json.dumps(took[1:]))  # the first connects the ranks and touches the memory
    grid.close()


def joined(size: str, more: str) -> LlamaRun:
    """Return the run of one of two ranks with expert parallelism and forced load balance."""
    flags = f"""--num-experts {EXPERTS} --moe-router-topk {TOPK} --micro-batch-size 2
        --train-iters 1 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall
        --moe-router-force-load-balancing --no-shared-memory {more}"""
    launch = Launch.from_env()
    config = parse([*model_flags(size), *flags.split()], launch.world)
    grid = make_grid(config, launch)
    config, device, _, _ = prepare(config, grid, False, print)
    wait = timedelta(minutes=5)
    connect(config, grid, device, meet(wait, launch), wait, print)
    return build(config, grid, device, FailureMonitor())


def free(x: Tensor, *_: Any, **__: Any) -> Any:
    """Replace an exchange that returns as many rows as it is given."""
    return x.clone(), DONE


def one_rank_interleaved(size: str, pairs: int, file: Path) -> None:
    """Run one rank of `interleaved`; rank 0 writes the seconds of each side of each pair."""
    run = joined(size, "--global-batch-size 32 --num-layers 2 --overlap-moe-expert-parallel-comm")
    config, grid, count = run.config, run.grid, 8
    tokens = torch.randint(0, 1000, (count, 2, config.model.seq_length + 1))
    batches = [
        Batch(rows[:, :-1], rows[:, 1:], None, None, None, 0, rows[:, 1:].numel())
        for rows in tokens
    ]
    took, plain = list[list[float]](), build_schedule("1f1b", 1, count)
    sides = ((run.schedule(count), None), (plain, None), (plain, free))
    for _ in range(1 + pairs):
        took.append([])
        for schedule, verb in sides:
            run.sink.begin_step(count)
            barrier(grid.world)
            with contextlib.ExitStack() as stack:
                for module in (dispatch, mappings) if verb else ():
                    stack.enter_context(patch.object(module, "all_to_all", verb))
                begin = time.perf_counter()
                run_schedule(run, schedule, batches, tokens.numel(), "")
                took[-1].append(time.perf_counter() - begin)
    if grid.rank == 0:
        file.write_text(json.dumps(took[1:]))
    grid.close()


if __name__ == "__main__":
    main()
