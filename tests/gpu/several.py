# SPDX-License-Identifier: Apache-2.0
"""What needs several GPUs: bandwidth of the collectives, and the program on layouts of all GPUs.

Each is one row, started on one process, which starts a process a GPU by torchrun. --tiny on a CPU:
two processes over gloo.
"""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from tests.gpu.row import ROOT, Row, Skip


class Layout(NamedTuple):
    """The least number of GPUs, flags ("{n}": all GPUs), and the model of steps.MODELS or Llama."""

    least: int
    flags: str
    model: str = ""
    layers: int = 8


TENSOR = "--tensor-model-parallel-size {n} --sequence-parallel"
ZERO = "--zero-stage {level} --overlap-grad-reduce --overlap-param-gather"
FP8 = "--fp8-format hybrid --fp8-recipe tensorwise"
EXPERTS = "--expert-model-parallel-size {n} --moe-token-dispatcher-type alltoall"
LAYOUTS = {
    "dp": Layout(2, "--overlap-grad-reduce"),
    **{f"zero-{level}": Layout(2, ZERO.replace("{level}", level)) for level in "123"},
    "tp-none": Layout(2, f"{TENSOR} --tp-comm-overlap none"),
    "tp-ring": Layout(2, f"{TENSOR} --tp-comm-overlap ring"),
    "tp-symmetric": Layout(2, f"{TENSOR} --tp-comm-overlap symmetric"),
    "cp-p2p": Layout(2, "--context-parallel-size {n}"),
    "cp-a2a": Layout(2, "--context-parallel-size {n} --cp-comm-type a2a"),
    "cp-all-gather": Layout(2, "--context-parallel-size {n} --cp-comm-type all_gather"),
    "pp-1f1b": Layout(2, "--pipeline-model-parallel-size 2"),
    "pp-zb-v": Layout(2, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v"),
    "pp-interleaved": Layout(
        2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    ),
    "tp-pp-dp": Layout(8, "--tensor-model-parallel-size 2 --sequence-parallel "
                       "--pipeline-model-parallel-size 2 --zero-stage 1"),
    "fp8-tp": Layout(2, f"{TENSOR} --tp-comm-overlap none {FP8}"),
    "fp8-zero-3": Layout(2, f"{ZERO.replace('{level}', '3')} {FP8}"),
    "muon": Layout(2, "--overlap-grad-reduce --optimizer muon"),
    "ep": Layout(2, EXPERTS, "qwen3-30b-a3b", 4),
    "ep-overlap": Layout(2, f"{EXPERTS} --overlap-moe-expert-parallel-comm", "qwen3-30b-a3b", 4),
}  # fmt: skip
GPU_ONLY = ("tp-symmetric",)
BANDWIDTH = Path(__file__).with_name("bandwidth.py")


def count(row: Row) -> int:
    """Return the GPUs that rows use: 2, 4 or 8. Raises Skip where there is one."""
    found = 2 if not row.cuda else torch.cuda.device_count()
    if found < 2:
        raise Skip("one GPU: this row needs two or more")
    return max(n for n in (2, 4, 8) if n <= found)


def words_of(row: Row, name: str, n: int) -> list[str]:
    """Return the flags of a layout on n GPUs, with 16 sequences a step."""
    from tests.gpu.steps import (
        MODELS,
        flags,
        words_here,
    )  # of the program, which `collectives` does without

    _, words, model, layers = LAYOUTS[name]
    batches = 4 if row.tiny else 16
    of = MODELS[model].words(row, layers, batches) if model else flags(row.sizes, layers, batches)
    return [*of, *words_here(row, words.format(n=n))]


def layout(row: Row) -> None:
    """Run the program on a layout of all GPUs."""
    name, n = row.name.removeprefix("several-"), count(row)
    if n < LAYOUTS[name].least:
        raise Skip(f"{n} GPUs: this row needs {LAYOUTS[name].least}")
    if not row.cuda and name in GPU_ONLY:
        raise Skip("this way of overlap needs GPUs that reach each other's memory")
    from tests.gpu.steps import started

    started(row, words_of(row, name, n), ranks=n)


def collectives(row: Row) -> None:
    """Start a process a GPU, of tests/gpu/bandwidth.py, which writes the lines of this row."""
    n = count(row)
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"]
    words += [str(BANDWIDTH), str(row.path), row.name, row.device.type]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"the processes ended with {done.returncode}")
