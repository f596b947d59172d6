#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time twenty layouts with plan.py and with --rehearse, and print the differences.

    python benchmarks/plan_clocks.py [--only TEXT]

plan.py records rank 0 with few layers and few micro-batches, and extrapolates the rest
(forecast/planner/played.py). --rehearse runs all layers. Both time the same events with the same
clock, so differences come from parts that are not linear in layers or micro-batches. Each line is a
layout: its seconds by both, the difference, and the part of a step that differs most. The program
takes about ten minutes.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from forecast.device_file import LEVEL, NUMBERS, Device  # noqa: E402
from forecast.planner.cluster import read_cluster  # noqa: E402
from forecast.planner.model import read_model  # noqa: E402
from forecast.planner.played import Worker  # noqa: E402
from forecast.planner.recorded import Recorded, play  # noqa: E402
from forecast.planner.table import breakdown  # noqa: E402
from forecast.rehearsal.clock import Timing  # noqa: E402
from training.run.text import aligned  # noqa: E402

SOURCE = "written by benchmarks/plan_clocks.py"
TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
ZERO = f"--use-distributed-optimizer {OVERLAP}"
FULL = "--recompute-granularity full --recompute-method"
EXPERTS = (
    "--expert-model-parallel-size 8 --expert-tensor-parallel-size 1 "
    "--moe-token-dispatcher-type alltoall"
)
LAYOUTS = [  # model, cluster, micro-batch size, batch, flags
    ("8B", "8xh100", 1, 64, "--overlap-grad-reduce"),
    ("8B", "8xh100", 1, 64, ZERO),
    ("8B", "8xh100", 1, 32, f"--zero-stage 3 {OVERLAP}"),
    ("8B", "8xh100", 2, 64, f"{TP} 2 --sequence-parallel {ZERO}"),
    ("8B", "8xh100", 1, 8, f"{TP} 8 --sequence-parallel --tp-comm-overlap ring"),
    ("8B", "8xh100", 1, 32, f"--context-parallel-size 2 {ZERO}"),
    ("8B", "8xh100", 1, 4, f"--context-parallel-size 8 --seq-length 131072 {FULL} uniform "
                           f"--recompute-num-layers 1 {ZERO}"),
    ("8B", "8xh100", 2, 64, f"{FULL} block --recompute-num-layers 11 {ZERO}"),
    ("8B", "8xh100", 1, 64, f"--fp8-format hybrid --fp8-recipe tensorwise {ZERO}"),
    ("8B", "8xh100", 1, 32, f"{TP} 2 --sequence-parallel --optimizer muon {ZERO}"),
    ("8B", "4x8xh100", 1, 64, f"{TP} 4 --sequence-parallel {PP} 4 {ZERO}"),
    ("8B", "4x8xh100", 1, 128, f"{TP} 2 --sequence-parallel {PP} 4 "
                               "--num-virtual-stages-per-pipeline-rank 2"),
    ("8B", "2x8xh100", 1, 64, f"{TP} 2 --sequence-parallel {PP} 4 --pipeline-schedule zb-h1"),
    ("8B", "2x8xh100", 1, 32, f"{TP} 4 --sequence-parallel {PP} 4 --pipeline-schedule zb-v"),
    ("8B", "4x8xh100", 1, 64, f"--optimizer-state-offload {ZERO}"),
    ("8B", "ethernet", 1, 128, ZERO),
    ("13B", "2x8xa100-40", 1, 64, f"{TP} 2 --sequence-parallel --seq-length 4096 "
                                  f"--recompute-granularity selective {ZERO}"),
    ("70B", "8x8xh100", 1, 128, f"{TP} 8 --sequence-parallel {PP} 4 {ZERO}"),
    ("Mixtral", "4x8xh100", 1, 64, f"{EXPERTS} {PP} 4 {ZERO}"),
    ("Qwen3-30B", "2x8xh100", 1, 64, f"{EXPERTS} --overlap-moe-expert-parallel-comm {ZERO}"),
]  # fmt: skip
ETHERNET = {"name": "four nodes with 10 Gb/s", "device": "h100", "nodes": 4, "gpus_per_node": 8,
            "network_gbps_per_gpu": 1.25, "oversubscription": 1, "source": SOURCE}  # fmt: skip


def written(device: Device) -> dict[str, Any]:
    """Return a device as the content of a device file."""
    numbers = {key: {"value": value, "unit": NUMBERS[key], "source": SOURCE}
               for key, value in device.numbers.items()}  # fmt: skip
    levels = [
        {"name": level.name, "ranks": level.ranks,
         **{key: {"value": getattr(level, key), "unit": unit, "source": SOURCE}
            for key, unit in LEVEL.items()}}
        for level in device.levels
    ]  # fmt: skip
    return {"name": device.name, "numbers": numbers, "levels": levels}


def rehearsed(run: Recorded) -> Timing:
    """Return the timing of a run by pretrain_llama.py --rehearse, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out, device = Path(folder, "rehearsal.json"), Path(folder, "device.json")
        device.write_text(json.dumps(written(run.cluster.links())), encoding="utf-8")
        words = [*run.argv, "--rehearse", "--rehearse-device", str(device),
                 "--rehearse-json", str(out)]  # fmt: skip
        env = {**os.environ, "WORLD_SIZE": str(run.cluster.gpus)}
        done = subprocess.run([sys.executable, ROOT / "pretrain_llama.py", *words], env=env,
                              capture_output=True, text=True)  # fmt: skip
        if done.returncode or not out.exists():
            raise SystemExit(f"{run.flags}: {done.stdout[-1000:]}{done.stderr[-2000:]}")
        time = json.loads(out.read_text(encoding="utf-8"))["time"]
    return Timing(
        time["step_seconds"], time["mfu"], time["busy_seconds"], time["exposed_seconds"],
        time["bounds"], time["host_seconds"],
    )  # fmt: skip


def compared(only: str) -> Iterator[list[str]]:
    """Yield a row for each layout whose title contains `only`."""
    with tempfile.TemporaryDirectory() as folder, Worker() as worker:
        ethernet = Path(folder, "ethernet.json")
        ethernet.write_text(json.dumps(ETHERNET), encoding="utf-8")
        for name, where, size, batch, flags in LAYOUTS:
            words = f"{flags} --micro-batch-size {size} --global-batch-size {batch}"
            title = f"{name} on {where}, {words}"
            if only not in title:
                continue
            cluster = read_cluster(str(ethernet) if where == "ethernet" else where)
            run = Recorded(read_model(name, 8192), cluster, words)
            play([run], worker)
            whole = rehearsed(run)
            parts = breakdown(run.played), breakdown(whole)
            gap = {key: parts[0][key] - parts[1][key] for key in parts[0]}
            most = max(gap, key=lambda key: abs(gap[key]))
            step = run.played.step_seconds
            yield [
                f"{step:.3f}", f"{whole.step_seconds:.3f}", f"{step / whole.step_seconds - 1:+.2%}",
                f"{most} {1e3 * gap[most]:+.1f}", shlex.join(title.split()),
            ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="layouts with it in their flags")
    rows = [["plan.py s", "--rehearse s", "difference", "most of it, ms", "layout"]]
    for row in compared(parser.parse_args().only):
        rows.append(row)
        print("  ".join(row), file=sys.stderr, flush=True)
    print("\n".join(aligned(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
