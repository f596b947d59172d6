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
    python tools/explain.py --dp 2 --model-file my_model.py --grad-reduce-in-bf16

The flags are those of pretrain_llama.py; the ones that are not given are those of a small Llama 3
on mock data. It starts tp x cp x dp x pp processes on this machine, builds the model with
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

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import pretrain_llama
from forecast.explainer.ops import Operations
from forecast.explainer.text import head, in_order, pipeline, rule, story, sums
from forecast.explainer.timeline import Streams, streams, streams_of
from forecast.explainer.trace import Explainer
from forecast.rehearsal.run import loader
from forecast.traffic import Totals, totals, traffic
from model.load import own_flags
from mpu.comm.collectives import gather_bytes
from mpu.grid import Grid
from mpu.launch import Launch
from mpu.layers.float8.delayed import AmaxHistory
from mpu.layers.float8.rows import BLOCKS
from mpu.pipeline.schedules import CHUNKS
from mpu.torch_private import running_node
from pretrain_llama import build, train_step
from tools.command_line import Parser, error_line, integer
from tools.pictures.streams import draw
from tools.pictures.style import check_name
from training.flags.foreign import uses_of
from training.flags.parse import model_file, parse, read
from training.run.model_profile import make_grid
from training.run.pipeline_stages import describe_stages
from training.run.stop import Agreement
from training.run.waiting import waiting
from training.settings.config import Config
from training.settings.pipeline_schedule import VIRTUAL

MOST_RANKS = 16
SHORT = {
    "--tp": "--tensor-model-parallel-size",
    "--cp": "--context-parallel-size",
    "--pp": "--pipeline-model-parallel-size",
    "--ep": "--expert-model-parallel-size",
    "--zero": "--zero-stage",
    "--schedule": "--pipeline-schedule",
    "--layers": "--num-layers",
    "--dispatcher": "--moe-token-dispatcher-type",
    "--tied": "--untie-embeddings-and-output-weights=false",
    "--no-sequence-parallel": "--sequence-parallel=false",
    "--shared-expert": "--moe-shared-expert-intermediate-size=80",
}
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
        batches = loader(config, grid).next_global_batch(0, config.batch.global_batch_size)
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
    """Return the config of the step for a command line, and the file of --timeline.

    The sizes that are not given fit the layout, and gradient buckets are small. Raises ValueError
    with one sentence.
    """
    names = "".join(f"\n  {short:<24}{flag}" for short, flag in SHORT.items())
    parser = Parser(__doc__, epilog=f"and each flag of pretrain_llama.py; short names:{names}")
    parser.add_argument("--dp", type=integer(1), default=1, help="data-parallel ranks")
    parser.add_argument("--micro-batches", type=integer(1), help="default: one per pipeline rank")
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="draw the step: .svg or .png")
    a, typed = parser.parse_known_args(argv)
    if a.timeline:
        check_name(a.timeline)
    parts = [word.partition("=") for word in typed]
    words = [SHORT.get(name, name) + equals + value for name, equals, value in parts]
    extra = own_flags(model_file(words))
    given = read(words, extra)[0]
    if given.keys() & {"--device", "--global-batch-size"}:
        raise ValueError("--device is cpu here, and --micro-batches gives --global-batch-size")
    tp, cp, pp = (given.get(SHORT[axis], 1) for axis in ("--tp", "--cp", "--pp"))
    if (world := tp * cp * a.dp * pp) > MOST_RANKS:
        raise ValueError(
            f"--tp {tp} x --cp {cp} x --dp {a.dp} x --pp {pp} is {world} processes on this machine,"
            f" and at most {MOST_RANKS} are allowed: 2 ranks per axis show the same order of "
            "collectives"
        )
    groups = -(-2 // tp) * tp
    chunks = given.get(VIRTUAL, CHUNKS[given.get("--pipeline-schedule", "1f1b")])
    rows = given.get("--micro-batch-size", 2)
    tiny = {
        "--num-layers": max(2, pp * chunks),
        "--hidden-size": 32 * groups,
        "--ffn-hidden-size": 80 * groups,
        "--num-attention-heads": 2 * groups,
        "--num-query-groups": groups,
        "--group-query-attention": True,
        "--untie-embeddings-and-output-weights": True,
        "--seq-length": -(-16 // tp) * tp * cp,
        "--vocab-size": 500,
        "--mock-data": True,
        "--micro-batch-size": rows,
        "--global-batch-size": rows * a.dp * (a.micro_batches or pp),
        VIRTUAL: chunks,
        "--sequence-parallel": True,
        "--ddp-bucket-size": 16384,
        "--overlap-grad-reduce": True,
        "--overlap-param-gather": given.get("--zero-stage", 0) > 0,
        "--train-iters": 1,
        "--lr": 1e-3,
        "--device": "cpu",
    }
    if recipe := given.get("--fp8-recipe"):
        tiny |= {"--bf16": True, "--fp8-format": "hybrid"}
        if block := BLOCKS.get(recipe):  # elements of a scale
            tiny |= {"--hidden-size": block * groups, "--ffn-hidden-size": 2 * block * groups}
            length = block * tp * cp if cp > 1 else block * tp // 2
            tiny |= {"--kv-channels": block, "--seq-length": length}
    if "--num-experts" in given:
        tiny |= {"--moe-router-force-load-balancing": True, "--expert-tensor-parallel-size": 1}
    chosen = {*given, *(use.dashed for use in uses_of(words))}  # also a switch that is false
    rest = [f"{flag}={value}" for flag, value in tiny.items() if flag not in chosen]
    return parse([*rest, *words], world, extra), a.timeline


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
