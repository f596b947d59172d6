#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of --log-digests: the time of a step's digests beside that of the step.

    OMP_NUM_THREADS=1 python benchmarks/bench_digests.py [--size small] [--ranks 1 2] [--rounds 5]

Each rank has the batch of benchmarks/bench_step.py. Steps and digests alternate in the same
processes, so both see the same machine load. Printed: the median of each, and the digests' share of
a run's time if they are computed every step, and every tenth. Without the flag the watcher returns
at once; that call is timed, too.
"""

import argparse
import os
import socket
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_step import BATCH, model_flags  # noqa: E402


def rank_main(rank: int, world: int, port: int, rounds: int, flags: list[str], out: Any) -> None:
    """Run one rank: time steps and their digests, in turns."""
    import pretrain_llama
    from model.load import load_model_file
    from mpu.connect import share
    from mpu.launch import Launch, bind_loopback
    from training.data.build import build_loaders
    from training.data.tokenizer import tokenizer_for
    from training.faults.monitor import FailureMonitor
    from training.flags.parse import parse
    from training.run.start import log_of
    from training.run.step import Step
    from training.run.watch.digests import Digests

    torch.set_num_threads(1)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    bind_loopback()
    config = parse(flags, world)
    grid = pretrain_llama.make_grid(config, Launch(rank, world, rank, world))
    device, timeout = torch.device("cpu"), timedelta(seconds=600)
    if world > 1:
        store = torch.distributed.TCPStore("127.0.0.1", port, world, is_master=rank == 0)
        grid.connect(device, store, timeout)
        share(grid, timeout)
    tokenizer = tokenizer_for(config)
    config = config.with_vocab(tokenizer.vocab_size)
    run = pretrain_llama.build(config, grid, device, FailureMonitor())
    loader = build_loaders(config, tokenizer, grid.dp.rank, grid.dp.size, lambda line: None).train
    log = log_of(run, pretrain_llama.model_provider, 100)
    names = load_model_file(config.model.model_file).hf_names(run.model)
    digests = Digests(run, names, {}, log)
    steps, costs, idle = [], [], []
    for _ in range(rounds + 1):
        step = Step.next(run)
        begin = time.perf_counter()
        batches = step.batches(loader, device)
        step.loss, step.norm, step.found_inf = pretrain_llama.train_step(run, batches, 1e-4)
        middle = time.perf_counter()
        digests.after_step(step)
        costs.append(time.perf_counter() - middle)
        steps.append(middle - begin)
        step.count(run)
    digests.every = None
    for _ in range(1000):
        begin = time.perf_counter()
        digests.after_step(step)
        idle.append(time.perf_counter() - begin)
    if rank == 0:
        count = sum(p.numel() for p in run.module.parameters())
        out.put((steps[1:], costs[1:], idle, count))
    grid.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", default="small", choices=("tiny", "small"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5, help="steps measured")
    args = parser.parse_args()
    context, rounds = mp.get_context("spawn"), args.rounds
    for world in args.ranks:
        for name, more in (("ZeRO 0", []), ("ZeRO 3", ["--zero-stage", "3"])):
            if world == 1 and more:
                continue
            with socket.socket() as s, tempfile.TemporaryDirectory() as folder:
                s.bind(("127.0.0.1", 0))
                port = s.getsockname()[1]
                s.close()
                log = ["--log-digests", "1", "--log-json", f"{folder}/log.jsonl"]
                batch = [
                    "--micro-batch-size",
                    str(BATCH),
                    "--global-batch-size",
                    str(BATCH * world),
                ]
                flags = [*model_flags(args.size), "--train-iters", "100", *batch, *more, *log]
                out = context.Queue()
                ranks = [
                    context.Process(target=rank_main, args=(r, world, port, rounds, flags, out))
                    for r in range(world)
                ]
                for process in ranks:
                    process.start()
                steps, costs, idle, count = out.get()
                for process in ranks:
                    process.join()
                lines = Path(folder, "digests.jsonl").read_text().splitlines()
            step, cost = statistics.median(steps), statistics.median(costs)
            print(
                f"{args.size}, {world} ranks, {name}, {count:,} parameters: step {step:.3f} s "
                f"({min(steps):.3f} to {max(steps):.3f}), digests {cost * 1e3:.1f} ms, a line of "
                f"{len(lines[-1]):,} bytes; every step {cost / step:.2%}, every tenth "
                f"{cost / step / 10:.2%}; off {statistics.median(idle) * 1e6:.2f} us"
            )


if __name__ == "__main__":
    main()
