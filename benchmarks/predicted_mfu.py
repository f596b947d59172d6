#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Predict steps of Llama 3 on H100s by rehearsals: eager, fused and float8, and gains of overlap.

    python benchmarks/predicted_mfu.py mfu      8B at tp 1 and tp 8: MFU, and what bounds each
    python benchmarks/predicted_mfu.py gains    four layers of 70B, tp 8: `none` against `ring`
    python benchmarks/predicted_mfu.py changes --base COMMIT    8B: before and now, and why

The figures are predictions of forecast/rehearsal's clock (docs/rehearsal.md) for rank 0: nothing is
measured. MFU is of the bf16 peak, also with float8. Further flags are the trainer's.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.fused_launches import report  # noqa: E402
from forecast.device_file import path_of  # noqa: E402
from tools.bisect.checkouts import checkout  # noqa: E402

SPLIT = "--tensor-model-parallel-size=8 --sequence-parallel"
DATA = "--zero-stage=3 --overlap-grad-reduce --overlap-param-gather"
LAYOUTS = {  # of 8 GPUs, with 16 sequences of 8192 tokens per step
    "tp 1, dp 8, ZeRO 3": f"{DATA} --global-batch-size=16",
    "tp 8, sp, ring": f"{SPLIT} --tp-comm-overlap=ring --global-batch-size=2",
}
FP8 = "--fp8-format=hybrid --fp8-recipe="
VARIANTS = {  # name: whether Triton's kernels run, flags
    "eager": (False, ""),
    "fused": (True, ""),
    "fused, float8 tensorwise": (True, f"{FP8}tensorwise"),
    "fused, float8 blockwise": (True, f"{FP8}blockwise"),
}
SEVENTY = """
    --num-layers=4 --hidden-size=8192 --ffn-hidden-size=28672 --num-attention-heads=64
    --num-query-groups=8 --micro-batch-size=2 --global-batch-size=4
"""
# tokens/s/GPU of torchtitan, 70B on 256 H100: without and with asynchronous tensor parallelism
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
    """Yield the table of gains of overlap, predicted here and measured by torchtitan."""
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


COMPARED = {  # name: ranks, flags
    "one GPU": (1, "--global-batch-size=2"),
    "ZeRO 3 over 8": (8, LAYOUTS["tp 1, dp 8, ZeRO 3"]),
    "tp 8, sp": (8, f"{SPLIT} --tp-comm-overlap=none --global-batch-size=2"),
    "tp 8, sp, ring": (8, LAYOUTS["tp 8, sp, ring"]),
}
UNDONE = {  # a change of the device file's numbers: their values at 0c88a3d
    "attention": {"attention.cudnn.forward": 0.2211, "attention.cudnn.backward": 0.17688},
    "host": {
        "function_seconds": 0.0, "triton_seconds": 6e-6, "triton_argument_seconds": 0.0,
        "message_seconds": 1e-5,
    },
}  # fmt: skip


def changes(flags: Sequence[str], base: Path, report: Report = report) -> Iterator[str]:
    """Yield the table of the predictions of a base and of this tree, and the effect of each change.

    The effect of a change, in ms, is this tree's prediction minus that with the change undone. The
    rest of the difference is "other changes": in launches, and in when a collective gets its SMs.
    """
    yield (
        "| layout | launches | ms, MFU before | ms, MFU now | by the file's other end "
        "| attention, ms | host, ms | other changes, ms |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    with tempfile.TemporaryDirectory() as folder:
        files = {name: _device(Path(folder) / f"{name}.json", n) for name, n in UNDONE.items()}
        for layout, (world, words) in COMPARED.items():
            given = ["--num-layers=32", *words.split(), *flags]
            before, now = (report(tree, given, True, world) for tree in (base, ROOT))
            seconds = {
                name: report(ROOT, [*given, f"--rehearse-device={file}"], True, world)["time"]
                for name, file in files.items()
            }
            old, new = before["time"], now["time"]
            other = next((e for e in new["range"] if e["mfu"] != new["mfu"]), new)
            parts = [1e3 * (new["step_seconds"] - t["step_seconds"]) for t in seconds.values()]
            rest = 1e3 * (new["step_seconds"] - old["step_seconds"]) - sum(parts)
            counts = " to ".join(
                f"{sum(row['count'] for row in one['launches']):,}" for one in (before, now)
            )
            cells = (f"{1e3 * t['step_seconds']:.0f}, {t['mfu']:.1%}" for t in (old, new, other))
            yield (
                f"| {layout} | {counts} | {' | '.join(cells)} | "
                f"{' | '.join(f'{part:+.0f}' for part in (*parts, rest))} |"
            )


def _device(path: Path, numbers: dict[str, float]) -> Path:
    """Write the H100's device file with some numbers replaced; return its path."""
    content = json.loads(path_of("h100").read_text(encoding="utf-8"))
    for key, value in numbers.items():
        content["numbers"][key] |= {"value": value}
    path.write_text(json.dumps(content))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", choices=["mfu", "gains", "changes"])
    parser.add_argument("--base", help="of `changes`: a commit, or a directory with a checkout")
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.table == "changes":
            if args.base is None:
                parser.error("changes needs --base")
            table = changes(flags, checkout(args.base, Path(folder)))
        else:
            table = {"mfu": mfu, "gains": gains}[args.table](flags)
        for line in table:
            print(line, flush=True)


if __name__ == "__main__":
    main()
