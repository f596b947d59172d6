# SPDX-License-Identifier: Apache-2.0
"""What needs several GPUs: bandwidth of the collectives, and the program on layouts of all GPUs.

Each is one row, started on one process, which starts a process a GPU by torchrun. --tiny on a CPU:
two processes over gloo.
"""

import subprocess
import sys
from pathlib import Path

import torch

from tests.gpu.row import ROOT, Row, Skip

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
BANDWIDTH = Path(__file__).with_name("bandwidth.py")


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
    from tests.gpu.steps import flags, started  # the program, which `collectives` does without

    words = words.format(n=n, tp=TENSOR.format(n=n))
    started(row, [*flags(row.sizes, 8, 4 if row.tiny else 16), *words.split()], ranks=n)


def collectives(row: Row) -> None:
    """Start a process a GPU, of tests/gpu/bandwidth.py, which writes the lines of this row."""
    n = count(row)
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"]
    words += [str(BANDWIDTH), str(row.path), row.name, row.device.type]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"the processes ended with {done.returncode}")
