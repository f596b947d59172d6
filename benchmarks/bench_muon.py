#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare a step of Muon with AdamW's, and with the matmuls of its own iterations.

    OMP_NUM_THREADS=1 python benchmarks/bench_muon.py [--size small] [--dp 2] [--rounds 3]

The ranks update the same model at a ZeRO stage, with random gradients, by AdamW and by Muon; as a
third side they compute only the products X X^T, A A and B X of the matrices that a rank owns, in
the dtype of the iterations. The three alternate in the same processes, so they see the same machine
load. Printed: medians of the slowest rank, and the time of Muon minus AdamW's as a multiple of the
products'.
"""

import argparse
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_step import SIZES, model_flags  # noqa: E402


def rank_main(rank: int, args: argparse.Namespace, port: int, out: Any) -> None:
    """Run one rank: time all sides, in turns."""
    import pretrain_llama
    from mpu.connect import share
    from mpu.launch import Launch, bind_loopback
    from mpu.optim.muon import MuonUpdater
    from training.faults.monitor import FailureMonitor
    from training.flags.parse import parse

    torch.set_num_threads(args.threads)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    bind_loopback()
    words = [*model_flags(args.size), "--micro-batch-size", "1", "--train-iters", "1"]
    words += ["--global-batch-size", str(args.dp), "--zero-stage", str(args.zero_stage)]
    muon = ["--optimizer", "muon"]
    config = parse([*words, *muon], args.dp)
    grid = pretrain_llama.make_grid(config, Launch(rank, args.dp, rank, args.dp))
    device, timeout = torch.device("cpu"), timedelta(seconds=600)
    if args.dp > 1:
        store = torch.distributed.TCPStore("127.0.0.1", port, args.dp, is_master=rank == 0)
        grid.connect(device, store, timeout)
        share(grid, timeout)
    optimizers = []
    for flags in ([], muon):
        run = pretrain_llama.build(parse([*words, *flags], args.dp), grid, device, FailureMonitor())
        generator = torch.Generator().manual_seed(rank)
        for bucket in run.sink.buckets:
            bucket.grad_shard.normal_(generator=generator)
        optimizers.append(run.optimizer)
    (updater,) = (u for u in optimizers[1].updaters[0] if isinstance(u, MuonUpdater))
    plan = updater.plan
    owned = [plan.matrices[n] for turn in updater.exchanges for n in turn.owned]
    products = products_of([(m.rows, m.columns) for m in owned], len(updater.rule.coefficients))
    calls: tuple[Callable[[], Any], ...] = (
        lambda: optimizers[0].step(1e-4), lambda: optimizers[1].step(1e-4), products,
    )  # fmt: skip
    seconds: list[list[float]] = [[] for _ in calls]
    for number in range(args.rounds + 1):
        for call, found in zip(calls, seconds, strict=True):
            begin = time.perf_counter()
            call()
            if number:
                found.append(time.perf_counter() - begin)
    out.put([statistics.median(found) for found in seconds])
    grid.close()


def products_of(shapes: list[tuple[int, int]], steps: int) -> Callable[[], None]:
    """Return a function that computes only the three products of each iteration of matrices."""
    made: dict[tuple[int, int], Tensor] = {}
    for shape in shapes:
        low, high = sorted(shape)
        made[low, high] = torch.randn(low, high).to(torch.bfloat16) / high**0.5

    def call() -> None:
        for shape in shapes:
            x = made[min(shape), max(shape)]
            for _ in range(steps):
                gram = x @ x.T
                y = gram @ gram
                y @ x

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small", help="of bench_step.py (small)")
    parser.add_argument("--dp", type=int, default=2, help="data-parallel ranks (2)")
    parser.add_argument("--zero-stage", type=int, default=1, choices=range(4), help="(1)")
    parser.add_argument("--rounds", type=int, default=3, help="timed, after one that is not (3)")
    parser.add_argument("--threads", type=int, default=1, help="of a rank (1)")
    args = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = mp.get_context("spawn").SimpleQueue()
    ranks = mp.start_processes(rank_main, (args, port, out), args.dp, join=False)
    every = []
    while len(every) < args.dp:
        if not out.empty():
            every.append(out.get())
        elif ranks.join(0.2):
            break
    while not ranks.join():
        pass
    adam, muon, products = (max(each) for each in zip(*every, strict=True))
    print(
        f"{args.size}, dp {args.dp}, ZeRO {args.zero_stage}: AdamW {adam:.2f} s, Muon {muon:.2f} s,"
        f" its products {products:.2f} s; Muon minus AdamW is {(muon - adam) / products:.2f} times"
        " the products"
    )


if __name__ == "__main__":
    main()
