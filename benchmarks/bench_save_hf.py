#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure what --save-hf costs a run: the steps after a save, and the bytes of a save.

    python benchmarks/bench_save_hf.py [--ranks 2] [--hidden-size 512] [--saves 8] [--dir DIR]

The same training runs with --async-save alone and with --save-hf, turn by turn. A save's stall is
how much longer the steps up to the next save took than as many median steps far from any save; the
figure is the median over the saves. The last save is in the foreground and does not count.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EVERY = 12  # steps between two saves


def train(folder: Path, args: argparse.Namespace, more: list[str]) -> list[float]:
    """Run; return the seconds of each step."""
    words = f"""
        --mock-data --vocab-size 8000 --num-layers 4 --hidden-size {args.hidden_size}
        --num-attention-heads 8 --seq-length 128 --micro-batch-size 1 --global-batch-size 4
        --lr 1e-3 --train-iters {EVERY * (args.saves + 1)} --log-interval 1 --device cpu
        --save {folder}/run --save-interval {EVERY} --async-save --keep-last-k 2
        --log-json {folder}/log.jsonl --tensor-model-parallel-size {args.ranks}
    """.split()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(args.ranks), str(ROOT / "pretrain_llama.py")]
    command = [*launcher, *words, *more]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [row["step_seconds"] for row in rows if "step_seconds" in row]


def stalls(steps: list[float]) -> tuple[float, float]:
    """Return the median stall of a save and the median step, in seconds."""
    usual = statistics.median(steps[1:])
    after = [steps[i : i + EVERY] for i in range(EVERY, len(steps) - EVERY + 1, EVERY)]
    return statistics.median(sum(part) - EVERY * usual for part in after), usual


def size_of(folder: Path) -> int:
    """Return the bytes of the files below a folder."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def main() -> None:
    """Run both sides and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--saves", type=int, default=8)
    parser.add_argument("--dir", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        print("| run | a step | a save's stall | bytes of a save | bytes of its folder |")
        print("|---|---|---|---|---|")
        for side in ("--async-save", "with --save-hf"):
            folder = Path(name) / side.strip("-").replace(" ", "_")
            folder.mkdir()
            hf = folder / "hf"
            steps = train(folder, args, ["--save-hf", str(hf)] if "hf" in side else [])
            stall, usual = stalls(steps)
            saved = size_of(max((folder / "run").glob("step_*")))
            made = f"{size_of(max(hf.glob('step_*'))):,}" if hf.exists() else "0"
            told = f"{usual * 1e3:.0f} ms | {stall * 1e3:+.0f} ms | {saved:,} | {made}"
            print(f"| {side} | {told} |", flush=True)


if __name__ == "__main__":
    main()
