#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare collectives through shared memory with those through gloo.

    python benchmarks/bench_shared_memory.py [--ranks 2] [--sizes 64 1024 4096 16384 65536]

The ranks are on one host, with one thread each. Results are written to existing tensors.

    gloo      the process group's own verb (all_gather_into_tensor, reduce_scatter_tensor,
              all_reduce)
    ordered   Weft's verb through gloo: the same gather; sums by an all-to-all and additions in rank
              order
    memory    Weft's verb through shared memory (mpu/comm/shared_memory.py): the same bits as
              `ordered`

`all_gather in place` is what the overlap method `symmetric` does in front of a matmul: the gathered
tensor is not copied but read where the ranks wrote it.

The three alternate, call by call. A call's time is that of its slowest rank, after a barrier; a
figure is the median over the calls of all launches, in milliseconds. A size is that of the full
tensor, gathered or to be summed. The last lines have the time of a barrier of --barrier-ranks
ranks, in microseconds.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.bench_step import command, output  # noqa: E402
from mpu.comm import collectives  # noqa: E402
from mpu.comm.symmetric import SymmetricBuffer  # noqa: E402
from mpu.comm.transport import Axis  # noqa: E402
from mpu.connect import share  # noqa: E402
from mpu.grid import Grid, Launch  # noqa: E402
from mpu.overlap.method import Symmetric  # noqa: E402
from training.run.process import as_process  # noqa: E402
from training.run.rendezvous import meet  # noqa: E402

IN_PLACE = "all_gather in place"
VERBS = (IN_PLACE, "all_gather", "reduce_scatter", "all_reduce")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIDES = ("gloo", "ordered", "memory")
WAIT = timedelta(minutes=5)
WARM = 2  # calls before the timed ones
Found = dict[str, list[float]]  # "verb dtype KiB side": seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", type=int, metavar="KIB",
                        default=[64, 1024, 4096, 16384, 65536])  # fmt: skip
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--calls", type=int, default=0, help="timed (0: 400 MiB worth, 10 to 200)")
    parser.add_argument("--barrier-ranks", type=int, default=8)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # of a rank
    args = parser.parse_args()
    if args.result:
        return as_process(lambda: be_rank(args), None, "bench_shared_memory")
    found: Found = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.launches):
            for ranks in dict.fromkeys([args.ranks, args.barrier_ranks]):
                file = Path(folder) / "seconds.json"
                words = [*command(ranks), *sys.argv, "--result", str(file)]
                output(words, ranks)
                for key, seconds in json.loads(file.read_text()).items():
                    found.setdefault(key, []).extend(seconds)
    print(f"torch {torch.__version__}, {args.ranks} ranks of one host; ms, medians over "
          f"{args.launches} launches\n")  # fmt: skip
    print("\n".join(table(found, args.sizes)))
    for side in ("memory", "gloo"):
        median = statistics.median(found[f"barrier {args.barrier_ranks} {side}"])
        print(f"barrier of {args.barrier_ranks} ranks, {side}: {1e6 * median:.0f} microseconds")


def table(found: Found, sizes: list[int]) -> list[str]:
    """Return the lines of the table."""
    lines = [
        f"| verb, dtype | full tensor | {' | '.join(SIDES)} | gloo / memory | ordered / memory |"
    ]
    lines += ["|---" * 7 + "|"]
    for verb in VERBS:
        for dtype in DTYPES:
            for kib in sizes:
                sides = [statistics.median(found[f"{verb} {dtype} {kib} {side}"]) for side in SIDES]
                times = " | ".join(f"{1e3 * seconds:.3f}" for seconds in sides)
                size = f"{kib} KiB" if kib < 1024 else f"{kib // 1024} MiB"
                ratios = f"**{sides[0] / sides[2]:.1f}** | {sides[1] / sides[2]:.1f}"
                lines.append(f"| {verb}, {dtype} | {size} | {times} | {ratios} |")
    return lines


def calls(verb: str, axis: Axis, kib: int, dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    """Return {side: call} for a verb on a full tensor of `kib` KiB; a call returns the result."""
    rows = kib * 1024 // dtype.itemsize
    part = rows // axis.size
    full = torch.randn(part * axis.size, generator=torch.Generator().manual_seed(axis.rank))
    full = full.to(dtype)
    outside, group = collectives.by_process_group(axis), collectives.group_of(axis)
    if verb in ("all_gather", IN_PLACE):
        x, out = full[:part], torch.empty_like(full)

        def in_place() -> Tensor:
            gathering = Symmetric(axis).start_all_gather(x, None)
            whole = gathering.gathered()
            gathering.close()  # a real reader would close it after its matmul
            return whole

        return {
            "gloo": lambda: (collectives._all_gather(out, x, group=group), out)[1],
            "ordered": lambda: collectives.all_gather(x, outside, into=out)[0],
            "memory": (
                in_place
                if verb == IN_PLACE
                else lambda: collectives.all_gather(x, axis, into=out)[0]
            ),
        }
    if verb == "reduce_scatter":
        out = torch.empty_like(full[:part])
        return {
            "gloo": lambda: (collectives._reduce_scatter(out, full, group=group), out)[1],
            "ordered": lambda: collectives.reduce_scatter(full, outside, into=out)[0],
            "memory": lambda: collectives.reduce_scatter(full, axis, into=out)[0],
        }
    return {  # in place: values grow to infinity, which does not change the speed
        "gloo": lambda: (dist.all_reduce(full, group=group), full)[1],
        "ordered": lambda: collectives.all_reduce_in_order(full, outside),
        "memory": lambda: collectives.all_reduce(full, axis)[0],
    }


def measure(axis: Axis, sides: dict[str, Callable[[], Tensor]], times: int) -> Found:
    """Call the sides in turn; return the seconds of each call on the slowest rank, by side."""
    buffer = SymmetricBuffer(collectives.by_process_group(axis), 64, WAIT)
    seconds: Found = {side: [] for side in sides}
    for _ in range(WARM + times):
        for side, call in sides.items():
            buffer.barrier()
            begin = time.perf_counter()
            call()
            seconds[side].append(time.perf_counter() - begin)
    mine = torch.tensor([seconds[side][WARM:] for side in sides], dtype=torch.float64)
    every, _ = collectives.all_gather(mine[None], axis)
    return dict(zip(sides, every.amax(0).tolist(), strict=True))


def be_rank(args: argparse.Namespace) -> int:
    """Run one rank of a launch: time the verbs or the barrier, by the number of ranks. Return the
    exit code.
    """
    torch.set_num_threads(1)
    launch, found = Launch.from_env(), {}
    grid = Grid(launch.world, launch.world, launch=launch)
    store = meet(WAIT, launch)
    [line] = share(grid.connect(torch.device("cpu"), store, WAIT), WAIT)[:1]
    axis = grid.tp
    if not axis.symmetric:
        sys.exit(line)
    if launch.world == args.ranks:
        for verb in VERBS:
            for dtype, torch_dtype in DTYPES.items():
                for kib in args.sizes:
                    times = args.calls or min(200, max(10, 400 * 1024 // kib))
                    sides = calls(verb, axis, kib, torch_dtype)
                    for side, seconds in measure(axis, sides, times).items():
                        found[f"{verb} {dtype} {kib} {side}"] = seconds
    if launch.world == args.barrier_ranks:
        buffer = SymmetricBuffer(collectives.by_process_group(axis), 64, WAIT)
        token = torch.zeros(1)
        barriers = {"memory": buffer.barrier, "gloo": lambda: dist.all_reduce(token)}
        times = args.calls or 1000
        for side, seconds in measure(axis, barriers, times).items():
            found[f"barrier {launch.world} {side}"] = seconds
    if grid.rank == 0:
        args.result.write_text(json.dumps(found))
    grid.close()
    return 0


if __name__ == "__main__":
    main()
