# SPDX-License-Identifier: Apache-2.0
"""What needs several GPUs: bandwidth of the collectives, and the program on layouts of all GPUs.

Each is one row, started on one process, which starts a process a GPU by torchrun. --tiny on a CPU:
two processes over gloo.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.gpu.row import ROOT, Absent, Row, Skip

if __name__ == "__main__":  # a rank of `collectives`, before the program is imported
    sys.meta_path.append(Absent())

from tests.gpu.steps import flags, started
from tools.gpu_summary import append, read

# name: the least number of GPUs, and flags; "{n}": all GPUs
LAYOUTS = {
    "dp": (2, "--overlap-grad-reduce"),
    "zero-1": (2, "--zero-stage 1 --overlap-grad-reduce --overlap-param-gather"),
    "zero-3": (2, "--zero-stage 3 --overlap-grad-reduce --overlap-param-gather"),
    "tp-none": (2, "{tp} --tp-comm-overlap none"),
    "tp-ring": (2, "{tp} --tp-comm-overlap ring"),
    "tp-symmetric": (2, "{tp} --tp-comm-overlap symmetric"),
    "cp-p2p": (2, "--context-parallel-size {n}"),
    "cp-all-gather": (2, "--context-parallel-size {n} --cp-comm-type all_gather"),
    "pp-1f1b": (2, "--pipeline-model-parallel-size 2"),
    "pp-zb-v": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v"),
    "tp-pp-dp": (8, "--tensor-model-parallel-size 2 --sequence-parallel "
                 "--pipeline-model-parallel-size 2 --zero-stage 1"),
}  # fmt: skip
TENSOR = "--tensor-model-parallel-size {n} --sequence-parallel"
GPU_ONLY = ("tp-symmetric",)


def count(row: Row) -> int:
    """Return the GPUs that rows use: 2, 4 or 8. Raises Skip where there is one."""
    found = 2 if not row.cuda else torch.cuda.device_count()
    if found < 2:
        raise Skip("one GPU: this row needs two or more")
    return max(n for n in (2, 4, 8) if n <= found)


def layout(row: Row) -> None:
    """Run the program on a layout of all GPUs, with 8 layers and 16 sequences a step."""
    name, n = row.name.removeprefix("several-"), count(row)
    least, words = LAYOUTS[name]
    if n < least:
        raise Skip(f"{n} GPUs: this row needs {least}")
    if not row.cuda and name in GPU_ONLY:
        raise Skip("this way of overlap needs GPUs that reach each other's memory")
    words = words.format(n=n, tp=TENSOR.format(n=n))
    started(row, [*flags(row.sizes, 8, 4 if row.tiny else 16), *words.split()], ranks=n)


def collectives(row: Row) -> None:
    """Start a process a GPU; each collective's bandwidth by size, as NCCL's own tests count it."""
    n = count(row)
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "lines.jsonl"
        words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"]
        words += [str(Path(__file__).resolve()), str(found), row.device.type]
        done = subprocess.run([sys.executable, *words], cwd=ROOT, check=False)
        for line in read(found):
            append(row.path, {**line, "row": row.name})
        if done.returncode:
            raise RuntimeError(f"the processes ended with {done.returncode}")


def measure(path: Path, kind: str) -> None:
    """Be one rank: time each collective of torch.distributed; rank 0 writes.

    Bus bandwidth is bytes x (n - 1) / n over seconds, twice that for all_reduce; bytes are those of
    the whole tensor (NVIDIA nccl-tests, PERFORMANCE.md).
    """
    cuda = kind == "cuda"
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    for size in (1 << 10, 1 << 20, 1 << 26, 1 << 30) if cuda else (1 << 10, 1 << 14):
        whole = torch.randn(size // 2, device=device).bfloat16() if cuda else torch.randn(size // 4)
        part, out = whole[: len(whole) // n], torch.empty_like(whole)
        verbs = {
            "all_reduce": (lambda: dist.all_reduce(out), 2.0),  # noqa: B023
            "all_gather": (lambda: dist.all_gather_into_tensor(out, part), 1.0),  # noqa: B023
            "reduce_scatter": (lambda: dist.reduce_scatter_tensor(out[: len(part)], whole), 1.0),  # noqa: B023
            "all_to_all": (lambda: dist.all_to_all_single(out, whole), 1.0),  # noqa: B023
        }  # fmt: skip
        for verb, (run, times) in verbs.items():
            spent = []
            for _ in range(12 if cuda else 2):
                dist.barrier()
                _synchronize(cuda)
                begin = time.perf_counter()
                run()
                _synchronize(cuda)
                spent.append(time.perf_counter() - begin)
            seconds = statistics.median(spent[len(spent) // 4 :])
            if rank == 0:
                bus = times * size * (n - 1) / n / seconds
                line = {"row": "", "what": f"{verb} of {size:,} bytes over {n}"}
                append(path, {**line, "seconds": seconds, "bus_gb_per_second": bus / 1e9})
    dist.destroy_process_group()


def _synchronize(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()


if __name__ == "__main__":
    measure(Path(sys.argv[1]), sys.argv[2])
