# SPDX-License-Identifier: Apache-2.0
"""Compare a training step at tensor parallel 2 with a peer, one process and no communication.

    python benchmarks/bench_tp.py [--cases tiny-fp32 ...] [--paths none auto]

    peer      PyTorch's own parallel stack (benchmarks/peers/native.py), tp 2
    one       Weft in one process with two threads
    PATH      Weft, tp 2 + sequence parallelism, --tp-comm-overlap PATH (an overlap method)
    gloo      the same with --tp-comm-overlap none and --no-shared-memory
    perfect   the same with every collective replaced by a local copy (benchmarks/perfect.py)

Figures are tokens/s: medians over the timed steps of alternating launches. One more line for each
PATH has the ratios of its speed to peer, one and perfect. The batch is 4 sequences.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_step import BATCH, PEER, ROOT, SIZES, Side, run_peer, run_weft  # noqa: E402

CASES = [f"{s}-{d}" for s in SIZES for d in ("fp32", "bf16")]
PERFECT = ROOT / "benchmarks" / "perfect.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=Path, default=PEER, help="the peer's script")
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES, metavar="SIZE-DTYPE")
    parser.add_argument("--paths", nargs="+", default=["none", "auto"], metavar="PATH")
    parser.add_argument("--launches", type=int, default=3, help="of each, taken in turn")
    parser.add_argument("--steps", type=int, default=0, help="timed (0: 10 tiny, 2 small)")
    args = parser.parse_args()
    for case in args.cases:
        size = case.split("-")[0]
        steps = args.steps or (10 if size == "tiny" else 2)
        found = {name: Side() for name in ("peer", "one", *args.paths, "gloo", "perfect")}
        for _ in range(args.launches):
            found["peer"].add(*run_peer(args.peer, f"{case}-2", steps))
            found["one"].add(*run_weft(f"{case}-1", steps))
            for path in args.paths:
                found[path].add(*run_weft(f"{case}-2", steps, f"--tp-comm-overlap {path}"))
            found["gloo"].add(*run_weft(f"{case}-2", steps, "--no-shared-memory"))
            found["perfect"].add(*run_weft(f"{case}-2", steps, program=PERFECT))
        speed = {name: BATCH * SIZES[size][-1] / side.median() for name, side in found.items()}
        print(f"{case:<11}", "; ".join(f"{n} {v:.0f}" for n, v in speed.items()))
        for path in args.paths:
            ratios = [f"{speed[path] / speed[n]:.2f} {n}" for n in ("peer", "one", "perfect")]
            print(f"{'':<11} {path}: {', '.join(ratios)}", flush=True)


if __name__ == "__main__":
    main()
