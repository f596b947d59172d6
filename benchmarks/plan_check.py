# SPDX-License-Identifier: Apache-2.0
"""Predict published runs of other programs, larger models and clusters, and print the errors.

    python benchmarks/plan_check.py [--csv FILE]

The runs and their sources are those of benchmarks/planning/other_runs.py, predicted as by
`benchmarks/plan_predict.py`. --csv writes those that are not in a CSV of the repository. Printed:
predicted and measured tokens per second and GPU and their ratio; the mean and the median error by
source, with a column on its use: fitted, tuned on, looked at, or not seen. For sources that were
not seen, the error of the predictions committed before the comparison is printed, too.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.planning import other_runs  # noqa: E402
from benchmarks.planning.predict import predict  # noqa: E402


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, help="keep the runs as a CSV, for plan_predict.py")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        runs = other_runs.runs(Path(folder))
    if args.csv:
        args.csv.write_text("\n".join(other_runs.lines()) + "\n", encoding="utf-8")
    told = predict([row for row, _ in runs])
    errors: dict[str, list[float]] = {}
    before: dict[str, list[float]] = {}  # errors of the predictions that were committed blind
    for n, (row, line) in enumerate(runs):
        r = row.record
        measured = told.rate[n] * told.seconds[n] / row.seconds
        ratio = told.rate[n] / measured
        errors.setdefault(line["source"], []).append(ratio - 1)
        if first := line.get("predicted_tokens_s_gpu"):
            before.setdefault(line["source"], []).append(float(first) / measured - 1)
        layout = f"tp {r['tp']} pp {r['pp']} v {r['virtual']} cp {r['cp']} zero {r['zero']:g}"
        gpus = f"{line['n_gpus']:>5} {line['gpu']:6} {line['precision']:14}"
        print(f"{line['source']:24} {line['model']:14} {gpus} {layout:34} "
              f"measured {measured:9.1f}  predicted {told.rate[n]:9.1f}  {ratio:5.2f}  "
              f"MFU {told.mfu[n]:4.0%}  {told.gib[n]:5.1f} GiB")  # fmt: skip
    print(f"\n{'source':24} runs  mean error  median  mean of predicted / measured  use")
    for source, own in errors.items():
        use = other_runs.SOURCES[source].use
        first = before.get(source)
        note = f" ({np.mean(np.abs(first)):.1%} as committed before)" if first else ""
        size = np.abs(own)
        print(f"{source:24} {len(own):4}  {np.mean(size):10.1%}  {np.median(size):6.1%}  "
              f"{1 + np.mean(own):28.2f}  {use}{note}")  # fmt: skip
    print("\n" + "\n".join(f"{use}: {meaning}" for use, meaning in other_runs.USES.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
