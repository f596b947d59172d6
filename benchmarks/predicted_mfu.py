#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Predict steps of Llama 3 on H100s, rehearsed: eager, fused and float8, and what overlap gains.

    python benchmarks/predicted_mfu.py mfu      8B at tp 1 and tp 8: MFU, and what bounds each
    python benchmarks/predicted_mfu.py gains    four layers of 70B, tp 8: `none` against `ring`

Predictions of tools/rehearsal's clock (docs/rehearsal_time.md), of rank 0 alone: nothing is
measured. MFU is of the bf16 peak, with float8 too. FLAG: further flags of the trainer.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.fused_launches import report  # noqa: E402

SPLIT = "--tensor-model-parallel-size=8 --sequence-parallel"
DATA = "--zero-stage=3 --overlap-grad-reduce --overlap-param-gather"
LAYOUTS = {  # of 8 GPUs, 16 sequences of 8192 tokens a step
    "tp 1, dp 8, ZeRO 3": f"{DATA} --global-batch-size=16",
    "tp 8, sp, ring": f"{SPLIT} --tp-comm-overlap=ring --global-batch-size=2",
}
FP8 = "--fp8-format=hybrid --fp8-recipe="
VARIANTS = {  # name: whether Triton's kernels run, flags
    "eager": (False, ""),
    "fused": (True, ""),
    "fused, float8 rowwise": (True, f"{FP8}rowwise"),
    "fused, float8 tensorwise": (True, f"{FP8}tensorwise"),
}
SEVENTY = """
    --num-layers=4 --hidden-size=8192 --ffn-hidden-size=28672 --num-attention-heads=64
    --num-query-groups=8 --micro-batch-size=2 --global-batch-size=4
"""
# tokens/s a GPU of torchtitan, 70B on 256 H100: without and with asynchronous tensor parallelism
TITAN = {"bf16": (597, 652), "tensorwise": (810, 942), "rowwise": (600, 625), "blockwise": None}
Report = Callable[[Path, Sequence[str], bool, int], dict[str, Any]]


def mfu(flags: Sequence[str], report: Report = report) -> Iterator[str]:
    """Yield the table of layouts and variants."""
    yield "| layout | | launches | ms a step | MFU | bound by | at least, ms | exposed, ms |"
    yield "|---|---|---|---|---|---|---|---|"
    for layout, words in LAYOUTS.items():
        for name, (triton, more) in VARIANTS.items():
            given = ["--num-layers=32", *words.split(), *more.split(), *flags]
            made = report(ROOT, given, triton, 8)
            time, launches = made["time"], sum(row["count"] for row in made["launches"])
            exposed = ", ".join(
                f"{axis} {1e3 * seconds:.0f}"
                for axis, seconds in sorted(time["exposed_seconds"].items())
                if seconds >= 5e-4
            )
            yield (
                f"| {layout} | {name} | {launches:,} | {1e3 * time['step_seconds']:.0f} | "
                f"{time['mfu']:.1%} | {time['bound_by']} | {1e3 * time['bound_seconds']:.0f} | "
                f"{exposed or '0'} |"
            )


def gains(flags: Sequence[str], report: Report = report) -> Iterator[str]:
    """Yield the table of what overlap gains, predicted here and measured by torchtitan."""
    yield "| | none, ms | exposed | ring, ms | exposed | gain | torchtitan's gain |"
    yield "|---|---|---|---|---|---|---|"
    for name, measured in TITAN.items():
        given = [*SEVENTY.split(), *SPLIT.split(), *flags]
        given += [] if name == "bf16" else f"{FP8}{name}".split()
        times = []
        for method in ("none", "ring"):
            made = report(ROOT, [*given, f"--tp-comm-overlap={method}"], True, 8)["time"]
            times.append((made["step_seconds"], made["exposed_seconds"].get("tp", 0.0)))
        (before, idle), (after, less) = times
        theirs = "not published"
        if measured:
            theirs = f"{measured[1] / measured[0] - 1:+.1%} ({measured[0]} to {measured[1]})"
        yield (
            f"| {name} | {1e3 * before:.1f} | {1e3 * idle:.1f} | {1e3 * after:.1f} | "
            f"{1e3 * less:.1f} | {before / after - 1:+.1%} | {theirs} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", choices=["mfu", "gains"])
    args, flags = parser.parse_known_args()
    for line in {"mfu": mfu, "gains": gains}[args.table](flags):
        print(line, flush=True)


if __name__ == "__main__":
    main()
