#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time fifteen layouts by the planner and by the rehearsal, and print where the two differ.

    python benchmarks/plan_clocks.py [--only TEXT] [--parts]

Both read the same device file and the same costs of kernels, collectives and messages
(tools/rehearsal/roofline.py, links.py). The rehearsal plays every launch and transfer that the
trainer asks for; the planner adds up a coarse list by formulas. So each difference is of what that
list leaves out, or of a formula in place of playing. Four layers of Llama 3 8B, rank 0, in ms. A
line is the table of docs/planning.md; with --parts all parts of a step are printed, which add up to
it. The last three have experts. It takes about six minutes.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.fused_launches import report  # noqa: E402
from tools.planner import own, search, table  # noqa: E402
from tools.planner.cluster import read_cluster  # noqa: E402
from tools.planner.model import read_model  # noqa: E402

MODEL = """
    --num-layers 4 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --vocab-size 128256 --swiglu
    --untie-embeddings-and-output-weights
"""
EXPERTS = "--num-experts 8 --moe-router-topk 2"  # each as wide as the MLP above
SEQUENCE, CLUSTER, NODE = 8192, "h100_8_nodes", 8
TP, PP, CP = (
    f"--{name}-model-parallel-size" for name in ("tensor", "pipeline", "context")
)  # fmt: skip
CP = "--context-parallel-size"
ZERO, BATCH, OVERLAP = "--zero-stage", "--global-batch-size", (
    "--overlap-grad-reduce --overlap-param-gather"
)  # fmt: skip
EP = (
    f"{EXPERTS} --expert-tensor-parallel-size 1 --expert-model-parallel-size 8 "
    "--moe-token-dispatcher-type alltoall"
)
DURING = "--overlap-moe-expert-parallel-comm"
LAYOUTS = [  # ranks, flags
    (8, f"--overlap-grad-reduce {BATCH} 16"),
    (8, f"{ZERO} 1 {OVERLAP} {BATCH} 16"),
    (8, f"{ZERO} 3 {OVERLAP} {BATCH} 16"),
    (8, f"{TP} 2 --sequence-parallel {ZERO} 1 {OVERLAP} {BATCH} 8"),
    (8, f"{TP} 8 --sequence-parallel {BATCH} 2"),
    (8, f"{TP} 8 --sequence-parallel --tp-comm-overlap ring {BATCH} 2"),
    (8, f"{CP} 2 {ZERO} 1 {OVERLAP} {BATCH} 8"),
    (16, f"{TP} 8 --sequence-parallel {PP} 2 {BATCH} 8"),
    (16, f"{TP} 8 --sequence-parallel {PP} 2 --pipeline-schedule zb-h1 {BATCH} 8"),
    (16, f"{TP} 4 --sequence-parallel {ZERO} 1 {OVERLAP} --recompute-granularity full "
         f"--recompute-method uniform --recompute-num-layers 1 {BATCH} 8"),
    (8, f"{TP} 2 --sequence-parallel {ZERO} 1 {OVERLAP} {BATCH} 8 --optimizer muon"),
    (8, f"{ZERO} 1 {OVERLAP} {BATCH} 16 --optimizer-state-offload"),
    (8, f"{EP} {ZERO} 1 {OVERLAP} {BATCH} 64"),
    (8, f"{EP} {DURING} {ZERO} 1 {OVERLAP} {BATCH} 64"),
    (16, f"{EP} {DURING} {PP} 2 {ZERO} 1 {OVERLAP} {BATCH} 64"),
]  # fmt: skip
SHORT = {  # of flags, in the table
    OVERLAP: "overlap", "--overlap-grad-reduce": "overlap", TP: "tp", PP: "pp", CP: "cp",
    ZERO: "ZeRO", BATCH: "batch", " --sequence-parallel": "", "--pipeline-schedule ": "",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": "recompute",
    "--tp-comm-overlap ring": "ring", "--optimizer muon": "Muon",
    "--optimizer-state-offload": "state offload", EP: "ep 8", DURING: "overlapped",
}  # fmt: skip
PARTS = {  # of a row: kinds and axes of the rehearsal, terms of the planner's breakdown
    "matmul": ("matmul",),
    "attention": ("attention",),
    "passes": ("passes",),
    "update": ("update", "tp_dp_cp_shard", "ep_edp_shard"),  # and matrices to their owners
    "tp": ("tp", "tp_kv"),
    "cp": ("cp", "cp_a2a", "cp_p2p"),
    "ep": ("ep",),
    "dp": ("dp_cp", "dp", "dp_cp_shard", "dp_cp_replicate", "edp", "embd"),
    "pp": ("pp", "pp_back"),
    "bubble": ("bubble",),
    "host": ("host", "host link", "copies"),
    "rest": (),
}


def planned(
    world: int, flags: str, name: str = MODEL, sequence: int = SEQUENCE
) -> dict[str, float]:
    """Return the parts of a step by the planner, in seconds. Their sum is the step."""
    name = f"{name} {EXPERTS}" if EXPERTS in flags else name
    model, cluster = read_model(name, sequence), read_cluster(CLUSTER).of(world // NODE)
    model = own.with_optimizer(model, flags)
    each = own.layout_of(own.config_of(model, cluster, f"--micro-batch-size 1 {flags}"))
    plans = search.evaluate(model, cluster, [each])
    told = dict(table.breakdown(plans, 0).seconds)
    many = each.micro_batches * float(plans.times.jitter[0])
    for kind in ("matmul", "attention"):
        told[kind] = many * float(getattr(plans.times, kind)[0])
    told["passes"] = told.pop("compute") - told["matmul"] - told["attention"]
    return told


def rehearsed(world: int, flags: str) -> dict[str, float]:
    """Return the parts of a step by the rehearsal, in seconds."""
    words = ["--num-layers=4", *flags.split(), "--rehearse-device=h100"]
    return seconds_of(report(ROOT, words, True, world)["time"])


def seconds_of(time: dict[str, Any]) -> dict[str, float]:
    """Return the parts of a step, and the step, of a rehearsal's report."""
    told = {**time["busy_seconds"], **time["exposed_seconds"], "host": time["host_seconds"]}
    return told | {"step": time["step_seconds"]}


def parts(told: dict[str, float]) -> dict[str, float]:
    """Return PARTS of a step; rest: what no other has."""
    named = {part: sum(told.get(name, 0.0) for name in {part, *names})
             for part, names in PARTS.items()}  # fmt: skip
    step = told.get("step", sum(named.values()))
    known = {name for part, names in PARTS.items() for name in (part, *names)} | {"step"}
    named["rest"] = step - sum(named.values())
    assert not told.keys() - known, told.keys() - known
    return {"step": step, **named}


Row = dict[str, float]


def compared(world: int, flags: str) -> tuple[Row, Row, Row]:
    """Return PARTS of a step by the planner and by the rehearsal, and their difference."""
    both = parts(planned(world, flags)), parts(rehearsed(world, flags))
    return *both, {name: both[0][name] - both[1][name] for name in both[0]}


def lines(layouts: list[tuple[int, str]]) -> Iterator[str]:
    """Yield the table: a row a layout, with the parts that differ by most."""
    yield "| ranks, layout | planner, ms | rehearsal, ms | difference | most of it, ms |"
    yield "|---|---|---|---|---|"
    for world, flags in layouts:
        ours, played, left = compared(world, flags)
        most = sorted(PARTS, key=lambda part: -abs(left[part]))[:2]
        why = ", ".join(f"{part} {1e3 * left[part]:+.1f}" for part in most)
        step = f"{1e3 * ours['step']:.1f} | {1e3 * played['step']:.1f}"
        share = left["step"] / played["step"]
        for flag, word in SHORT.items():
            flags = flags.replace(flag, word)
        yield f"| {world}, {flags} | {step} | {share:+.1%} | {why} |"


def lines_of_parts(layouts: list[tuple[int, str]]) -> Iterator[str]:
    """Yield the table of all parts: three rows a layout."""
    yield "| ranks, layout | by | step | " + " | ".join(PARTS) + " |"
    yield "|---|---|---" + "|---" * len(PARTS) + "|"
    for world, flags in layouts:
        name = f"{world}, `{flags}`"
        for who, row in zip(("planner", "rehearsal", "difference"), compared(world, flags),
                            strict=True):  # fmt: skip
            sign = "+" if who == "difference" else ""
            cells = (f"{1e3 * value:{sign}.1f}" if abs(value) >= 5e-5 else "" for value in
                     row.values())  # fmt: skip
            yield f"| {name} | {who} | {' | '.join(cells)} |"
            name = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="layouts that contain this")
    parser.add_argument("--parts", action="store_true", help="print all parts of each step")
    args = parser.parse_args()
    chosen = [each for each in LAYOUTS if args.only in each[1]]
    for line in lines_of_parts(chosen) if args.parts else lines(chosen):
        print(line, flush=True)


if __name__ == "__main__":
    main()
