#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure context parallelism: steps at cp 2 against one process, attention at cp 4 against ideal.

    python benchmarks/bench_context.py [--launches 3] [--steps 4] [--tokens 4096]

step        tokens a second of pretrain_llama.py, model `tiny`, one row of --tokens: a process that
            has all cores, and two context-parallel ranks that share them, for each --cp-comm-type
attention   forward and backward of core attention in one thread, without communication: the slowest
            of 4 ranks against a quarter of one rank's, for one document and for several

Launches take turns; a figure is the median over the timed steps of all launches.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.bench_step import command, model_flags, output  # noqa: E402
from mpu.layers.attention_blocks import Block, blocks  # noqa: E402
from mpu.layers.block_attention import attend, attend_backward, outputs  # noqa: E402
from mpu.layers.context_shards import gather_blocks, shards  # noqa: E402

KINDS = ("p2p", "all_gather", "a2a")
WARM = 2  # steps before the timed ones
CP = 4  # ranks of `attention`
HEADS, GROUPS, SIZE = 8, 4, 32  # of `tiny`


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="timed steps a launch")
    parser.add_argument("--tokens", type=int, default=4096, help="of a row")
    parser.add_argument("--calls", type=int, default=9, help="timed calls of attention")
    args = parser.parse_args()
    print(f"torch {torch.__version__}; medians of {args.launches} launches")
    for dtype in ("fp32", "bf16"):
        found: dict[str, list[float]] = {}
        for _ in range(args.launches):
            for kind in ("one process", *KINDS):
                found.setdefault(kind, []).extend(step(kind, dtype, args.tokens, args.steps))
        rates = {kind: args.tokens / statistics.median(times) for kind, times in found.items()}
        for kind, rate in rates.items():
            share = rate / rates["one process"]
            print(f"step, {dtype}, {kind:<12}{rate:>8.0f} tokens/s {share:>6.2f}", flush=True)
    torch.set_num_threads(1)
    many = (args.tokens // 2, args.tokens // 4 + 1, 1, args.tokens - 3 * (args.tokens // 4) - 2)
    for documents in ((args.tokens,), many):
        ideal, slowest = attention(documents, args.calls)
        text = f"slowest {slowest * 1e3:.1f} ms, ideal {ideal * 1e3:.1f} ms, {slowest / ideal:.2f}"
        print(f"attention, {len(documents)} documents over {CP} ranks: {text}")


def step(kind: str, dtype: str, tokens: int, steps: int) -> list[float]:
    """Return the seconds of the timed steps of a launch."""
    ranks = 1 if kind == "one process" else 2
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.json"
        flags = [*model_flags("tiny"), "--seq-length", str(tokens), "--log-json", str(log)]
        flags += ["--max-position-embeddings", str(tokens), "--train-iters", str(WARM + steps)]
        flags += ["--micro-batch-size", "1", "--global-batch-size", "1"]
        flags += ["--bf16"] if dtype == "bf16" else []
        if ranks > 1:
            flags += ["--context-parallel-size", str(ranks), "--cp-comm-type", kind]
        output([*command(ranks), str(ROOT / "pretrain_llama.py"), *flags], ranks)
        rows = [json.loads(line) for line in log.read_text().splitlines()]
    return [row["step_seconds"] for row in rows if "step_seconds" in row][WARM:]


def attention(documents: tuple[int, ...], calls: int) -> tuple[float, float]:
    """Return a quarter of one rank's seconds, and the seconds of the slowest of 4."""
    size, held = sum(documents), shards(CP, documents)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, size, SIZE) for n in (HEADS, GROUPS, GROUPS))
    whole = seconds(worker(q, k, v, (), blocks(range(size), documents)), calls) / CP
    ranks = []
    for rank in range(CP):
        todo = gather_blocks(rank, held, documents)
        at = torch.cat([torch.arange(r.start, r.stop) for r in held[rank]])
        own = [x[:, :, at].contiguous() for x in (q, k, v)]
        near = worker(own[0], own[1], own[2], todo.near, ())
        both = worker(own[0], k, v, (), todo.far, near)
        ranks.append(seconds(both, calls))
    return whole, max(ranks)


def worker(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    near: tuple[Block, ...],
    far: tuple[Block, ...],
    first: Callable[[], tuple[Tensor, Tensor]] | None = None,
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return what does the forward and the backward of blocks; `first` does some before."""
    todo, dy = (*near, *far), torch.randn_like(q)
    sums = tuple(torch.zeros_like(x) for x in (q, k, v))

    def work() -> tuple[Tensor, Tensor]:
        out, lse = outputs(q, torch.float32) if first is None else first()
        attend(todo, q, k, v, out, lse)
        attend_backward(todo, dy, (q, k, v, out, lse), sums)
        return out, lse

    return work


def seconds(work: Callable[[], object], calls: int) -> float:
    """Return the median seconds of a call."""
    times = []
    for _ in range(WARM + calls):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[WARM:])


if __name__ == "__main__":
    main()
