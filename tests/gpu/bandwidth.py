# SPDX-License-Identifier: Apache-2.0
"""One rank of gpu-check's row `collectives`: each collective's bandwidth by size.

    torchrun --nproc-per-node=N tests/gpu/bandwidth.py FILE.jsonl ROW cuda

It imports torch and nothing of the program. Rank 0 writes each number to FILE as it is made. A rank
ends where all ranks have passed the last collective: its process is left at once, without the
clean-up of process groups and of the interpreter, in which a rank may wait for others.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.summary import append

SIZES = {"cuda": (1 << 10, 1 << 20, 1 << 26, 1 << 30), "cpu": (1 << 10, 1 << 14)}  # bytes


def main(path: Path, row: str, kind: str) -> None:
    """Be one rank. kind: cuda, over NCCL, or cpu, over gloo."""
    cuda = kind == "cuda"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if cuda else None)
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    for size in SIZES[kind]:
        measure(path, row, size, device)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def measure(path: Path, row: str, size: int, device: torch.device) -> None:
    """Time the collectives of tensors of `size` bytes.

    Bus bandwidth is bytes x (n - 1) / n over seconds, twice that for all_reduce; bytes are those of
    the whole tensor (NVIDIA nccl-tests, PERFORMANCE.md).
    """
    cuda, rank, n = device.type == "cuda", dist.get_rank(), dist.get_world_size()
    whole = torch.randn(size // 2, device=device).bfloat16() if cuda else torch.randn(size // 4)
    part, out = whole[: len(whole) // n], torch.empty_like(whole)
    verbs: dict[str, tuple[Callable[[], object], float]] = {
        "all_reduce": (lambda: dist.all_reduce(out), 2.0),
        "all_gather": (lambda: dist.all_gather_into_tensor(out, part), 1.0),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(out[: len(part)], whole), 1.0),
        "all_to_all": (lambda: dist.all_to_all_single(out, whole), 1.0),
    }

    def synchronize() -> None:
        if cuda:
            torch.cuda.synchronize(device)

    for verb, (run, times) in verbs.items():
        spent = []
        for _ in range(12 if cuda else 2):
            dist.barrier()
            synchronize()
            begin = time.perf_counter()
            run()
            synchronize()
            spent.append(time.perf_counter() - begin)
        seconds = statistics.median(spent[len(spent) // 4 :])
        if rank == 0:
            bus = times * size * (n - 1) / n / seconds
            line = {"row": row, "what": f"{verb} of {size:,} bytes over {n}"}
            append(path, {**line, "seconds": seconds, "bus_gb_per_second": bus / 1e9})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
