# SPDX-License-Identifier: Apache-2.0
"""Which cases the overlap kernels run on a GPU, and their kernels compiled beforehand.

    python tests/gpu/overlap_cases.py                compile all of them, in a process a core
    python tests/gpu/overlap_cases.py --sample 20    every twentieth
    python tests/gpu/overlap_cases.py --run          run all cases on a GPU, without pytest

A kernel is compiled anew for each combination of dtypes, tile sizes and divisible sizes, each time
for seconds. It needs no GPU: Triton keeps what it compiles on disk, and the GPU's run finds it.
"""

import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # as a script, find tests and tools

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

from tests.mpu.kernels import cases as cases_module  # noqa: E402
from tests.mpu.kernels.cases import Turns, check, run_cases, sample  # noqa: E402

SIZES, LARGEST = (2, 4, 8), (60, 700)


def ragged(size: int, largest: int) -> list[dict]:
    """Return ragged shapes, with small tiles and few programs: tiles, chunks and waits are many."""
    return sample(104, size, seed=size, largest=largest, delay=0.005, block=64)


def of_training(size: int) -> list[dict]:
    """Return a projection of a layer, with the tiles, the chunks and the TMA of real use."""
    cases = sample(8, size, seed=1)
    cases = [c | dict(dtype=torch.bfloat16, shape=(512, 768, 1024), integer=True) for c in cases]
    return [case | dict(chunk_rows=128, block=None) for case in cases]


def every(size: int) -> list[dict]:
    """Return all cases of a world of `size` ranks."""
    cases = [case for largest in LARGEST for case in ragged(size, largest)]
    return cases + of_training(size)


def workspace_on_gpu(rank: int, size: int):
    """Return a rank's memory on the one GPU, in a process whose gloo group has `size` ranks."""
    from mpu.comm.symmetric_cuda import CudaWorkspace
    from mpu.grid import Grid
    from mpu.launch import Launch

    device, timeout = torch.device("cuda", 0), timedelta(seconds=60)
    torch.cuda.set_device(device)
    grid = Grid(size, size, 1, 1, Launch(rank, size, 0, size), "gloo")
    return CudaWorkspace(grid.add_groups(device, timeout).tp, device, timeout)


def play(rank: int, size: int, store: str) -> None:
    """Be one rank of a world and run all its cases. Raises AssertionError."""
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    check([run_cases(Turns(workspace_on_gpu(rank, size)), every(size))])
    dist.barrier()
    dist.destroy_process_group()


def run_all() -> None:
    """Run all cases of every world, a process a rank. Raises ProcessRaisedException."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(play, (size, f"{folder}/store"), nprocs=size)
        print(f"kernels: {len(every(size))} cases passed between {size} processes", flush=True)


@contextmanager
def without_results():
    """Let cases draw nothing and compute nothing of what they compare with."""

    def shape_only(x):
        return torch.empty(x.shape, device="meta")

    def draw(space, case, seed, *shape):
        return torch.ones(shape, dtype=case["dtype"])

    with (
        mock.patch.object(torch.Tensor, "double", shape_only),
        mock.patch.object(cases_module, "draw", draw),
        mock.patch.object(cases_module, "difference", lambda *about: 0.0),
    ):
        yield


def compile_share(worker: int, workers: int, sizes=SIZES, really: bool = True) -> tuple[int, int]:
    """Compile one process's share; return (kernels of all cases, those of this share)."""
    from tests.gpu.alone import as_rank, compiling

    with without_results(), compiling(worker, workers, really=really) as seen:
        for size in sizes:
            for rank in {0, 1, size - 1}:  # some kernels are compiled for rank 0 and 1 apart
                with as_rank(rank, size, torch.device("cpu")) as workspace:
                    space = Turns(workspace)
                    for case in every(size):
                        try:
                            run_cases(space, [case | dict(delay=0.0)])
                        except AssertionError:  # nothing was computed, so the results are wrong
                            workspace._open.clear()
    return len(seen.keys), seen.mine


def main(argv: list[str]) -> int:
    """Compile in a process a core; print how long it took. Return 1 if one fails."""
    every_nth = int(argv[argv.index("--sample") + 1]) if "--sample" in argv else 1
    began, running, workers = time.monotonic(), [], len(os.sched_getaffinity(0))
    for worker in range(workers):
        words = [sys.executable, __file__, "--share", str(worker), str(workers * every_nth)]
        running.append(subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True))
    shares = [process.communicate()[0].split() for process in running]
    if any(process.returncode for process in running):
        print("kernels: a process that compiles them failed", flush=True)
        return 1
    compiled, seconds = sum(int(share[1]) for share in shares), time.monotonic() - began
    count = f"{compiled} of {shares[0][0]}"
    print(
        f"kernels: {count} compiled, or found compiled, by {workers} processes in {seconds:.0f} s"
    )
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--run"]:
        run_all()
    elif sys.argv[1:2] == ["--share"]:
        torch.set_num_threads(1)
        print(*compile_share(int(sys.argv[2]), int(sys.argv[3])))
    else:
        sys.exit(main(sys.argv[1:]))
