#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Sweep the learning rate at widths 8 times apart, with muP and without: does the best one move?

    python benchmarks/mup_transfer.py [--widths 32 64 128 256] [--seeds 1] [--out runs/mup]

The text is a Markov chain of 128 tokens, each with 4 successors, drawn anew for each step: models
learn its table, and the loss of the last fifth of the steps is on unseen text. Printed are the mean
of that loss over the seeds for each rate, and the number of grid steps (factors of 2) by which the
best rate moves from the narrowest to the widest model. A sweep whose best rate is at its end is
extended by one step. Each run is a line of OUT/runs.jsonl, so a stopped call can be continued by
the next one.
"""

import argparse
import json
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import pretrain_llama  # noqa: E402
from benchmarks import coordinate_check  # noqa: E402
from training.data.batch import Batch  # noqa: E402

VOCABULARY, SUCCESSORS = 128, 4
MODEL = f"""--vocab-size {VOCABULARY} --hidden-size 32 --num-attention-heads 2
    --ffn-hidden-size 64 --seq-length 32 --micro-batch-size 16 --global-batch-size 16
    --num-layers 2 --init-method-std 0.05 --mup-embedding-mult 1 --clip-grad 1
    --adam-beta2 0.95""".split()
POWERS = range(-9, -4)  # powers of 2: the rates with which a sweep begins
LAST = range(-14, 1)  # range to which it may be extended


class Chain:
    """Text of a Markov chain, the same for every model."""

    def __init__(self) -> None:
        drawn = torch.Generator().manual_seed(0)
        size = (VOCABULARY, SUCCESSORS)
        self.to = torch.randint(0, VOCABULARY, size, generator=drawn)
        self.odds = torch.rand(size, generator=drawn).softmax(1)
        self.entropy = float(-(self.odds * self.odds.log()).sum(1).mean())

    def batch(self, rows: int, length: int, seed: int) -> Batch:
        """Return a batch of text drawn with a seed."""
        drawn = torch.Generator().manual_seed(seed)
        at = torch.randint(0, VOCABULARY, (rows,), generator=drawn)
        text = [at]
        for _ in range(length):
            chosen = torch.multinomial(self.odds[at], 1, generator=drawn)[:, 0]
            at = self.to[at, chosen]
            text.append(at)
        whole = torch.stack(text, 1)
        tokens, labels = whole[:, :-1].contiguous(), whole[:, 1:].contiguous()
        return Batch(
            tokens, labels, loss_mask=None, position_ids=None, packed_seq_params=None,
            first_sample=0, token_count=tokens.numel(),
        )  # fmt: skip


def trained(chain: Chain, mode: str, width: int, power: int, seed: int, steps: int) -> float:
    """Train a model; return the mean loss of the last fifth of the steps, inf if it diverged."""
    flags = coordinate_check.with_flags(coordinate_check.BASE, [*MODEL, "--seed", str(seed)])
    run = coordinate_check.start(coordinate_check.of_width(flags, width, mode == "muP"))
    sizes, losses, peak = run.config, [], 2.0**power
    for step in range(steps):
        shape = sizes.batch.micro_batch_size, sizes.model.seq_length
        batch = chain.batch(*shape, seed * 100_000 + step)
        lr = peak * min(1.0, (step + 1) / 10) * (1 - step / steps)
        loss, _, found_inf = pretrain_llama.train_step(run, [batch], lr)
        losses.append(loss.item() if not found_inf.item() else math.inf)
        run.iteration += 1
    last = losses[-steps // 5 :]
    mean = sum(last) / len(last)
    return mean if math.isfinite(mean) else math.inf


class Runs:
    """The completed runs, in a file."""

    def __init__(self, out: Path, steps: int) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.file, self.steps, self.chain = out / "runs.jsonl", steps, Chain()
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.done = {tuple(key): loss for key, loss in map(json.loads, lines)}

    def loss(self, mode: str, width: int, power: int, seed: int) -> float:
        """Return a run's loss; run it unless it is completed."""
        key = (mode, width, power, seed, self.steps)
        if key not in self.done:
            found = trained(self.chain, *key)
            self.done[key] = found if math.isfinite(found) else 99.0
            with self.file.open("a") as out:
                out.write(json.dumps([key, self.done[key]]) + "\n")
        return float(self.done[key])


def sweep(runs: Runs, mode: str, width: int, seeds: list[int]) -> dict[int, float]:
    """Return the mean loss for each rate, by its power of 2."""
    found: dict[int, float] = {}
    asked = list(POWERS)
    while asked:
        for power in asked:
            each = [runs.loss(mode, width, power, seed) for seed in seeds]
            found[power] = sum(each) / len(each)
        best = min(found, key=lambda power: found[power])
        ends = (best - 1 if best == min(found) else best + 1 if best == max(found) else best,)
        asked = [power for power in ends if power not in found and power in LAST]
    return dict(sorted(found.items()))


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "mup_transfer")
    args = parser.parse_args()
    runs = Runs(args.out, args.steps)
    print(f"the chain's own entropy is {runs.chain.entropy:.3f}")
    for mode in coordinate_check.MODES[::-1]:
        best = {}
        for width in sorted(args.widths):
            found = sweep(runs, mode, width, args.seeds)
            best[width] = min(found, key=lambda power: found[power])
            line = "  ".join(f"2^{power} {loss:.3f}" for power, loss in found.items())
            print(f"{mode:8} width {width:4}: best 2^{best[width]}   {line}", flush=True)
        widths = sorted(best)
        moved = best[widths[-1]] - best[widths[0]]
        print(f"{mode}: over {widths[-1] // widths[0]} x the width the best rate moves by "
              f"{moved:+d} steps of the grid")  # fmt: skip


if __name__ == "__main__":
    main()
