#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Predict steps on this machine's cores and hold them to real runs of 30 layouts.

    python benchmarks/plan_cpu.py [--json FILE] [--only TEXT]

Worlds of 1, 2 and 4 ranks first measure what the cores do (planning/cpu_probe.py), then train tiny
and small in each layout: the trainer's own model, buckets, optimizer and train_step, on mock data,
a few steps of each. planning/cpu_time.py predicts each step from the probe alone. The table has
both; below it are the mean error, and by how much the layout that is predicted to be fastest is
slower than the best that was measured, for each model and dtype: by the median step, and by the
fastest, which what else runs on the machine changes least. Ranks beyond the cores share them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.planning import cpu_probe  # noqa: E402
from benchmarks.planning.cpu_host import Host, Product, Rates  # noqa: E402
from benchmarks.planning.cpu_time import Rank, Told, told  # noqa: E402
from forecast.rehearsal.run import loader  # noqa: E402
from mpu.comm.collectives import all_gather, barrier  # noqa: E402
from mpu.connect import share  # noqa: E402
from mpu.launch import Launch  # noqa: E402
from pretrain_llama import build, train_step  # noqa: E402
from training.faults.monitor import FailureMonitor  # noqa: E402
from training.flags.parse import parse  # noqa: E402
from training.run.device import keep_freed_memory  # noqa: E402
from training.run.model_profile import make_grid  # noqa: E402
from training.run.rendezvous import meet  # noqa: E402
from training.settings.config import Config  # noqa: E402

CPU, TIMEOUT = torch.device("cpu"), timedelta(minutes=10)
SIZES = {  # as in bench_step.py
    "tiny": "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --num-query-groups 4 "
            "--ffn-hidden-size 768 --vocab-size 4096 --seq-length 256 --global-batch-size 8",
    "small": "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --num-query-groups 4 "
             "--ffn-hidden-size 2048 --vocab-size 8192 --seq-length 512 --global-batch-size 4",
}  # fmt: skip
SHARED = (
    "--group-query-attention --untie-embeddings-and-output-weights --mock-data --train-iters 1 "
    "--lr 3e-4 --device cpu"
)
STEPS = {"tiny": 8, "small": 3}  # timed ones; one more warms up
TP, PP, CP, B, ZERO = (
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size",
    "--micro-batch-size", "--zero-stage",
)  # fmt: skip
SP = "--sequence-parallel"
INTERLEAVED = "--num-virtual-stages-per-pipeline-rank"


class Case(NamedTuple):
    """One run: a model, its dtype, ranks, the flags of its layout."""

    size: str
    dtype: str
    ranks: int
    layout: str

    @property
    def flags(self) -> str:
        low = " --bf16" if self.dtype == "bf16" else ""
        return f"{SIZES[self.size]} {SHARED} {self.layout}{low}"

    def config(self) -> Config:
        return parse(self.flags.split(), self.ranks)


TINY = [
    (1, f"{B} 8"), (1, f"{B} 2"), (2, f"{TP} 2 {SP} {B} 8"), (2, f"{TP} 2 {SP} {B} 2"),
    (2, f"{TP} 2 {B} 4"), (2, f"{B} 4"), (2, f"{ZERO} 1 {B} 2"), (2, f"{ZERO} 2 {B} 4"),
    (2, f"{ZERO} 3 {B} 4"), (2, f"{PP} 2 {B} 2"), (2, f"{PP} 2 {B} 1"),
    (2, f"{PP} 2 {INTERLEAVED} 2 {B} 2"), (2, f"{PP} 2 --pipeline-schedule zb-h1 {B} 2"),
    (2, f"{CP} 2 {B} 8"), (2, f"{CP} 2 --cp-comm-type all_gather {B} 4"),
    (2, f"{CP} 2 --cp-comm-type a2a {B} 4"), (4, f"{TP} 4 {SP} {B} 8"),
    (4, f"{TP} 2 {SP} {ZERO} 1 {B} 4"), (4, f"{ZERO} 1 {B} 2"), (4, f"{TP} 2 {SP} {PP} 2 {B} 2"),
    (4, f"{PP} 4 {B} 1"),
]  # fmt: skip
SMALL = [
    (1, f"{B} 4"), (2, f"{TP} 2 {SP} {B} 4"), (2, f"{ZERO} 1 {B} 2"), (2, f"{PP} 2 {B} 1"),
    (2, f"{CP} 2 {B} 4"), (4, f"{TP} 2 {SP} {PP} 2 {B} 1"),
]  # fmt: skip
NARROW = [(1, f"{B} 4"), (2, f"{TP} 2 {SP} {B} 4"), (2, f"{PP} 2 {B} 1")]  # small, bfloat16
CASES = [
    *(Case("tiny", "fp32", *each) for each in TINY),
    *(Case("small", "fp32", *each) for each in SMALL),
    *(Case("small", "bf16", *each) for each in NARROW),
]  # fmt: skip


def products_of(cases: Sequence[Case]) -> list[Product]:
    """Return the matmuls of cases."""
    found: dict[Product, None] = {}
    for case in cases:
        rank = Rank.of(case.config())
        found |= dict.fromkeys([*rank.of_layer, *rank.of_head])
    return list(found)


def measure(config: Config, launch: Launch, steps: int) -> tuple[float, float]:
    """Return the median and the fastest seconds of a run's steps, each that of its slowest rank."""
    grid = make_grid(config, launch)
    if launch.world > 1:
        grid.backend = "gloo"
        grid.add_groups(CPU, TIMEOUT)
        share(grid, TIMEOUT)
    run = build(config, grid, CPU, FailureMonitor())
    batches = loader(config, grid).next_global_batch(0, config.batch.global_batch_size)
    found = []
    for _ in range(steps + 1):
        if launch.world > 1:
            barrier(grid.world)
        began = time.perf_counter()
        train_step(run, batches, 3e-4)[0].item()
        seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        found.append(float(all_gather(seconds, grid.world)[0].max()))
    return statistics.median(found[1:]), min(found[1:])


def one_rank(job: Path) -> None:
    """Be a rank of a world: probe, then run; rank 0 writes what it saw beside the job."""
    launch, cases = Launch.from_env(), [Case(*each) for each in json.loads(job.read_text())]
    keep_freed_memory()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // launch.world))
    seen: dict[str, Any] = {"threads": torch.get_num_threads()}
    if launch.world > 1:
        grid = make_grid(cases[0].config(), launch)
        grid.connect(CPU, meet(TIMEOUT, launch), TIMEOUT)
        whole = make_grid(parse(
            [*cases[0].flags.split(), TP, str(launch.world), PP, "1", CP, "1"], launch.world
        ), launch)  # fmt: skip
        whole.backend = "gloo"
        whole.add_groups(CPU, TIMEOUT)
        share(whole, TIMEOUT)
        seen["transfers"] = {f"{verb} {launch.world}": points for verb, points in
                             cpu_probe.transfer_seconds(whole.tp).items()}  # fmt: skip
        seen["together"] = cpu_probe.together_seconds(whole.tp)
    if launch.world <= len(os.sched_getaffinity(0)):
        seen["rates"] = cpu_probe.rates(products_of([c for c in CASES if at_once(c) == at_once(
            cases[0])]))  # fmt: skip
    begin = time.perf_counter()
    if launch.world == 2:
        seen["context"] = {
            f"{comm} {b}": measure(cpu_probe.context_config(comm, b), launch, cpu_probe.TRIALS)[1]
            for comm, b in cpu_probe.CONTEXT
        }
    seen["steps"] = []
    for case in cases:
        seen["steps"].append(measure(case.config(), launch, STEPS[case.size]))
        if launch.rank == 0:
            print(f"{time.perf_counter() - begin:6.0f} s {seen['steps'][-1][0]:8.3f} {case}",
                  file=sys.stderr, flush=True)  # fmt: skip
    if launch.rank == 0:
        job.with_suffix(".seen").write_text(json.dumps(seen))


def at_once(case: Case) -> int:
    """Return the ranks of a case that have a core to themselves."""
    return min(case.ranks, len(os.sched_getaffinity(0)))


def world(ranks: int, cases: Sequence[Case], folder: Path) -> dict[str, Any]:
    """Start a world, and return what it saw."""
    job = folder / f"{ranks}.json"
    job.write_text(json.dumps(cases))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                f"--nproc-per-node={ranks}"] if ranks > 1 else [sys.executable]  # fmt: skip
    threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    subprocess.run(
        [*launcher, str(Path(__file__).resolve()), "--rank", str(job)],
        env={**os.environ, "OMP_NUM_THREADS": threads}, check=True,
    )  # fmt: skip
    seen: dict[str, Any] = json.loads(job.with_suffix(".seen").read_text())
    return seen


def regrets(cases: Sequence[Case], real: Sequence[float], said: Sequence[float]) -> list[str]:
    """Return, for each model and dtype, how much slower the plan chosen is than the best."""
    lines = []
    for size, dtype in dict.fromkeys((c.size, c.dtype) for c in cases):
        at = [n for n, c in enumerate(cases) if (c.size, c.dtype) == (size, dtype)]
        chosen, best = min(at, key=lambda n: said[n]), min(at, key=lambda n: real[n])
        lines.append(
            f"{size} {dtype}: chosen of {len(at)} is [{cases[chosen].ranks}] {cases[chosen].layout}"
            f", {real[chosen] / real[best] - 1:.1%} slower than the best, [{cases[best].ranks}] "
            f"{cases[best].layout}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases that contain this")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        one_rank(args.rank)
        sys.stdout.flush()
        os._exit(0)  # gloo's threads may still stand in the interpreter's shutdown
    cases = [c for c in CASES if args.only in " ".join(map(str, c))]
    rates, transfers, real, context, together = {}, {}, {}, {}, {}
    cores = len(os.sched_getaffinity(0))
    begin = time.time()
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (1, 2, 4):
            own = [case for case in cases if case.ranks == ranks]
            first = next(case for case in CASES if case.ranks == ranks)  # for the probe alone
            seen = world(ranks, own or [first], Path(folder))
            if "rates" in seen:
                rates[seen["threads"]] = Rates(**seen["rates"])
            transfers |= seen.get("transfers", {})
            context |= seen.get("context", {})
            together[ranks] = seen.get("together", 0.0)
            real |= dict(zip(own, seen["steps"], strict=False))
    sharing = {"4": max(1.0, together[4] / together[2] * cores / 4)} if cores < 4 else {}
    host = Host(cores, rates, transfers, sharing=sharing)
    host = replace(host, context=cpu_probe.context_of(host, context))
    report(cases, [real[case] for case in cases], host, args.json)
    print(f"{time.time() - begin:.0f} s in all")


def report(
    cases: Sequence[Case], real: Sequence[tuple[float, float]], host: Host, file: Path | None
) -> None:
    """Print the table and its figures; write them to a file."""
    every: list[Told] = [told(host, case.config()) for case in cases]
    print(f"{'model':<6}{'dtype':<6}{'ranks':>5}{'median s':>10}{'fastest':>9}{'predicted':>10}"
          f"{'error':>7}{'of fastest':>11}{'compute':>9}{'transfers':>10}{'sums':>7}{'update':>8}"
          "  layout")  # fmt: skip
    for case, (middle, fastest), t in zip(cases, real, every, strict=True):
        print(f"{case.size:<6}{case.dtype:<6}{case.ranks:>5}{middle:>10.3f}{fastest:>9.3f}"
              f"{t.step:>10.3f}{t.step / middle - 1:>7.1%}{t.step / fastest - 1:>11.1%}"
              f"{t.compute:>9.3f}{t.transfers:>10.3f}{t.sums:>7.3f}{t.update:>8.3f}"
              f"  {case.layout}")  # fmt: skip
    figures = {}
    for n, name in enumerate(("median", "fastest")):
        own = [each[n] for each in real]
        errors = [abs(t.step / seconds - 1) for t, seconds in zip(every, own, strict=True)]
        lines = regrets(cases, own, [t.step for t in every])
        figures[name] = {"mape": statistics.mean(errors), "plans": lines}
        print(f"by the {name} step: mean error of {len(cases)} runs {statistics.mean(errors):.1%}, "
              f"largest {max(errors):.1%}", *lines, sep="\n  ")  # fmt: skip
    if file:
        rows = [
            {**case._asdict(), "median_s": middle, "fastest_s": fastest, "predicted_s": t.step}
            for case, (middle, fastest), t in zip(cases, real, every, strict=True)
        ]
        file.write_text(json.dumps({"figures": figures, "runs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
