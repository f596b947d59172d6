#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure the growth of a run's memory per step, and the memory that libraries retain per call.

    python benchmarks/bench_memory.py                        2,000 steps on four ranks, tp 2 x dp 2
    python benchmarks/bench_memory.py experts --tree ../older      the same, of another checkout
    python benchmarks/bench_memory.py libraries              memory retained by torch and Python

experts, dense   tiny models, with experts (ep 2, all-to-all) and without. Every 25 steps a rank
                 reads its own numbers. A row has bytes per step after the first quarter, by least
                 squares: the mean of the ranks, and the rank that grows most
    resident     memory of the process (/proc/self/statm)
    heap         bytes in use that C and C++ allocated (mallinfo2), libraries' caches included
    free tuples  kept by Python for reuse, at most 2,000 of each length up to 20; part of the
                 resident bytes, counted as bytes of tuples
    objects      Python's other small blocks in use, per step (not bytes)

libraries        calls with varying sizes, each in its own processes: bytes of the C heap, and of
                 resident memory, that each call adds
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RANKS, EVERY = 4, 25
MODEL = """
    --mock-data --vocab-size 64 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2
    --seq-length 16 --lr 1e-3 --num-layers 2 --num-workers 0 --micro-batch-size 2 --device cpu
    --tensor-model-parallel-size 2 --sequence-parallel --log-interval 25
"""
CASES = {
    "experts": "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 "
    "--expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall",
    "dense": "",
}
COLUMNS = ("resident", "heap", "free tuples", "objects")

COUNT = r"""
import ctypes, gc, os, re, sys, tempfile
class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
def heap():
    found = libc.mallinfo2()
    return found.uordblks + found.hblkhd
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
def free_tuples():
    with tempfile.TemporaryFile() as file:  # Python prints them to stderr only
        old = os.dup(2)
        os.dup2(file.fileno(), 2)
        sys._debugmallocstats()
        os.dup2(old, 2)
        os.close(old)
        file.seek(0)
        found = re.findall(rb"(\d+) free (\d+)-sized PyTupleObjects", file.read())
    return [(int(count), int(length)) for count, length in found]
"""

RANK = (
    COUNT
    + r"""
import json
import pretrain_llama
from training.run.watch.intervals import Intervals
after_step, every, path = Intervals.after_step, int(os.environ["EVERY"]), os.environ["SAMPLES"]
def sampling(self, step):
    if step.iteration % every == 0:
        found, free = [step.iteration, resident(), heap()], free_tuples()
        found.append(sum(count * (40 + 8 * length) for count, length in free))
        found.append(sys.getallocatedblocks() - sum(count for count, _ in free))
        with open(path, "a") as file:
            file.write(json.dumps(found) + "\n")
    return after_step(self, step)
Intervals.after_step = sampling
sys.exit(pretrain_llama.main(sys.argv[1:]))
"""
)

LIBRARIES = {  # name: (processes, code that makes `call(n)`, of sizes n)
    "products of fp32 by oneDNN, 64 x 128, each of n rows": (
        1,
        """
import torch
w = torch.randn(128, 64)
call = lambda n: torch.ops.mkldnn._linear_pointwise(
    torch.randn(n, 64), w, B=None, attr="none", scalars=[], algorithm="")
""",
    ),
    "products of fp32 by MKL, of the same sizes": (
        1,
        """
import torch
w = torch.randn(128, 64)
call = lambda n: torch.nn.functional.linear(torch.randn(n, 64), w)
""",
    ),
    "tuple(generator)": (1, "call = lambda n: tuple(i for i in range(n % 20))"),
    "gloo's all_reduce of 64 numbers": (
        2,
        """
import torch, torch.distributed as dist
x = torch.zeros(64)
call = lambda n: dist.all_reduce(x)
""",
    ),
    "gloo's all_to_all of 2 n rows, waited for": (
        2,
        """
import torch, torch.distributed as dist
def call(n):
    x = torch.zeros(2 * n, 16)
    dist.all_to_all_single(torch.empty_like(x), x, [n, n], [n, n], async_op=True).wait()
""",
    ),
}
SIZES = 400  # number of sizes; each is called once per turn
CALLS = (
    COUNT
    + """
import json
rank, world, port, sizes, turns = (int(word) for word in sys.argv[1:6])
if world > 1:
    import torch.distributed as dist
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
exec(sys.argv[6])
call(8)
found = []
for turn in range(turns):
    before = heap(), resident()
    for n in range(1, sizes + 1):
        call(n)
    found.append([heap() - before[0], resident() - before[1]])
print(json.dumps(found))
if world > 1:
    dist.destroy_process_group()
"""
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", help=f"{', '.join(CASES)}, libraries (default: all)")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout to run")
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    what = args.what or [*CASES, "libraries"]
    if cases := [name for name in what if name in CASES]:
        print(f"{'bytes a step':<12}" + "".join(f"{name:>24}" for name in COLUMNS))
    for name in cases:
        ranks = run(name, args.tree.resolve(), args.steps)
        cells = []
        for column in range(len(COLUMNS)):
            each = [slope([(row[0], row[1 + column]) for row in rows]) for rows in ranks]
            cells.append(f"{statistics.mean(each):11,.2f} (most {max(each):,.2f})")
        print(f"{name:<12}" + "".join(f"{cell:>24}" for cell in cells), flush=True)
    if "libraries" in what:
        heads = ("heap: first", "again", "resident: first", "again")
        print(f"{'bytes a call':<56}" + "".join(f"{head:>16}" for head in heads))
        for name, (processes, code) in LIBRARIES.items():
            first, *later = library(processes, code)
            again = [statistics.mean(column) for column in zip(*later, strict=True)]
            cells = (first[0], again[0], first[1], again[1])
            print(f"{name:<56}" + "".join(f"{n / SIZES:>16,.0f}" for n in cells), flush=True)


def slope(points: list[tuple[int, int]]) -> float:
    """Return the slope per step of (step, number), by least squares, after the first quarter."""
    late = points[len(points) // 4 :]
    x, y = (statistics.mean(column) for column in zip(*late, strict=True))
    return sum((a - x) * (b - y) for a, b in late) / sum((a - x) ** 2 for a, _ in late)


def run(case: str, tree: Path, steps: int) -> list[list[list[int]]]:
    """Return the samples of each rank of a run: [step, numbers of COLUMNS]."""
    argv = [*MODEL.split(), *CASES[case].split(), "--train-iters", str(steps)]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(rank) for rank in range(RANKS)]
        more = [{"EVERY": str(EVERY), "SAMPLES": str(file)} for file in files]
        start(RANK, [argv] * RANKS, more, tree)
        return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def library(processes: int, code: str) -> list[list[int]]:
    """Return the growth of the heap and of resident memory of the first process, for each turn."""
    port = str(free_port())
    numbers = [str(processes), port, str(SIZES), "11"]
    argv = [[str(rank), *numbers, code] for rank in range(processes)]
    found: list[list[int]] = json.loads(start(CALLS, argv, [{}] * processes, ROOT)[0])
    return found


def start(code: str, argv: list[list[str]], more: list[dict[str, str]], tree: Path) -> list[str]:
    """Run ranks to their end; return the output of each."""
    port, processes = str(free_port()), []
    for rank, (words, env) in enumerate(zip(argv, more, strict=True)):
        where = {"RANK": str(rank), "WORLD_SIZE": str(len(argv)), "LOCAL_RANK": str(rank)}
        meeting = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        path = os.environ | where | meeting | env | {"PYTHONPATH": str(tree)}
        command = [sys.executable, "-c", code, *words]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, cwd=tree, env=path, stdout=pipe, text=True))
    try:
        said = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        sys.exit(f"a rank failed: {said[0]}")
    return said


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    main()
