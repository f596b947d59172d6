#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure the start-up work of ranks of a large world, up to the end of their first step.

    python benchmarks/bench_start.py                        8 ranks of 4,096
    python benchmarks/bench_start.py --ranks 0 5 --zero 0   these two; each loads all its weights
    python benchmarks/bench_start.py --tree ../older        the same, of another checkout

Each rank is a process that runs pretrain_llama.main with the flags of a run of 8 tensor-parallel x
512 data-parallel ranks; the processes run one after the other. A rank resumes from a checkpoint
that one rank saved. The other ranks are simulated: the rendezvous store answers as they would,
process groups are torch's fake ones, which send nothing, and gathered facts about a checkpoint
equal this rank's. So all work that a rank does by itself is done and counted; network time and
waits for other ranks are not.

    modules      Python modules in memory when the first step is done
    opened       files that Python opened (sys.addaudithook), imports included
    read         bytes of all reads (/proc/self/io, page cache included), without mapped files
    loaded       bytes of tensors that the rank read from the checkpoint
    hashed       bytes of its files that the rank compared with their sums
    calls, put   calls of the store, and bytes that the rank wrote to it
    seconds      of processor time until the end of imports, data, meeting, model, checkpoint and
                 first step

Before the measurement the first rank runs once, so that the page cache and the index of the data
are as on a host where another rank has started before.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RANKS, WORLD, TP = (0, 1, 7, 8, 511, 512, 2047, 4095), 4096, 8
MODEL = """
    --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 64 --lr 1e-3
    --micro-batch-size 1 --device cpu --log-interval 1 --tokenizer-type NullTokenizer
    --vocab-size 8000 --train-iters 10
"""
PHASES = ("imports", "data", "meeting", "model", "checkpoint", "first step")

CHILD = r'''
import json, os, sys, time
from pathlib import Path
opened = set()
sys.addaudithook(lambda event, args: opened.add(str(args[0])) if event == "open" else None)
def read():
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])
import pretrain_llama
from datetime import timedelta
from types import SimpleNamespace
import torch.distributed as dist
from importlib import import_module
agree, load = (import_module(f"training.checkpoint.{name}") for name in ("agree", "load"))
meeting = import_module("training.run.rendezvous")
times, counts = {"imports": time.process_time()}, {}
world = int(os.environ["WORLD_SIZE"])

class Played(dist.Store):
    """The store as the other ranks would fill it."""

    def __init__(self):
        super().__init__()
        self.keys, self.calls, self.put = {}, 0, 0

    def answer(self, key):
        last = key.rpartition("/")[2]
        if key in self.keys:
            return self.keys[key]
        if "hello/" in key:
            return f"{last}{'0' * 8} 0 ".encode()
        if "/here/" in key:
            return next(value for own, value in self.keys.items() if own.endswith("/here/0"))
        if last == "roll":
            return b""
        if "answer/" in key:
            return b"0123456789abcdef"
        raise KeyError(key)

    def set(self, key, value):
        value = value.encode() if isinstance(value, str) else bytes(value)
        self.calls, self.put, self.keys[key] = self.calls + 1, self.put + len(value), value

    def get(self, key):
        self.calls += 1
        return self.answer(key)

    def check(self, keys):
        self.calls += 1
        return True

    def add(self, key, number):
        self.calls += 1
        self.keys[key] = str(int(self.keys.get(key, b"0")) + number).encode()
        return int(self.keys[key])

    def wait(self, keys, *timeout):
        self.calls += 1

store = Played()
meeting._open = lambda *args: store
class Names:
    """PrefixStore in Python: torch's own would look for a store in C++."""
    def __init__(self, prefix, inner): self.prefix, self.inner = prefix, inner
    def __getattr__(self, name):
        call = getattr(self.inner, name)
        one = lambda key, *more: call(f"{self.prefix}/{key}", *more)
        many = lambda keys, *more: call([f"{self.prefix}/{key}" for key in keys], *more)
        return many if name in ("check", "wait") else one
meeting.dist.PrefixStore = Names
monitor = pretrain_llama.new_monitor
def alone(config, grid, launch, *rest):
    times["meeting"] = time.process_time()
    return monitor(config, grid, launch, None, *rest[1:])
pretrain_llama.new_monitor = alone
prepare = pretrain_llama.prepare
def prepared(*args):
    made = prepare(*args)
    made[2].train.next_global_batch(0, made[0].batch.global_batch_size)
    times["data"] = time.process_time()
    return made
pretrain_llama.prepare = prepared
def connect(config, grid, device, names, timeout, note):
    from torch.testing._internal.distributed.fake_pg import FakeStore
    dist.init_process_group("fake", store=FakeStore(), rank=grid.rank, world_size=world)
    grid.backend = "gloo"
    grid.add_groups(device, timedelta(seconds=60))
pretrain_llama.connect = connect
def told(data, axis, device=None):
    """Return what every rank tells: what this one does, but where rank 0 alone knows something."""
    first = data
    if data == b'{"value": []}':  # where checkpoints are
        at = sys.argv[sys.argv.index("--load") + 1]
        names, left = import_module("training.checkpoint.find").candidates(Path(at), None)
        first = json.dumps({"value": [names, left]}).encode()
    return [first] + [data] * (axis.size - 1)
agree.gather_bytes = told
fill, check_file = load._fill, load.check_file
def filled(piece, *args, **more):
    count = fill(piece, *args, **more)
    counts["loaded"] = counts.get("loaded", 0) + count * piece.tensor.element_size()
    return count
def hashed(path, info, *more):
    counts["hashed"] = counts.get("hashed", 0) + info["size"]
    return check_file(path, info, *more)
load._fill, load.check_file = filled, hashed
Saver = pretrain_llama.Saver
begin = Saver.begin
def begun(self):
    times["model"] = time.process_time()
    found = begin(self)
    times["checkpoint"] = time.process_time()
    return found
Saver.begin = begun
pretrain_llama.measure_and_warm_up = lambda *args: SimpleNamespace(auto={})
step = pretrain_llama.train_step
def first(*args):
    if "checkpoint" not in times:  # the memory of a step is reckoned before
        return step(*args)
    try:
        step(*args)
    finally:
        times["first step"] = time.process_time()
        print(json.dumps({
            "modules": len(sys.modules), "opened": len(opened), "read": read(), **counts,
            "calls": store.calls, "put": store.put, "keys": len(store.keys), "times": times,
        }), file=sys.__stderr__)
        sys.__stderr__.flush()
        os._exit(0)
pretrain_llama.train_step = first
sys.exit(pretrain_llama.main(sys.argv[1:]))
'''


def start(tree: Path, rank: int, flags: list[str]) -> dict[str, Any]:
    """Run one rank up to the end of its first step; return the counts."""
    environment = {
        **os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(WORLD),
        "RANK": str(rank), "LOCAL_RANK": str(rank % 8), "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "WEFT_SECRET": "s" * 32,
    }  # fmt: skip
    command = [sys.executable, "-c", CHILD, *flags]
    done = subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True)
    lines = [line for line in done.stderr.splitlines() if line.startswith('{"modules"')]
    if not lines:
        raise SystemExit(f"bench_start.py: rank {rank} did not reach the end of its first step\n"
                         f"{done.stdout[-2000:]}{done.stderr[-4000:]}")  # fmt: skip
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def saved(tree: Path, folder: str, data: list[str]) -> None:
    """Train one step on one rank, and save a checkpoint."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    flags = [*MODEL.split(), *data, "--global-batch-size", str(WORLD // TP), "--save", folder]
    flags += ["--exit-interval", "1", "--micro-batch-size", "64"]
    command = [sys.executable, "pretrain_llama.py", *flags]
    subprocess.run(command, env=environment, cwd=tree, check=True, stdout=subprocess.DEVNULL)


def corpus(prefix: str) -> list[str]:
    """Write a corpus of 200,000 documents; return the flags to read it."""
    import numpy as np

    sys.path.insert(0, str(ROOT))
    from training.data.indexed import IndexedWriter

    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 7999, 5_000_000).astype(np.uint16)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as out:
        for i in range(200_000):
            out.add(tokens[i * 25 : i * 25 + 25])
    return ["--train-data-path", prefix]


def size(count: float) -> str:
    """Return bytes as text."""
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"


def main() -> int:
    """Measure, and print a row for each rank."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help=f"of {WORLD:,}")
    parser.add_argument("--zero", default="1", help="ZeRO stage of the run")
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout that is measured")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = corpus(f"{folder}/corpus")
        saved(args.tree, f"{folder}/saved", data)
        flags = [*MODEL.split(), *data, "--tensor-model-parallel-size", str(TP)]
        flags += ["--global-batch-size", str(WORLD // TP), "--zero-stage", args.zero]
        flags += ["--load", f"{folder}/saved", "--no-shared-memory", "--sequence-parallel"]
        start(args.tree, args.ranks[0], flags)
        print(f"ranks of {WORLD:,}: {TP} tensor-parallel x {WORLD // TP} data-parallel, "
              f"ZeRO {args.zero}; processor seconds until the end of a phase")  # fmt: skip
        heads = ("rank", "modules", "opened", "read", "loaded", "hashed", "calls", "put", *PHASES)
        print("  ".join(f"{head:>9}" for head in heads))
        for rank in args.ranks:
            found = start(args.tree, rank, flags)
            cells = [str(rank), f"{found['modules']:,}", f"{found['opened']:,}"]
            cells += [size(found.get(name, 0)) for name in ("read", "loaded", "hashed")]
            cells += [f"{found['calls']:,}", size(found["put"])]
            cells += [f"{found['times'][phase]:.2f}" for phase in PHASES]
            print("  ".join(f"{cell:>9}" for cell in cells), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
