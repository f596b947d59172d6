# SPDX-License-Identifier: Apache-2.0
"""Measure how much a reader opens to follow one training step; docs/parallelism.md lists it.

Four ranks (tensor 2 with sequence parallelism, data 2, ZeRO stage 1) train one step after a warm-up
step. A profile hook of the interpreter names every file of the product in which a function ran. The
page lists a step whose collectives go through process groups (--no-shared-memory);
`pytest -m "prove or not prove" tests/test_step_length.py -rP` prints that list, what shared memory
adds to it, and what a steady iteration of the loop and a save run at default flags. It fails where
their files or calls grow, and where a linear's all-gather is further from torch.distributed.
"""

import json
import os
import re
import subprocess
import sys
import threading
from operator import gt
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import distributed_c10d

from mpu.layers.linear import ColumnParallelLinear
from pretrain_llama import build, train_step
from training.data.batch import DocumentRules, make_batch
from training.faults.monitor import FailureMonitor
from training.flags.parse import parse

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = re.compile(r"(mpu|model|training)/.*\.py|pretrain_llama\.py")
FLAGS = """
    --tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1 --overlap-grad-reduce
    --overlap-param-gather --num-layers 2 --hidden-size 32 --ffn-hidden-size 80
    --group-query-attention --num-attention-heads 4 --num-query-groups 2 --seq-length 16
    --vocab-size 96 --micro-batch-size 1 --global-batch-size 4 --bf16 --mock-data
    --untie-embeddings-and-output-weights --train-iters 2 --lr 1e-3 --device cpu
"""


LINEAR = ColumnParallelLinear.forward.__code__


def route_from(code: CodeType, frame: FrameType | None) -> tuple[str, ...]:
    """Return the product's functions on the stack from `code` down to a frame; () without it."""
    route: list[str] = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and PRODUCT.fullmatch(path.relative_to(ROOT).as_posix()):
            route.insert(0, frame.f_code.co_qualname)
        if frame.f_code is code:
            return tuple(route)
        frame = frame.f_back
    return ()


def run_step(comm: Any, memory: bool) -> tuple[dict[str, list[str]], set[tuple[str, ...]]]:
    """Train two steps on a rank; return the product's files that the second ran, with functions,
    and the routes from a column-parallel linear's forward to torch.distributed.

    memory: the ranks share memory; else everything travels through the process groups.
    """
    grid = comm.grid(2, memory=memory)
    config = parse(FLAGS.split(), comm.size)
    ran, recording = set[CodeType](), threading.Event()
    routes = set[tuple[str, ...]]()

    def hook(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and recording.is_set():
            ran.add(frame.f_code)
            if frame.f_code.co_filename == distributed_c10d.__file__:
                routes.add(route_from(LINEAR, frame))

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
    return files, routes - {()}


def ran_in_a_step(world: Any, memory: bool) -> tuple[dict[str, list[str]], set[tuple[str, ...]]]:
    """Return {file: functions} and the routes, of all ranks together."""
    files: dict[str, list[str]] = {}
    every = set[tuple[str, ...]]()
    for own, routes in world(4).run(run_step, memory):
        every |= routes
        for name, functions in own.items():
            files[name] = sorted({*files.get(name, ()), *functions})
    return files, every


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
def step(world: Any) -> tuple[dict[str, list[str]], set[tuple[str, ...]]]:
    """What a step runs through process groups; prints it, and what shared memory adds."""
    (files, routes), (shared, _) = (ran_in_a_step(world, memory) for memory in (False, True))
    print(f"one step:\n{table(files)}")
    more = {name: functions for name, functions in shared.items() if name not in files}
    print(f"with shared memory also:\n{table(more)}")
    return files, routes


@pytest.fixture
def files(step: Any) -> dict[str, list[str]]:
    return step[0]


def test_the_all_gather_of_a_linear_is_found_in_four_functions(step):
    (route,) = step[1]
    assert route[:2] == ("ColumnParallelLinear.forward", "AllGatherMatmul.forward")
    assert len(route) <= 4, f"{' -> '.join(route)} -> torch.distributed"


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


# What the busiest rank's main thread runs, at most: (files, calls). An iteration counts what stands
# around train_step too. Whoever raises one of these numbers writes next to it what for.
# The 42nd file of an iteration says whether the next step is of another stage. A save runs load.py
# and evaluated.py, as it checks its state as a load would.
AT_MOST = {"iterations": (42, 3080), "train_step": (26, 2860), "save": (30, 4180)}
STEPS = {"iterations": 2, "train_step": 2, "save": 1}  # that profiled_loop.py counts


@pytest.mark.prove
def test_an_iteration_a_step_and_a_save_do_not_grow(tmp_path):
    """Print the files of each, in a run of four ranks at default flags, and compare with AT_MOST.

    The collectives go through process groups, as waits in shared memory call a varying number.
    """
    flags = FLAGS.replace("--train-iters 2", "--train-iters 7 --no-shared-memory").split()
    flags += ["--save", str(tmp_path / "saved")]
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    words += [str(ROOT / "tests/profiled_loop.py"), str(tmp_path), *flags]
    subprocess.run(words, check=True, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"})
    ranks = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(4)]
    found = {}
    for part, steps in STEPS.items():
        files: dict[str, list[str]] = {}
        calls = 0
        for rank in ranks:
            own = {name: each for name, each in rank[part].items() if PRODUCT.fullmatch(name)}
            for name, functions in own.items():
                files[name] = sorted({*files.get(name, ()), *functions})
            calls = max(calls, sum(sum(each.values()) for each in own.values()) // steps)
        found[part] = len(files), calls
        print(f"{part}: {len(files)} files, {calls:,} calls each\n{table(files)}")
    for rank in ranks:  # the flags of `Agreement`, and nothing else
        outside = starts(rank, "iterations") - starts(rank, "train_step")
        assert outside == STEPS["iterations"], "one agreement between ranks a step"
    grown = {part: both for part, both in found.items() if any(map(gt, both, AT_MOST[part]))}
    assert not grown, f"(files, calls) of {grown} are above those of AT_MOST"


def starts(rank: Any, part: str) -> int:
    """Return how many collectives and messages a rank started in a part."""
    started: int = rank[part]["mpu/comm/transport.py"]["Axis.start"]
    return started
