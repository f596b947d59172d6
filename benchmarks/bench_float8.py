#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Print the share of elements that underflow if wgrad's rows are quantized again (docs/float8.md).

    python benchmarks/bench_float8.py --steps 100

A small Llama trains on a CPU. In each weight gradient of the last step, elements of x and of dy are
compared before and after their rows are quantized again along the tokens.
"""

import argparse
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mpu.grid import Grid
from mpu.layers.float8.recipe import FORMATS, Float8
from mpu.layers.float8.rows import BLOCKS, E4M3, Format, decode, remade
from pretrain_llama import build, train_step
from training.data.batch import DocumentRules, make_batch
from training.faults.monitor import FailureMonitor
from training.flags.parse import parse

DOCS = Path(__file__).resolve().parent.parent / "docs"
LENGTH = 256
FLAGS = f"""
    --num-layers 2 --hidden-size 256 --num-attention-heads 4 --kv-channels 128
    --ffn-hidden-size 512 --seq-length {LENGTH} --vocab-size 256 --mock-data --train-iters 1
    --untie-embeddings-and-output-weights --lr 1e-3 --device cpu --bf16 --fp8-recipe
"""


@dataclass(frozen=True, eq=False)
class Counting(Float8):
    """Counts wgrad's operands' elements that change (`changed`), and those other than 0 (`all`)."""

    changed: Counter[str] = field(default_factory=Counter)
    all: Counter[str] = field(default_factory=Counter)

    def accumulate(self, main_grad: Tensor, fresh: bool, x: Tensor, dy: Tensor) -> None:
        """Count, then accumulate."""
        self.count("x", x, E4M3)
        self.count("dy", dy, FORMATS[self.format])
        super().accumulate(main_grad, fresh, x, dy)

    def count(self, name: str, rows: Tensor, form: Format) -> None:
        """Compare rows with themselves quantized again."""
        numbers = decode(rows, self.block, form, torch.float32).t()
        again = remade(rows, self.block, form, self.scaling == "tensorwise")
        found = decode(again, self.block, form, torch.float32)
        self.changed[name] += int((found != numbers).sum())
        self.all[name] += int((numbers != 0).sum())


def shares(scaling: str, name: str, steps: int) -> dict[str, float]:
    """Return the shares of x and of dy that underflow in the last of `steps` steps."""
    config = parse([*FLAGS.split(), scaling, "--fp8-format", name], 1)
    run = build(config, Grid(), torch.device("cpu"), FailureMonitor())
    text = b"".join(file.read_bytes() for file in sorted(DOCS.glob("*.md")))
    corpus, recipe = np.frombuffer(text, dtype=np.uint8).astype(np.int64), None
    for step in range(steps):
        if step == steps - 1:
            recipe = Counting(scaling, name, run.model.ctx)
            for module in run.model.modules():
                if isinstance(getattr(module, "recipe", None), Float8):
                    module.recipe = recipe
        start = step * 7919 % (len(corpus) - LENGTH - 1)
        batch = make_batch(corpus[None, start : start + LENGTH + 1], DocumentRules(), 0)
        train_step(run, [batch], 1e-3, 1e-3)
        run.iteration += 1
    assert recipe is not None
    return {what: recipe.changed[what] / count for what, count in recipe.all.items()}


def main() -> None:
    """Print one line for each recipe and format."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    for scaling in BLOCKS:
        for name in FORMATS:
            found = shares(scaling, name, steps)
            print(f"{scaling:<10} {name:<6} x {found['x']:.3%}  dy {found['dy']:.3%}", flush=True)


if __name__ == "__main__":
    main()
