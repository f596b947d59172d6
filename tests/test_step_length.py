# SPDX-License-Identifier: Apache-2.0
"""Measure how much a reader opens to follow one training step; docs/parallelism.md lists it.

Four ranks (tensor 2 with sequence parallelism, data 2, ZeRO stage 1) train one step after a warm-up
step. A profile hook of the interpreter names every file of the product in which a function ran. The
page lists a step whose collectives go through process groups (--no-shared-memory);
`pytest tests/test_step_length.py -rP` prints that list, and what shared memory adds to it.
"""

import re
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
import torch

from pretrain_llama import build, train_step
from training.data.batch import DocumentRules, make_batch
from training.faults.monitor import FailureMonitor
from training.flags.parse import parse

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = re.compile(r"(mpu|model|estimate|training)/.*\.py|pretrain_llama\.py")
FLAGS = """
    --tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1 --overlap-grad-reduce
    --overlap-param-gather --num-layers 2 --hidden-size 32 --ffn-hidden-size 80
    --group-query-attention --num-attention-heads 4 --num-query-groups 2 --seq-length 16
    --vocab-size 96 --micro-batch-size 1 --global-batch-size 4 --bf16 --mock-data
    --untie-embeddings-and-output-weights --train-iters 2 --lr 1e-3 --device cpu
"""


def run_step(comm: Any, memory: bool) -> dict[str, list[str]]:
    """Train two steps on a rank; return the product's files that the second ran, with functions.

    memory: the ranks share memory; else everything travels through the process groups.
    """
    grid = comm.grid(2, memory=memory)
    config = parse(FLAGS.split(), comm.size)
    ran, recording = set[CodeType](), threading.Event()

    def hook(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and recording.is_set():
            ran.add(frame.f_code)

    # before the build: threads that it starts are heard too
    threading.setprofile(hook)
    sys.setprofile(hook)
    try:
        run = build(config, grid, torch.device("cpu"), FailureMonitor())
        count, length = config.batch.micro_batch_size, config.model.seq_length + 1
        rows = np.random.default_rng(grid.dp.rank).integers(0, 96, (2, count, length))
        batches = [make_batch(each, DocumentRules(), i * count) for i, each in enumerate(rows)]
        train_step(run, batches, 1e-3)  # makes buffers, and imports what is imported late
        run.iteration += 1
        recording.set()
        train_step(run, batches, 1e-3)
    finally:
        recording.clear()
        sys.setprofile(None)
        threading.setprofile(None)
    files: dict[str, list[str]] = {}
    for code in ran:
        path = Path(code.co_filename)
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
        if PRODUCT.fullmatch(name):
            files.setdefault(name, []).append(code.co_qualname)
    return files


def ran_in_a_step(world: Any, memory: bool) -> dict[str, list[str]]:
    """Return {file: functions}, of all ranks together."""
    files: dict[str, list[str]] = {}
    for each in world(4).run(run_step, memory):
        for name, functions in each.items():
            files[name] = sorted({*files.get(name, ()), *functions})
    return files


def length(name: str) -> int:
    return len((ROOT / name).read_text().splitlines())


def table(files: dict[str, list[str]]) -> str:
    """Print files with their lines and functions, the longest first."""
    rows = [
        f"{length(name):6,}  {name}: {', '.join(functions)}"
        for name, functions in sorted(files.items(), key=lambda item: -length(item[0]))
    ]
    return "\n".join([*rows, f"{sum(map(length, files)):6,}  lines in {len(files)} files"])


PAGE = "docs/parallelism.md"


def listed(page: str) -> list[str]:
    """Return the files of the page's table; a bare name lies in the folder of the one before."""
    header = "| file | what you see there |"
    assert page.count(header) == 1, f"{PAGE} has not one table {header}"
    files, folder = [], ""
    for line in page[page.index(header) :].splitlines()[2:]:
        if not line.startswith("|"):
            break
        for name in re.findall(r"`([\w./]+\.py)`", line.split("|")[1]):
            files.append(name if "/" in name or name == "pretrain_llama.py" else folder + name)
            folder = files[-1].rpartition("/")[0] + "/"
    return files


@pytest.fixture(scope="module")
def files(world: Any) -> dict[str, list[str]]:
    """What a step runs through process groups; prints it, and what shared memory adds."""
    files, shared = (ran_in_a_step(world, memory) for memory in (False, True))
    print(f"one step:\n{table(files)}")
    more = {name: functions for name, functions in shared.items() if name not in files}
    print(f"with shared memory also:\n{table(more)}")
    return files


def test_the_profile_saw_a_step_from_end_to_end(files):
    assert "train_step" in files["pretrain_llama.py"]
    assert any(".backward" in function for functions in files.values() for function in functions)


def test_the_page_lists_the_files_of_a_step(files):
    names = listed((ROOT / PAGE).read_text())
    missing, extra = sorted(files.keys() - set(names)), sorted(set(names) - files.keys())
    assert not missing and not extra, f"{PAGE} lacks {missing}; a step runs none of {extra}"
    assert len(names) == len(set(names)), f"{PAGE} lists a file twice"


def test_the_pages_table_is_read():
    text = "x\n| file | what you see there |\n|---|---|\n| `pretrain_llama.py` | `no.py` |\n"
    text += "| `mpu/a/b.py`, `c.py` | |\n| `model/d.py` | |\n\n| `late.py` | |\n"
    assert listed(text) == ["pretrain_llama.py", "mpu/a/b.py", "mpu/a/c.py", "model/d.py"]
