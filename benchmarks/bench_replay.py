#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure what tools/bisect_runs.py takes to make one step again: seconds, memory and disk.

    OMP_NUM_THREADS=1 python benchmarks/bench_replay.py [--size small] [--flags "..."] [--ranks 4]

The ranks draw the model, make step 1 with every tensor written to a temporary folder, and end.
Each has the batch of benchmarks/bench_step.py. Then the record is compared with itself, tensor by
tensor, as with the other side's replay. Printed: the seconds of all of it, those of the step alone,
the most memory that a rank had resident, the record's size, and the comparison's seconds and
memory.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_step import BATCH, model_flags  # noqa: E402
from tools.bisect.ranks import ROOT, Program, run  # noqa: E402
from tools.compare.first_difference import Allowed  # noqa: E402
from tools.compare.join import Side  # noqa: E402
from tools.compare.verdict import verdict_of  # noqa: E402

LAYOUT = "--tensor-model-parallel-size 2 --sequence-parallel"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", default="small", choices=("tiny", "small"))
    parser.add_argument("--flags", default=LAYOUT, help=f"of the layout ({LAYOUT})")
    parser.add_argument("--ranks", type=int, default=4, help="ranks (4)")
    args = parser.parse_args()
    rows = ["--micro-batch-size", str(BATCH), "--global-batch-size", str(2 * BATCH)]
    argv = (*model_flags(args.size), "--train-iters", "2", *rows, *args.flags.split())
    with tempfile.TemporaryDirectory(prefix="replay-") as work:
        program = Program(ROOT, ROOT / "pretrain_llama.py", argv, args.ranks)
        seconds = run(program, Path(work), record=1)
        record = Path(work, "record")
        disk = sum(path.stat().st_size for path in record.iterdir())
        said = json.loads((record / "step.json").read_text())
        began = time.monotonic()
        verdict = verdict_of(Side(record), Side(record), Allowed(True))
        compared = time.monotonic() - began
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"{args.size}, {args.ranks} ranks, {args.flags or 'dp alone'}: {seconds:.1f} s, "
        f"{said['seconds']:.1f} s of it the step; {said['peak'] / 1e9:.2f} GB on rank 0, "
        f"{disk / 1e9:.2f} GB of disk; {verdict.compared:,} tensors compared in {compared:.1f} s "
        f"with {own / 1e9:.2f} GB"
    )


if __name__ == "__main__":
    main()
