#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train the model of `make train` by Muon and by AdamW, on the same tokens, and compare the losses.

    make check-data train ITERS=10              once: makes the text, the tokenizer and the tokens
    python benchmarks/muon_and_adamw.py [--iters 300] [--seeds 1 2 3] [--out runs/muon_and_adamw]

First each optimizer's learning rate is swept with the first seed; then the best one runs with the
other seeds. A sweep whose best is at its end goes one step further. A run that is done is not
repeated: after a call that was stopped, the next one goes on. Printed: the held-out loss at every
rate, and at the best one its mean over seeds with the standard error. Muon's scale is 0.2 x
spectral, so the same rates are in reach of both (docs/muon.md). One process a run; with the
defaults about 12 runs of 2 CPU minutes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import quickstart  # noqa: E402

MUON = """--optimizer muon --muon-momentum 0.95 --muon-use-nesterov
    --muon-extra-scale-factor 0.2""".split()
OPTIMIZERS = {"AdamW": [], "Muon": MUON}
RATES = [1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3]
FIRST = RATES[1:5]  # of a sweep, before its best is at an end


def held_out(args: argparse.Namespace, name: str, rate: float, seed: int) -> float:
    """Train, unless that is done, and return the last held-out loss."""
    folder = args.out / f"{name}-{rate:g}-{seed}-{args.iters}"
    log, done = folder / "log.jsonl", folder / "done.json"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        data = quickstart.flags_of(args.data, folder, args.iters, args.iters)
        flags = {k: v for k, v in data.items() if k not in ("save", "load", "tensorboard-dir")}
        flags.pop("save-interval")
        flags |= {"lr": rate, "min-lr": rate / 20, "seed": seed, "device": "cpu"}
        command = [sys.executable, "pretrain_llama.py"]
        command += quickstart.command_line(flags, quickstart.SWITCHES) + OPTIMIZERS[name]
        environment = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
        subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        losses = [
            row["validation_loss"]
            for row in map(json.loads, log.read_text().splitlines())
            if "validation_loss" in row
        ]
        done.write_text(json.dumps({"validation_loss": losses[-1]}))
    loss: float = json.loads(done.read_text())["validation_loss"]
    print(f"{name:<6} lr {rate:<6g} seed {seed}: held-out loss {loss:.4f}", flush=True)
    return loss


def sweep(args: argparse.Namespace, name: str) -> float:
    """Return the best learning rate with the first seed."""
    seed = args.seeds[0]
    found = {rate: held_out(args, name, rate, seed) for rate in FIRST}
    while True:
        best = min(found, key=found.__getitem__)
        at = RATES.index(best)
        more = [rate for rate in RATES[max(0, at - 1) : at + 2] if rate not in found]
        if not more:
            return best
        found |= {rate: held_out(args, name, rate, seed) for rate in more}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "muon_and_adamw")
    parser.add_argument("--data", type=Path, default=ROOT / "runs" / "quickstart")
    parser.add_argument("--iters", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if not (args.data / "tokens" / "train" / f"{quickstart.TOKENS}.idx").exists():
        parser.error(f"--data {args.data} has no tokens: run `make train ITERS=10` first")
    lines = []
    for name in OPTIMIZERS:
        best = sweep(args, name)
        losses = [held_out(args, name, best, seed) for seed in args.seeds]
        error = statistics.stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else float("nan")
        lines.append(
            f"{name:<6} best lr {best:g}: {statistics.mean(losses):.4f} +- {error:.4f} "
            f"over {len(losses)} seeds"
        )
    print(f"\n{args.iters} iterations of {quickstart.MODEL['global-batch-size']} samples")
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
