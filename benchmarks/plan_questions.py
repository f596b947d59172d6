#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Answer ten questions of people who plan a run, and print published layouts for comparison.

    python benchmarks/plan_questions.py [--only TEXT]

For each question the recommended layout is printed beside the layout of a public run of the same or
the most similar question. The layout's command is then passed to pretrain_llama.py --dry-run, which
must accept it; its GB are printed beside the plan's. The program takes about ten minutes.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.plan_clocks import ETHERNET  # noqa: E402
from forecast.planner import table  # noqa: E402
from forecast.planner.cluster import read_cluster  # noqa: E402
from forecast.planner.played import Worker  # noqa: E402
from forecast.planner.recorded import Recorded, play  # noqa: E402
from forecast.planner.search import recommended  # noqa: E402
from tools.plan import TOP, plans_of  # noqa: E402

TITAN = "torchtitan's benchmarks"


class Question(NamedTuple):
    """A model, a cluster, further options of the plan, and the layout of a public run."""

    model: str
    cluster: str
    asked: dict[str, int | str]
    published: str


QUESTIONS = [
    Question("8B", "8xh100", {"global-batch-size": 128},
             f"FSDP over 8, b 1, selective recomputation ({TITAN})"),
    Question("70B", "8x8xh100", {"global-batch-size": 128},
             "tp 4, pp 8 x 5, b 1, in float8 (Megatron-Bridge 25.11)"),
    Question("405B", "128x8xh100", {"global-batch-size": 1024},
             "tp 8, pp 8 x 8, cp 2, b 1, in float8 (Megatron-Bridge 25.11)"),
    Question("13B", "2x8xa100-40", {"seq-length": 2048, "global-batch-size": 512},
             "FSDP over 16, full recomputation (llm-foundry's tables, MPT-13B)"),
    Question("8B", "8xh100", {"seq-length": 131072, "global-batch-size": 8},
             f"cp 4, FSDP, full recomputation, in float8 ({TITAN})"),
    Question("Mixtral", "4x8xh100", {"seq-length": 4096, "global-batch-size": 256},
             "ep 8, pp 4 x 8 on 64 GPUs (Megatron-LM's README of experts)"),
    Question("1B", "1xrtx-4090", {"seq-length": 2048, "global-batch-size": 64},
             "none of this model on this card was found"),
    Question("70B", "8xh200", {"global-batch-size": 64},
             "none without LoRA was found; ZeRO-Offload (arXiv 2101.06840) is the idea"),
    Question("8B", "ethernet", {"global-batch-size": 512},
             "none was found; two nodes of A100 at 100 Gb/s are the slowest"),
    Question("3B", "8xh100", {"float8": "tensorwise", "global-batch-size": 256},
             f"of 8B: FSDP over 8, float8 1.25 to 1.28 times as fast ({TITAN}, torchao)"),
]  # fmt: skip


def dry_run(run: Recorded) -> str:
    """Return the GB that --dry-run prints for a layout's command. Raises SystemExit."""
    command = table.command_lines(run)[0].replace("\\\n", " ")
    words = shlex.split(command.partition("pretrain_llama.py")[2])
    words += ["--dry-run", "--rehearse-device", run.cluster.device]
    env = {**os.environ, "WORLD_SIZE": str(run.cluster.gpus)}
    done = subprocess.run([sys.executable, str(ROOT / "pretrain_llama.py"), *words], env=env,
                          capture_output=True, text=True)  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{command}: {done.stdout[-500:]}{done.stderr[-1000:]}")
    totals = re.findall(r"^ *total +(.*)$", done.stdout, re.MULTILINE)
    sizes = [float(size) for line in totals for size in re.findall(r"([\d.]+) GB", line)]
    return f"{max(sizes):.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="questions with it")
    only = parser.parse_args().only
    print("| question | the plan's | s | tokens/s/GPU | GB | --dry-run | published | took |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        ethernet = Path(folder, "ethernet.json")
        ethernet.write_text(json.dumps(ETHERNET), encoding="utf-8")
        for model, where, asked, published in QUESTIONS:
            title = f"{model} on {where}" + "".join(f", {k} {v}" for k, v in asked.items())
            if only not in title:
                continue
            begin = time.perf_counter()
            cluster = read_cluster(str(ethernet) if where == "ethernet" else where)
            with Worker() as worker:
                best = recommended(play(plans_of(model, cluster, asked).chosen(TOP), worker))
            took = time.perf_counter() - begin
            print(f"| {title} | {table.described(best.config)} | {best.played.step_seconds:.1f} | "
                  f"{best.rate:,.0f} | {best.bytes / 1e9:.1f} | {dry_run(best)} | {published} | "
                  f"{took:.0f} s |", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
