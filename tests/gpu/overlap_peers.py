#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Our overlap of matmuls and transfers beside torch's, at the shapes of tensor parallel 8.

    overlap-peers   a row of gpu-check, which starts a process a GPU of
    torchrun --nproc-per-node=N tests/gpu/overlap_peers.py FILE.jsonl ROW cuda [--tiny]

Forward of each projection of Llama 3 8B and 70B, 8,192 tokens, weights as tensor parallel 8 cuts
them: `none` (NCCL, then cuBLAS), `ring`, `symmetric` (mpu/kernels), what `auto` would take, and
torch.ops.symm_mem.fused_all_gather_matmul and fused_matmul_reduce_scatter, which pipeline cuBLAS
with copies (torch/distributed/_symmetric_memory). Every result is compared with that of `none`.

A time is the device's, of the slowest rank: the host has queued a run before it begins. What `auto`
measures includes the host. On CPUs the ranks use gloo and shared memory, and torch's operations,
which are CUDA's, are skipped.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # as a script, find mpu

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from tests.gpu.row import Absent, Row, sentence  # noqa: E402
from tests.gpu.summary import append  # noqa: E402

WEIGHTS, TOKENS = 8, 8192  # ranks that a weight is cut for; tokens of all ranks
MODELS = {  # hidden, ffn, heads, groups; heads of 128
    "Llama 3 8B": (4096, 14336, 32, 8),
    "Llama 3 70B": (8192, 28672, 64, 8),
}
TINY = {"tiny": (256, 512, 16, 8)}
LIMIT = 1e-2  # of the norm: each sums parts that bf16 rounded, in an order of its own
REPEAT = 20
SLEEP = 4_000_000  # cycles, 2 ms, in which the host queues a run
Run = Callable[[], Tensor]


def peers(row: Row) -> None:
    """Start a process a GPU, which writes the lines of this row."""
    from tests.gpu.several import count

    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count(row)}"]
    words += [__file__, str(row.path), row.name, row.device.type] + ["--tiny"] * row.tiny
    done = subprocess.run([sys.executable, *words], cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"the processes ended with {done.returncode}")


@dataclass(frozen=True)
class Shape:
    """A projection on one rank: gathers x [rows, k] times w [o, k], or scatters x [n rows, k]."""

    name: str
    gathers: bool
    rows: int
    k: int
    o: int


def shapes(tiny: bool, ranks: int) -> list[Shape]:
    """Return the projections; heads of 128, of 16 where tiny."""
    found, head = list[Shape](), 16 if tiny else 128
    rows = (64 * ranks if tiny else TOKENS) // ranks
    for model, (h, f, heads, groups) in (TINY if tiny else MODELS).items():
        for name, gathers, k, o in (
            ("qkv", True, h, (heads + 2 * groups) * head // WEIGHTS),
            ("gate and up", True, h, 2 * f // WEIGHTS),
            ("proj", False, heads * head // WEIGHTS, h),
            ("down", False, f // WEIGHTS, h),
        ):
            found.append(Shape(f"{model}, {name}", gathers, rows, k, o))
    return found


class Ranks:
    """This rank among the others: their axis, methods of overlap, and the clock."""

    def __init__(self, kind: str) -> None:
        from model.load import of_checkpoint
        from mpu.gradients import GradientSink
        from mpu.launch import Launch
        from pretrain_llama import make_grid
        from tests.gpu.row import TINY as SMALL
        from tests.gpu.steps import flags
        from training.flags.parse import parse
        from training.run.device import choose_device
        from training.run.rendezvous import meet
        from training.run.start import connect
        from training.settings.layer_options import context_of

        launch, wait = Launch.from_env(), timedelta(minutes=2)
        words = [*flags(SMALL._replace(heads=8, groups=8), 1), "--device", kind]
        words += ["--tensor-model-parallel-size", str(launch.world), "--sequence-parallel"]
        config = parse(
            [*words, "--tp-comm-overlap", "symmetric"], launch.world, None, of_checkpoint
        )
        self.grid = make_grid(config, launch)
        self.device = choose_device(config, launch, True, print)
        connect(config, self.grid, self.device, meet(wait, launch), wait, print)
        self.axis = self.grid.tp
        self.ctx = context_of(config, self.grid, self.device, GradientSink())
        self.why_not = "" if self.axis.symmetric else self.axis.required_transport.why_not
        self.methods = ["none", "ring"] + ["symmetric"] * (not self.why_not)

    def ways(self, shape: Shape, x: Tensor, w: Tensor) -> dict[str, Run]:
        """Return what computes the projection in each way of ours."""
        from mpu.overlap.choices import method_called

        found: dict[str, Run] = {}
        for name in self.methods:
            method = method_called(name, self.axis)

            def run(method: Any = method) -> Tensor:
                if not shape.gathers:
                    y, handle = method.matmul_reduce_scatter(x, w, F.linear, None)
                    handle.wait()
                    return y
                gathering = method.start_all_gather(x, None)
                y = gathering.multiply(w, F.linear)
                gathering.close()
                return y

            found[name] = run
        return found

    def seconds(self, runs: dict[str, Run], tiny: bool) -> dict[str, float]:
        """Return the median seconds of each, run in turns; of the slowest rank."""
        from mpu.comm.collectives import barrier, gather_bytes

        cuda = self.device.type == "cuda"
        spent: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(2 if tiny else REPEAT + 3):
            for name in list(runs)[:: -1 if turn % 2 else 1]:
                barrier(self.axis, self.device)
                if cuda:
                    torch.cuda.synchronize(self.device)
                    torch.cuda._sleep(SLEEP)
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    runs[name]()
                    end.record()
                    torch.cuda.synchronize(self.device)
                    spent[name].append(begin.elapsed_time(end) / 1e3)
                else:
                    at = time.perf_counter()
                    runs[name]()
                    spent[name].append(time.perf_counter() - at)
        own = {name: statistics.median(found[1 if tiny else 3 :]) for name, found in spent.items()}
        every = gather_bytes(json.dumps(own).encode(), self.axis, self.device)
        return {name: max(json.loads(each)[name] for each in every) for name in own}


def of_torch(shape: Shape, x: Tensor, w: Tensor, group: str) -> Tensor:
    """Return the projection by torch's fused operation, over the group of this name."""
    operations: Any = torch.ops.symm_mem
    if shape.gathers:
        return operations.fused_all_gather_matmul(x, [w.t()], 0, group, return_A=False)[1][0]
    return operations.fused_matmul_reduce_scatter(x, w.t(), "sum", 0, group)


def main(path: Path, row: str, kind: str, tiny: bool) -> int:
    """Be one rank. Return 1 where a result is another than that of `none`."""
    from training.run.autotune.measure import Projection, choose, tune

    ranks, failed = Ranks(kind), False
    torch.manual_seed(1 + ranks.axis.rank)
    first, n = ranks.axis.rank == 0, ranks.axis.size

    def say(what: str, **numbers: Any) -> None:
        if first:
            append(path, {"row": row, "what": what, **numbers})

    every = shapes(tiny, n)
    say("ranks", count=n, methods=ranks.methods, without_symmetric=ranks.why_not)
    projections = [Projection(s.gathers, s.rows, s.k, s.o, torch.bfloat16) for s in every]
    times = tune(projections, ranks.methods, ranks.ctx)
    chosen = choose(times)
    for shape, projection in zip(every, projections, strict=True):
        size = shape.rows if shape.gathers else shape.rows * n
        x = torch.randn(size, shape.k, device=ranks.device).bfloat16()
        w = torch.randn(shape.o, shape.k, device=ranks.device).bfloat16()
        runs = ranks.ways(shape, x, w)
        why, error = fused(ranks, shape, x, w, runs)
        if error:  # on one rank at least: no rank measures it
            say(f"{shape.name}: torch", **{why: error})
            failed |= why == "failed"
        want = runs["none"]().double()
        for name in [name for name in runs if name != "none"]:
            apart = worst(ranks, ((runs[name]().double() - want).norm() / want.norm()).item())
            ok = apart <= LIMIT
            failed |= not ok
            say(f"{shape.name}: {name} less none", error=apart, limit=LIMIT, ok=ok)
        whole = x if not shape.gathers else x.repeat(n, 1)
        seconds = ranks.seconds({**runs, "matmul alone": lambda w=w, x=whole: F.linear(x, w)}, tiny)
        flops, key = 2.0 * shape.rows * n * shape.k * shape.o, projection.forward
        say(
            shape.name, mnk=[shape.rows * n, shape.o, shape.k], of_each=seconds,
            tflops={name: flops / each / 1e12 for name, each in seconds.items()},
            auto=chosen[key], auto_measured=times[key], ranks=n,
            in_short=f"{shape.name}, us: "
            + ", ".join(f"{name} {each * 1e6:.0f}" for name, each in seconds.items()),
        )  # fmt: skip
    return int(failed)


def worst(ranks: Ranks, error: float) -> float:
    """Return the largest error of any rank; a NaN is infinite."""
    from mpu.comm.collectives import gather_bytes

    own = error if error == error else float("inf")
    every = gather_bytes(repr(own).encode(), ranks.axis, ranks.device)
    return max(float(each) for each in every)


def fused(
    ranks: Ranks, shape: Shape, x: Tensor, w: Tensor, runs: dict[str, Run]
) -> tuple[str, str]:
    """Add torch's operation to the runs; else return ("skipped" or "failed", why) on all ranks."""
    from mpu.comm.collectives import gather_bytes, group_of

    mine = ["", ""]
    if ranks.device.type != "cuda":
        mine = ["skipped", "torch's fused operations need CUDA"]
    elif ranks.why_not:
        mine = ["skipped", f"the GPUs share no memory: {ranks.why_not}"]
    else:
        try:
            group = group_of(ranks.axis).group_name
            of_torch(shape, x, w, group)
            runs["torch"] = lambda: of_torch(shape, x, w, group)
        except (AttributeError, NotImplementedError) as error:
            mine = ["skipped", f"not in torch {torch.__version__}: {sentence(error)}"]
        except RuntimeError as error:
            mine = ["failed", sentence(error)]
    every = map(json.loads, gather_bytes(json.dumps(mine).encode(), ranks.axis, ranks.device))
    kind, why = next(((kind, why) for kind, why in every if why), ("", ""))
    if why:
        runs.pop("torch", None)
    return kind, why


if __name__ == "__main__":
    sys.meta_path.append(Absent())
    code = main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], "--tiny" in sys.argv)
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(code)  # without the clean-up, in which a rank may wait for others
