#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure what --check-replicas costs: the time of a comparison against that of a step.

    OMP_NUM_THREADS=1 python benchmarks/bench_replica_check.py

Two ranks train a small Llama at ZeRO 0, fp32 and bf16: weights, masters and moments are all
replicated, which is the most that there is to compare. Steps and comparisons alternate in the same
processes, so both see the same machine. Printed: the median of each, and the comparison's share of
a run at --check-replicas 100. Also what a save's look for values that are not finite costs, as a
share of hashing the same bytes.
"""

import argparse
import hashlib
import os
import socket
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SIZES = """
    --mock-data --vocab-size 4096 --num-layers 4 --hidden-size 256 --num-attention-heads 4
    --seq-length 256 --micro-batch-size 2 --global-batch-size 8 --lr 1e-4 --train-iters 1
    --device cpu --num-workers 0
""".split()


def rank_main(rank: int, world: int, port: int, rounds: int, more: list[str], out: Any) -> None:
    """Be one rank."""
    import pretrain_llama
    from mpu.connect import share
    from mpu.launch import Launch, bind_loopback
    from mpu.zero.replica_check import ReplicaCheck
    from training.data.build import build_loaders
    from training.data.tokenizer import tokenizer_for
    from training.faults.monitor import FailureMonitor
    from training.flags.parse import parse

    torch.set_num_threads(1)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    bind_loopback()
    config = parse([*SIZES, *more], world)
    grid = pretrain_llama.make_grid(config, Launch(rank, world, rank, world))
    store = torch.distributed.TCPStore("127.0.0.1", port, world, is_master=rank == 0)
    device, timeout = torch.device("cpu"), timedelta(seconds=120)
    grid.connect(device, store, timeout)
    share(grid, timeout)
    tokenizer = tokenizer_for(config)
    config = config.with_vocab(tokenizer.vocab_size)
    run = pretrain_llama.build(config, grid, device, FailureMonitor())
    loader = build_loaders(config, tokenizer, rank, world, lambda line: None).train
    batches = loader.next_global_batch(0, config.batch.global_batch_size)
    check, steps, checks = ReplicaCheck(grid, run.optimizer), [], []
    for _ in range(rounds + 2):
        begin = time.perf_counter()
        pretrain_llama.train_step(run, batches, 1e-4)
        middle = time.perf_counter()
        assert check.run() == []
        steps.append(middle - begin)
        checks.append(time.perf_counter() - middle)
    if rank == 0:
        state = [values for _, _, values, _ in check.tensors()]
        out.put((steps[2:], checks[2:], sum(v.nbytes for v in state)))
    grid.close()


def finite_cost() -> str:
    """Return what the look for values that are not finite costs beside hashing them."""
    from training.checkpoint.finite import fault_of

    values = torch.randn(1 << 24)
    looks, hashes = [], []
    for _ in range(5):
        begin = time.perf_counter()
        assert fault_of(values) == ""
        middle = time.perf_counter()
        hashlib.sha256(values.numpy().data).digest()
        looks.append(middle - begin)
        hashes.append(time.perf_counter() - middle)
    ratio = statistics.median(looks) / statistics.median(hashes)
    return f"finite check of a save: {ratio:.1%} of the time of its SHA-256"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20, help="steps and comparisons measured")
    args = parser.parse_args()
    context = mp.get_context("spawn")
    for name, more in (("fp32", []), ("bf16", ["--bf16"])):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        out = context.Queue()
        ranks = [
            context.Process(target=rank_main, args=(r, 2, port, args.rounds, more, out))
            for r in range(2)
        ]
        for process in ranks:
            process.start()
        steps, checks, nbytes = out.get()
        for process in ranks:
            process.join()
        step, check = statistics.median(steps), statistics.median(checks)
        print(
            f"{name}: step {step * 1e3:.1f} ms, comparison of {nbytes / 1e6:.1f} MB a rank "
            f"{check * 1e3:.2f} ms; at --check-replicas 100: {check / step / 100:.3%} of a step"
        )
    print(finite_cost())


if __name__ == "__main__":
    main()
