#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run one tiny training step and print its collectives and messages: ranks, bytes and purpose.

    python tools/explain.py --tp 2            (make explain TP=2)
    python tools/explain.py --tp 2 --dp 2 --recompute-granularity full --micro-batches 2
    python tools/explain.py --pp 2 --schedule zb-v --micro-batches 3
    python tools/explain.py --dp 2 --zero 3
    python tools/explain.py --tp 2 --dp 2 --zero 1 --optimizer muon
    python tools/explain.py --cp 2 --cp-comm-type all_gather
    python tools/explain.py --tp 2 --dp 2 --timeline step.svg

It starts tp x cp x dp x pp processes on this machine, builds a small Llama with
pretrain_llama.build and runs pretrain_llama.train_step. The output is observed, not computed: a
trace of the grid records each collective and message, with the label that its caller gave it, and a
TorchDispatchMode records the operations around it. At the end, the totals are compared with those
of a recording of the step without ranks (forecast/traffic.py). At ZeRO stages 1 to 3 the step
printed is the second one.
"""

import json
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, find pretrain_llama

from mpu.needs import explain_missing_packages

if __name__ == "__main__":
    explain_missing_packages()

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import pretrain_llama
from forecast.explainer.ops import Operations
from forecast.explainer.text import head, in_order, pipeline, rule, story, sums
from forecast.explainer.timeline import Streams, streams, streams_of
from forecast.explainer.trace import Explainer
from forecast.traffic import Totals, totals, traffic
from mpu.comm.collectives import gather_bytes
from mpu.grid import ORDER, Grid
from mpu.launch import Launch
from mpu.layers.context_attention import COMM_TYPES
from mpu.layers.float8.delayed import AmaxHistory
from mpu.layers.float8.rows import BLOCKS, RECIPES
from mpu.pipeline.schedules import CHUNKS, NAMES
from mpu.torch_private import running_node
from pretrain_llama import build, train_step
from tools.command_line import Parser, error_line
from tools.pictures.streams import draw
from tools.pictures.style import check_name
from training.data.batch import Batch, DocumentRules, make_batch
from training.data.context_part import context_part
from training.data.mock import MockDataset
from training.flags.parse import parse
from training.run.model_profile import make_grid
from training.run.pipeline_stages import describe_stages
from training.run.stop import Agreement
from training.run.waiting import waiting
from training.settings import batch_size
from training.settings.config import Config
from training.settings.update_rules import RULES

MOST_RANKS = 16
ABOUT = (
    "What is below one another happens at the same time. The order was observed; lengths are not "
    "times. scatter: reduce-scatter."
)
NOTHING = ["", "One rank: every collective is the identity, and nothing is sent."]


class Explained(NamedTuple):
    """The traffic of one step, as counted and as stated by forecast/traffic.py, and its text.

    equal: whether the two agree, on every rank of this pipeline. streams: of each of its ranks, for
    --timeline.
    """

    counted: Totals
    stated: Totals
    equal: bool
    text: str
    streams: list[Streams]


def tiny(
    tp: int,
    dp: int,
    pp: int = 1,
    *,
    schedule: str = "1f1b",
    layers: int | None = None,
    micro_batches: int | None = None,
    sequence_parallel: bool = True,
    tied: bool = False,
    zero: int = 0,
    ahead: bool = True,
    overlap: bool = True,
    cp: int = 1,
    more: Sequence[str] = (),
) -> Config:
    """Return the config of a small Llama 3 in the given layout, with small gradient buckets.

    Defaults: two layers, or one a stage; a micro-batch for each pipeline rank; gradients are summed
    during backward (overlap); weights are gathered ahead of their use (ahead, with `zero`). `more`
    adds flags of pretrain_llama.py. Raises UsageError if the layout does not work.
    """
    groups, chunks = -(-2 // tp) * tp, CHUNKS.get(schedule, 1)
    block = max(BLOCKS.get(word, 0) for word in ("", *more))  # elements of a scale, in float8
    sizes = {
        "--num-layers": layers or max(2, pp * chunks),
        "--hidden-size": 32 * groups,
        "--ffn-hidden-size": 80 * groups,
        "--num-attention-heads": 2 * groups,
        "--num-query-groups": groups,
        "--seq-length": -(-16 // tp) * tp * cp,
        "--vocab-size": 500,
        "--micro-batch-size": 2,
        "--global-batch-size": 2 * dp * (micro_batches or pp),
        "--tensor-model-parallel-size": tp,
        "--context-parallel-size": cp,
        "--pipeline-model-parallel-size": pp,
        "--pipeline-schedule": schedule,
        "--num-virtual-stages-per-pipeline-rank": chunks,
        "--ddp-bucket-size": 16384,
        "--train-iters": 1,
        "--lr": 1e-3,
        "--device": "cpu",
    }
    if block:
        sizes |= {"--hidden-size": block * groups, "--ffn-hidden-size": 2 * block * groups}
        length = block * tp * cp if cp > 1 else block * tp // 2
        sizes |= {"--kv-channels": block, "--seq-length": length}
    switches = ["--mock-data", "--group-query-attention"]
    if overlap:
        switches.append("--overlap-grad-reduce")
    if zero:
        sizes["--zero-stage"] = zero
        switches += ["--overlap-param-gather"] if ahead else []
    if not tied:
        switches.append("--untie-embeddings-and-output-weights")
    if sequence_parallel:
        switches.append("--sequence-parallel")
    values = [str(word) for pair in sizes.items() for word in pair]
    return parse([*values, *switches, *more], tp * cp * dp * pp)


def micro_batches(config: Config, grid: Grid) -> list[Batch]:
    """Return this rank's part of mock micro-batches."""
    m, b = config.model, config.batch.micro_batch_size
    assert m.vocab_size is not None, "tiny gives it"
    data = MockDataset("train", m.seq_length, config.run.seed, m.vocab_size, None)
    count = batch_size.micro_batches(config, 0)
    firsts = range(grid.dp.rank * count * b, (grid.dp.rank + 1) * count * b, b)
    rows = [np.stack([data.sample(first + i) for i in range(b)]) for first in firsts]
    return [
        context_part(make_batch(each, DocumentRules(), first), grid.cp.rank, grid.cp.size)
        for each, first in zip(rows, firsts, strict=True)
    ]


def explain(config: Config, grid: Grid) -> Explained:
    """Run one step over a connected grid and return its traffic. Every rank calls it.

    At ZeRO levels 1 to 3 it is the second step: a gather of weights is in flight when it begins,
    and level 3 has recorded the order in which it uses them.
    """
    explainer = Explainer()
    grid.traced(explainer)
    try:
        run = build(config, grid, torch.device("cpu"), explainer.monitor)
        explainer.know(run)
        batches = micro_batches(config, grid)
        if run.sink.zero_stage or run.sink.state_of(AmaxHistory):  # the first step differs
            train_step(run, batches, config.optimizer.lr)
            run.iteration += 1
        explainer.begin(len(batches))
        with Operations(explainer.ran):
            _, _, found_inf = train_step(run, batches, config.optimizer.lr)
            run.monitor.action = f"the end of iteration {run.iteration + 1}"
            agreement = Agreement(grid.world)
            agreement.ask(False, False, found_inf)
            agreement.close()
    finally:
        grid.traced(None)
    rows = traffic(config, pretrain_llama, grid.pp.rank, member=grid.rank)
    stated = totals(rows)
    counted: Totals = {}
    for event in explainer.events:
        times, size = counted.get((event.axis, event.verb), (0, 0))
        counted[event.axis, event.verb] = times + 1, size + event.sent
    equal, level = counted == stated, run.sink.zero_stage
    assert explainer.buckets is not None
    own = explainer.buckets.contents_of_buckets()
    if grid.pp.size == 1:
        lines = [*head(config, level), *own, *story(explainer, False)]
        lines += sums(counted, rows) if explainer.events else NOTHING
        seen = [streams(explainer)]
        return Explained(counted, stated, equal, "\n".join(lines), seen)
    who = f"pipeline rank {grid.pp.rank}"
    lines = ["", rule(f"{who} (rank {grid.rank}): {describe_stages(run.model.stages)}", "=")]
    lines += [*own, *story(explainer, True), *sums(counted, rows, who)]
    sent = [e.payload.kind for e in explainer.events if e.payload and e.verb == "send"]
    mine = {
        "order": in_order(explainer, len(run.model.stages)),
        "story": lines,
        "sent": [sent.count("F"), sent.count("B")],
        "equal": equal,
        "streams": streams(explainer, who),
    }
    every = [json.loads(each) for each in gather_bytes(json.dumps(mine).encode(), grid.pp)]
    equal, lines = pipeline(config, every)
    seen = [streams_of(own["streams"]) for own in every]
    return Explained(counted, stated, equal, "\n".join([*head(config, level), *lines]), seen)


def _rank(rank: int, config: Config, port: int) -> None:
    """Run one rank, in a process of its own; rank 0 writes the text to the store."""
    torch.set_num_threads(1)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    world, timeout = config.parallel.world_size, timedelta(seconds=120)
    grid = make_grid(config, Launch(rank, world, rank, world))
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)

    def now(what: str) -> None:
        if rank == 0:
            store.set("now", what)

    now("connecting")
    grid.connect(torch.device("cpu"), dist.PrefixStore("weft", store), timeout)
    now("running the step")
    found = explain(config, grid)
    if rank == 0:
        store.set("equal", str(int(found.equal)))
        store.set("text", found.text)
        store.set("streams", json.dumps(found.streams))
    grid.close()
    os._exit(0)  # without the interpreter's shutdown; see training/run/process.py, as_process


def read_arguments(argv: Sequence[str] | None) -> tuple[Config, Path | None]:
    """Return the config of the step for a command line, and the file of --timeline. Raises
    ValueError with one sentence.
    """
    parser = Parser(__doc__)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks")
    parser.add_argument("--cp-comm-type", choices=COMM_TYPES, default="p2p", help="default: p2p")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel ranks")
    parser.add_argument("--pp", type=int, default=1, help="pipeline ranks")
    parser.add_argument("--rank-order", default="-".join(ORDER), help="axes, fastest first")
    parser.add_argument("--schedule", choices=NAMES, default="1f1b", help="pipeline schedule")
    parser.add_argument("--zero", type=int, choices=range(4), default=0, help="ZeRO stage")
    parser.add_argument("--layers", type=int, help="default: 2, or one per stage")
    parser.add_argument("--micro-batches", type=int, help="default: one per pipeline rank")
    parser.add_argument("--tied", action="store_true", help="tie embedding and head")
    parser.add_argument("--no-sequence-parallel", action="store_true")
    parser.add_argument("--recompute-granularity", choices=("selective", "full"))
    parser.add_argument(
        "--fp8-recipe", choices=[*RECIPES], help="layers' matmuls in float8, the rest in bf16"
    )
    parser.add_argument("--num-experts", type=int, help="per layer; tokens are spread evenly")
    parser.add_argument("--ep", type=int, default=1, help="expert-parallel ranks")
    parser.add_argument("--dispatcher", default="allgather", help="--moe-token-dispatcher-type")
    parser.add_argument("--optimizer", choices=[*RULES], default="adam", help="default: adam")
    parser.add_argument(
        "--overlap-moe-expert-parallel-comm", action="store_true",
        help="run a forward during a backward; needs --micro-batches of at least 2",
    )  # fmt: skip
    parser.add_argument("--shared-expert", action="store_true", help="an expert for every token")
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="draw the step: .svg or .png")
    a = parser.parse_args(argv)
    if a.timeline:
        check_name(a.timeline)
    for flag in ("tp", "cp", "dp", "pp", "ep", "layers", "micro_batches"):
        if getattr(a, flag) is not None and getattr(a, flag) < 1:
            raise ValueError(f"--{flag.replace('_', '-')} {getattr(a, flag)} must be at least 1")
    if (world := a.tp * a.cp * a.dp * a.pp) > MOST_RANKS:
        sizes = " x ".join(f"--{axis} {getattr(a, axis)}" for axis in ("tp", "cp", "dp", "pp"))
        raise ValueError(
            f"{sizes} is {world} processes on this machine, and at most {MOST_RANKS} are allowed: "
            "2 ranks per axis show the same order of collectives"
        )
    more = ["--cp-comm-type", a.cp_comm_type, "--rank-order", a.rank_order]
    if a.recompute_granularity:
        more += ["--recompute-granularity", a.recompute_granularity]
    if a.fp8_recipe:
        more += ["--bf16", "--fp8-format", "hybrid", "--fp8-recipe", a.fp8_recipe]
    if a.num_experts:
        more += ["--num-experts", str(a.num_experts), "--moe-router-force-load-balancing"]
        more += ["--moe-token-dispatcher-type", a.dispatcher, "--expert-tensor-parallel-size", "1"]
        more += ["--moe-shared-expert-intermediate-size", "80"] * a.shared_expert
    if a.overlap_moe_expert_parallel_comm:
        more.append("--overlap-moe-expert-parallel-comm")
    if a.ep > 1:
        more += ["--expert-model-parallel-size", str(a.ep)]
    if a.optimizer != "adam":
        more += ["--optimizer", a.optimizer]
    config = tiny(
        a.tp,
        a.dp,
        a.pp,
        schedule=a.schedule,
        layers=a.layers,
        micro_batches=a.micro_batches,
        sequence_parallel=not a.no_sequence_parallel,
        tied=a.tied,
        zero=a.zero,
        cp=a.cp,
        more=more,
    )
    return config, a.timeline


def draw_timeline(text: str, seen: Sequence[Any], path: Path) -> None:
    """Draw the streams of `Explained`, as objects or as JSON, with the title of its text."""
    title = text.partition("\n")[0].partition(":")[0]
    draw([streams_of(each) for each in seen], path, title=title, subtitle=ABOUT)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a step's traffic; return 0 if traffic.py agrees, 1 if not, 2 for wrong flags."""
    try:
        config, picture = read_arguments(argv)
        running_node()
    except ValueError as error:
        print(error_line("tools/explain.py", error), file=sys.stderr)
        return 2
    world = config.parallel.world_size
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def state() -> str:
        return store.get("now").decode() if store.check(["now"]) else "importing torch"

    with waiting(f"one step on {world} rank(s)", state):
        preloaded = ["tools.forkserver_start", "tools.explain"]
        mp.get_context("forkserver").set_forkserver_preload(preloaded)
        args = (config, store.port)
        mp.start_processes(_rank, args, world, daemon=True, start_method="forkserver")
    text = store.get("text").decode()
    print(text)
    if picture:
        draw_timeline(text, json.loads(store.get("streams")), picture)
        print(f"\ndrawn: {picture}")
    return 0 if store.get("equal") == b"1" else 1


if __name__ == "__main__":
    sys.exit(main())
