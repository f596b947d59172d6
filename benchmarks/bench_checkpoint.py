#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare saving and loading a checkpoint with torch.distributed.checkpoint, on the same state.

    python benchmarks/bench_checkpoint.py [--ranks 1 2] [--gigabytes 1.5] [--dir DIR]

The state is a Llama's in fp32: weights and both moments. Every tensor is sharded by rows over the
ranks, which divide the cores. Both sides write one file per rank and fsync it. Weft also hashes the
files and checks all hashes when it loads; the peer has no hashes. A round has three parts, and in
each the sides alternate: save; load, first from the host's page cache, then without it; save in the
background, timed for as long as the call blocks the trainer. A time is that of the slowest rank, a
figure the median over rounds. Loaded tensors must equal the saved ones bit for bit.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.bench_step import command, output  # noqa: E402
from mpu.comm.collectives import all_gather, barrier, group_of  # noqa: E402
from mpu.grid import Grid, Launch  # noqa: E402
from training import checkpoint  # noqa: E402
from training.checkpoint.stage import Background, Staging  # noqa: E402
from training.run.rendezvous import meet  # noqa: E402

WAIT = timedelta(minutes=10)
HIDDEN, FFN, VOCAB = 1024, 2816, 32000
BLOCK = {
    **{name: (HIDDEN, HIDDEN) for name in ("q_proj", "o_proj")},
    **{name: (HIDDEN // 4, HIDDEN) for name in ("k_proj", "v_proj")},
    **{name: (FFN, HIDDEN) for name in ("gate_proj", "up_proj")},
    "down_proj": (HIDDEN, FFN),
    **{name: (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")},
}
SIDES = ("weft", "torch")


def shapes(gigabytes: float) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of a Llama whose state in fp32 has about `gigabytes` GB."""
    found: dict[str, tuple[int, ...]] = {"embed_tokens": (VOCAB, HIDDEN)}
    while sum(12 * torch.Size(s).numel() for s in found.values()) < gigabytes * 1e9:
        layer = len(found) // len(BLOCK)
        found |= {f"layers.{layer}.{name}": shape for name, shape in BLOCK.items()}
    return {f"{n}{k}": s for n, s in found.items() for k in ("", ".exp_avg", ".exp_avg_sq")}


class State:
    """This rank's rows of every tensor, as Weft's pieces and as DTensors on the same memory."""

    def __init__(self, grid: Grid, gigabytes: float, fill: bool) -> None:
        rank, n = grid.rank, grid.world_size
        mesh = init_device_mesh("cpu", (n,))
        draw = torch.Generator().manual_seed(rank)
        self.local: dict[str, Tensor] = {}
        self.pieces: list[checkpoint.NamedPiece] = []
        self.dtensors: dict[str, DTensor] = {}
        for name, (full, *rest) in shapes(gigabytes).items():
            shape = (full // n, *rest)
            local = torch.randn(shape, generator=draw) if fill else torch.zeros(shape)
            start = (rank * (full // n), *(0 for _ in rest))
            self.local[name] = local
            self.pieces.append(checkpoint.NamedPiece(name, (full, *rest), start, shape, local))
            self.dtensors[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        self.bytes = n * sum(4 * t.numel() for t in self.local.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=5, help="timed, after one that is not")
    parser.add_argument("--dir", type=Path, help="where to write (a temporary directory)")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # of a rank
    args = parser.parse_args()
    if args.result:
        return be_rank(args)
    print(f"torch {torch.__version__}; medians of {args.rounds} rounds, seconds\n")
    print("| ranks, state | what | weft | torch | GB/s weft | torch / weft |\n" + "|---" * 6 + "|")
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory(dir=args.dir) as folder:
            file = Path(folder) / "seconds.json"
            words = [*sys.argv, "--dir", folder, "--result", str(file)]
            output([*command(ranks), *words], ranks)
            print("\n".join(rows(ranks, json.loads(file.read_text()))), flush=True)


def rows(ranks: int, found: dict[str, Any]) -> list[str]:
    """Return the lines of the table for one number of ranks."""
    size, out = found.pop("bytes") / 1e9, []
    median = {key: statistics.median(seconds) for key, seconds in found.items()}
    for what in ("save", "load cached", "load from disk", "stall"):
        ours, theirs = (median[f"{what} {side}"] for side in SIDES)
        out.append(
            f"| {ranks}, {size:.2f} GB | {what} | {ours:.3f} | {theirs:.3f} | {size / ours:.2f} | "
            f"**{theirs / ours:.2f}** |"
        )
    share = median["stall weft"] / median["save weft"]
    out.append(f"| {ranks}, {size:.2f} GB | stall / save, ours | {share:.1%} | | | |")
    return out


def be_rank(args: argparse.Namespace) -> None:
    """Run one rank: save and load by both sides, in turns."""
    launch = Launch.from_env()
    grid = Grid(launch.world, launch=launch)
    if launch.world > 1:
        grid.connect(torch.device("cpu"), meet(WAIT, launch), WAIT)
        grid.add_background(WAIT)
        behind = group_of(grid.background)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        behind = dist.group.WORLD
    state, empty = (State(grid, args.gigabytes, fill) for fill in (True, False))
    staging, background = Staging(state.pieces), Background()
    root = {side: args.dir / side for side in SIDES}
    found: dict[str, list[float]] = {}

    def save_weft(world: Any = None, pieces: Any = None) -> None:
        checkpoint.save(root["weft"], step=1, pieces=pieces or state.pieces, state={}, grid=grid,
                        world=world)  # fmt: skip

    def save_torch() -> None:
        dcp.save(state.dtensors, checkpoint_id=root["torch"])

    def load_weft() -> None:
        newest = checkpoint.find_latest(root["weft"], grid, pieces=empty.pieces)
        assert newest is not None
        checkpoint.load(newest, empty.pieces, grid)

    def load_torch() -> None:
        dcp.load(empty.dtensors, checkpoint_id=root["torch"])

    def stall_weft() -> None:
        copies = staging.copy(state.pieces)
        background.start(lambda: save_weft(grid.background, copies))

    def stall_torch() -> None:
        found["future"] = dcp.async_save(  # type: ignore[assignment]
            state.dtensors, checkpoint_id=root["torch"], process_group=behind
        )

    def evict(side: str) -> None:
        for path in [p for p in root[side].rglob("*") if p.is_file()]:
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)

    def clear(side: str) -> None:
        if grid.rank == 0:
            shutil.rmtree(root[side], ignore_errors=True)

    def timed(key: str, call: Callable[[], None], timing: bool) -> None:
        barrier(grid.world)
        begin = time.perf_counter()
        call()
        seconds = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        if timing:
            every, _ = all_gather(seconds[None], grid.world)
            found.setdefault(key, []).append(every.max().item())

    for turn in range(1 + args.rounds):
        for side, save in (("weft", save_weft), ("torch", save_torch)):
            clear(side)
            timed(f"save {side}", save, turn > 0)
        for what in ("cached", "from disk"):
            for side, load in (("weft", load_weft), ("torch", load_torch)):
                for tensor in empty.local.values():
                    tensor.zero_()
                if what == "from disk":
                    evict(side)
                timed(f"load {what} {side}", load, turn > 0)
                wrong = [n for n, t in state.local.items() if not torch.equal(t, empty.local[n])]
                assert not wrong, (side, wrong)
        for side, stall in (("weft", stall_weft), ("torch", stall_torch)):
            clear(side)
            timed(f"stall {side}", stall, turn > 0)
            background.wait()
            if side == "torch":
                found.pop("future").result()  # type: ignore[attr-defined]
    if grid.rank == 0:
        args.result.write_text(json.dumps({**found, "bytes": state.bytes}))
    barrier(grid.world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
