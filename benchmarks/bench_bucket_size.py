#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure --ddp-bucket-size auto against a sweep of sizes, over slow links of three speeds.

    sudo python benchmarks/bench_bucket_size.py [--rates 30mbit 80mbit 250mbit] [--steps 20]

Two data-parallel ranks, each in a network namespace of its own, joined by a virtual cable whose
rate tc limits (Linux, root, iproute2). One run of each size, and one of the size that auto takes,
train the same model in the same two processes, a step of each in turn, so that a machine whose
speed drifts is fair to all. A step is that of the slower rank. Two figures are printed of each
size: the median step, and the fastest, which what else runs on the machine changes least.

--asleep lets forward and backward sleep, layer by layer, instead of computing: buckets, their
collectives, the norm, the update and the choice are the real ones, and only the network and the
clock decide, also on a machine that does other work.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.bench_pipeline import Link  # noqa: E402
from estimate.bucket_size import Timeline  # noqa: E402
from estimate.model_profile import make_grid  # noqa: E402
from mpu.comm.collectives import all_gather, barrier  # noqa: E402
from mpu.launch import Launch  # noqa: E402
from pretrain_llama import Run, build, model_provider, train_step  # noqa: E402
from training.data.batch import DocumentRules, make_batch  # noqa: E402
from training.faults.monitor import FailureMonitor  # noqa: E402
from training.flags.parse import parse  # noqa: E402
from training.run.autotune import gradient_buckets  # noqa: E402
from training.run.rendezvous import meet  # noqa: E402

SIZES = (32_768, 65_536, 131_072, 262_144, 524_288, 1_048_576, 4_194_304)
MODEL = (
    "--mock-data --vocab-size 2000 --num-layers 6 --hidden-size 192 --num-attention-heads 4 "
    "--ffn-hidden-size 512 --seq-length 128 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 "
    "--train-iters 1 --device cpu --overlap-grad-reduce --no-shared-memory "
    "--untie-embeddings-and-output-weights"
)
CPU = torch.device("cpu")
FORWARD, BACKWARD = 0.5, 1.0  # seconds that --asleep sleeps


class Sleeper:
    """Takes run_schedule's place: gradients get ready as time passes, and nothing is computed."""

    def __init__(self, params: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Spread FORWARD and BACKWARD over the parameters, by their sizes."""
        total, done = sum(param.numel() for _, param in params), 0
        used, ready = dict[str, float](), dict[str, float]()
        for name, param in params:
            used[name] = FORWARD * done / total
            ready[name] = BACKWARD * (1 - done / total)
            done += param.numel()
        self.time = Timeline(used, ready, FORWARD, BACKWARD)

    def __call__(self, run: Run, schedule: Any, batches: Any, tokens: int, during: str) -> Tensor:
        params = dict(run.model.named_parameters())
        began = time.perf_counter()
        for name, param in params.items():
            _until(began + self.time.used[name])
            run.sink.acquire(param)
            run.sink.end_use(param)
        _until(began + FORWARD)
        late = time.perf_counter() - began - FORWARD
        for name, param in reversed(params.items()):
            _until(began + FORWARD + late + self.time.ready[name])
            run.sink.grad_slot(param)[0].fill_(1e-3)
            waited = time.perf_counter()
            run.sink.register_grad_ready(param)
            late += time.perf_counter() - waited  # as a backward that waits goes on later
        return torch.tensor([1.0, 1.0], dtype=torch.float64)


def _until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


def one_rank(more: str, steps: int, asleep: bool) -> None:
    """Be one end of the link."""
    launch, timeout = Launch.from_env(), timedelta(minutes=5)
    torch.set_num_threads(1)
    config = parse([*MODEL.split(), *more.split()], launch.world)
    grid = make_grid(config, launch)
    grid.connect(CPU, meet(timeout, launch), timeout)
    note = print if launch.rank == 0 else lambda line: None
    wanted = {f"{size:,}": size for size in SIZES}
    asked = replace(config, parallel=replace(config.parallel, ddp_bucket_size=0))
    if asleep:
        alone = parse([*MODEL.split(), *more.split()], 1)
        whole = build(alone, make_grid(alone, Launch()), CPU, FailureMonitor()).model
        sleeper = Sleeper(list(whole.named_parameters()))
        gradient_buckets.measured_timeline = lambda *about: sleeper.time
    chosen = gradient_buckets.choose_size(asked, grid, CPU, model_provider, note)
    wanted["auto"] = chosen.parallel.ddp_bucket_size or 0
    runs: dict[str, Run] = {}
    for name, size in wanted.items():
        own = replace(config, parallel=replace(config.parallel, ddp_bucket_size=size))
        runs[name] = build(own, grid, CPU, FailureMonitor())
        runs[name].compute = sleeper if asleep else None
    b, s = config.batch.micro_batch_size, config.model.seq_length
    rows = np.random.default_rng(launch.rank).integers(0, 2000, (b, s + 1))
    batches = [make_batch(rows, DocumentRules(), 0)]
    times: dict[str, list[float]] = {name: [] for name in runs}
    for step in range(steps + 1):  # the first warms up
        for name, run in runs.items():
            barrier(grid.world)
            began = time.perf_counter()
            train_step(run, batches, 1e-3)[0].item()
            seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
            if step:
                times[name].append(float(all_gather(seconds, grid.world)[0].max()))
    for name, each in times.items():
        buckets = len(runs[name].sink.buckets)
        note(f"{name:>10} elements, {buckets:3} buckets: median {median(each):.4f} s, fastest "
             f"{min(each):.4f} s")  # fmt: skip
    for what, of in (("median", median), ("fastest", min)):
        told = {name: of(each) for name, each in times.items()}
        best = min((name for name in told if name != "auto"), key=lambda name: told[name])
        ratio = told["auto"] / told[best] - 1
        note(f"auto by its {what} step: {ratio:+.1%} of {best}, the best of the sweep")
    grid.close()


def over_link(rate: str, words: list[str]) -> None:
    """Run both ends of a link of some rate."""
    with Link(rate) as link:
        ranks = []
        for rank, space in enumerate(link.spaces):
            environment = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
            environment |= {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.77.0.1"}
            environment |= {"MASTER_PORT": "29777", "OMP_NUM_THREADS": "1"}
            environment |= {"GLOO_SOCKET_IFNAME": space}
            command = [sys.executable, str(Path(__file__).resolve()), "--rank", *words]
            ranks.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", space, *command], env={**os.environ, **environment}
                )
            )
        if any([rank.wait() for rank in ranks]):
            sys.exit(f"a rank failed over the link of {rate}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rates", nargs="+", default=["30mbit", "80mbit", "250mbit"])
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each size")
    parser.add_argument("--flags", default="", help="more flags of every run, in quotes")
    parser.add_argument("--asleep", action="store_true", help="sleep instead of computing")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        one_rank(args.flags, args.steps, args.asleep)
        return
    for rate in args.rates:
        print(f"a link of {rate}", flush=True)
        words = ["--steps", str(args.steps), "--flags", args.flags, *["--asleep"] * args.asleep]
        over_link(rate, words)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
