#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plan a run: which flags, whether it fits, how long a step takes.

    python tools/plan.py MODEL CLUSTER [--nodes N] [--seq-length N] [--global-batch-size N]
    python tools/plan.py MODEL CLUSTER --why "--tensor-model-parallel-size 8 ..."
    python tools/plan.py MODEL CLUSTER --rank-orders "--tensor-model-parallel-size 8 ..."
    python tools/plan.py MODEL CLUSTER --measure N

MODEL is a size such as 8B, the config.json of Hugging Face, or flags of pretrain_llama.py in quotes
(with --model-file for a fork). CLUSTER is a cluster file, the name of one in
forecast/planner/clusters, or NODESxGPUSxGPU, as in 4x8xh100, or 8xrtx-4090 for one node; 2xcpu is
two ranks of a machine without GPUs. docs/planning.md explains the table, and docs/predictions.md
how far to trust it. --measure runs the first N layouts, for some steps each, on the ranks that you
have. The exit code is 0 if a plan was found, 1 if nothing fits (no layout, or the layout of --why)
or every layout that was run failed, 2 if an argument or a file is wrong.
"""

import argparse
import gc
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, permutations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, find its own parts

from mpu.needs import explain_missing_packages

if __name__ == "__main__":
    explain_missing_packages()

from forecast.planner import measured, own, search, table
from forecast.planner.cluster import Cluster, read_cluster
from forecast.planner.measured import MeasureError, Results
from forecast.planner.model import SEQUENCE, Model, on_cpu, read_model
from forecast.planner.played import Worker
from forecast.planner.recorded import Recorded, play
from forecast.planner.search import Plans
from mpu.grid import ORDER
from mpu.launch import Launch
from tools.command_line import Parser, error_line, integer, number
from training.run.model_profile import make_grid
from training.run.waiting import Progress, waiting
from training.settings.pipeline_schedule import micro_batch_counts
from training.settings.update_rules import RULES

TOKENS, BATCH_TOKENS, TOP = 1e12, 4 * 1024**2, 5
MEASURED, STEPS = Path("runs/measured.json"), 20
RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8")
Question = dict[str, int | str]  # seq-length, global-batch-size, float8 and optimizer
PROGRAM = str(Path(__file__).resolve().parent.parent / "pretrain_llama.py")
MISTAKES = (OSError, ValueError)  # every error of the planner's files is a ValueError


Answer = tuple[list[str], bool]  # lines to print, and whether the requested layout or plan fits


def plans_of(
    model: str,
    cluster: Cluster,
    question: Question,
    flags: str = "",
    progress: Progress | None = None,
) -> Plans:
    """Return every layout. question: the values that are given; the others have defaults.

    flags: may name the optimizer. progress: is updated.
    """
    found = own.with_optimizer(model_of(model, cluster, question), flags)
    batch = batch_of(cluster, question, found)
    dtype = str(question.get("float8", "bf16"))
    return search.plan(found, cluster, batch, dtype, progress)


def model_of(name: str, cluster: Cluster, question: Question) -> Model:
    """Return the named model, as the cluster's ranks run it."""
    length = int(question.get("seq-length", 0))
    found = read_model(name, length, str(question.get("optimizer", "")))
    return on_cpu(found) if cluster.cpu else found


def batch_of(cluster: Cluster, question: Question, model: Model) -> int:
    """Return the sequences of a step: --global-batch-size, or those of BATCH_TOKENS tokens."""
    several = BATCH_TOKENS // model.config.model.seq_length
    return int(question.get("global-batch-size", max(cluster.gpus, several)))


def named_by(model: str, cluster: Cluster, question: Question, flags: str) -> Recorded:
    """Return the layout of these flags, with the plan's batch size if they have none, or with the
    largest of their schedule. Raises PlanError, UsageError.
    """
    named = model_of(model, cluster, question)
    config = own.config_of(named, cluster, flags, batch_of(cluster, question, named))
    one = config.batch.micro_batch_size * config.parallel.data_parallel_size
    words = own.without_sizes(flags)
    words += ["--global-batch-size", str(max(micro_batch_counts(config)) * one)]
    return Recorded(named, cluster, shlex.join(words))


def rank_orders(of: Recorded, progress: Progress) -> Answer:
    """Time a layout in each order of its axes of more than one rank, the usual order first."""
    grid = make_grid(of.config, Launch(0, of.cluster.gpus))
    cut = [name for name in ORDER if getattr(grid, name).size > 1]
    rest = [name for name in ORDER if name not in cut]
    orders = ["-".join([*each, *rest]) for each in permutations(cut)]
    runs = [replace(of, flags=f"{of.flags} --rank-order {order}") for order in orders]
    with Worker() as worker:
        play(runs, worker, progress)
    return table.rank_orders(dict(zip(orders, runs, strict=True))), True


def compare(
    model: str, cluster: Cluster, question: Question, flags: str, top: int, progress: Progress
) -> Answer:
    """Compare the layout of flags with the best of `top`. Raises PlanError, UsageError.

    Sequence length, batch and dtype that the question does not give are those of the flags, for
    both layouts.
    """
    mine = named_by(model, cluster, question, flags)
    config = mine.config
    same: Question = {
        "seq-length": config.model.seq_length, "global-batch-size": config.batch.global_batch_size,
    }  # fmt: skip
    if (dtype := own.dtype_of(config)) != "bf16":
        search.check_dtype(cluster, dtype)
        same["float8"] = dtype
    with Worker() as worker:
        plans = plans_of(model, cluster, {**same, **question}, flags, progress)
        gc.freeze()
        runs = play(chain([mine], plans.chosen(top)), worker, progress)
        best = next((run for run in runs if run is not mine), None)
    return table.why(mine, best), mine.fits


def build_parser() -> Parser:
    """Return the command line's parser."""
    parser = Parser(__doc__)
    parser.add_argument("model", help="a size such as 8B, a config.json, or flags in quotes")
    parser.add_argument("cluster", help="a cluster file, its name, or such as 4x8xh100")
    parser.add_argument("--nodes", type=integer(1, 65_536), help="instead of the cluster file's")
    parser.add_argument(
        "--seq-length", type=integer(1, 1 << 24),
        help=f"tokens per sample; default: that of the model's flags, or {SEQUENCE:,}",
    )  # fmt: skip
    parser.add_argument("--global-batch-size", type=integer(1, 1 << 24), help="samples per step")
    parser.add_argument("--top", type=integer(1, 1000), default=TOP, help="layouts to print")
    parser.add_argument("--float8", choices=RECIPES, help="recipe of the layers' matmuls")
    parser.add_argument(
        "--optimizer", choices=list(RULES), help="default: what the model's flags say, or adam"
    )
    parser.add_argument(
        "--tokens", type=number(1), default=TOKENS, help="tokens for which GPU-hours are given"
    )
    parser.add_argument(
        "--why", metavar="FLAGS", help="compare your layout with the best, term by term"
    )
    parser.add_argument("--rank-orders", metavar="FLAGS", help="compare rank orders of your layout")
    parser.add_argument(
        "--measure", type=integer(1, 1000), metavar="N",
        help="run the first N layouts, on mock data, and rank them by measured speed; layouts in "
             "--measured are not run again",
    )  # fmt: skip
    parser.add_argument(
        "--measure-steps", type=integer(2, 10_000), default=STEPS, metavar="N",
        help=f"steps per layout; the first quarter does not count; default: {STEPS}",
    )  # fmt: skip
    parser.add_argument(
        "--measured", type=Path, default=MEASURED, metavar="FILE",
        help=f"where measurements are kept, for later plans too; default: {MEASURED}",
    )  # fmt: skip
    parser.add_argument(
        "--launch", default="", metavar="COMMAND",
        help="what starts the program on every rank, if torchrun on this machine cannot: see "
             "examples/measure.slurm",
    )  # fmt: skip
    return parser


def answer(args: argparse.Namespace) -> Answer:
    """Return the answer to the command line. Raises MISTAKES."""
    cluster = read_cluster(args.cluster)
    given = {"seq-length": args.seq_length, "global-batch-size": args.global_batch_size,
             "float8": args.float8, "optimizer": args.optimizer}  # fmt: skip
    question: Question = {name: value for name, value in given.items() if value}
    if args.nodes:
        cluster = cluster.of(args.nodes)
    if args.measure and (args.why is not None or args.rank_orders is not None):
        raise MeasureError("--measure cannot be combined with --why or --rank-orders")
    with waiting("planning") as progress:
        if args.rank_orders is not None:
            layout = named_by(args.model, cluster, question, args.rank_orders)
            return rank_orders(layout, progress)
        if args.why is not None:
            return compare(args.model, cluster, question, args.why, args.top, progress)
        start = measured.launcher(cluster, args.launch) if args.measure else []
        results = Results(args.measured)
        with Worker() as worker:
            plans = plans_of(args.model, cluster, question, progress=progress)
            gc.freeze()  # a search makes no garbage, and a recording collects its own
            runs = candidates(plans, max(args.top, args.measure or 0), results)
            best = play(runs, worker, progress)
    fine = bool(best)
    if args.measure:
        fine = measure(plans, best[: args.measure], args.measure_steps, start, results)
    with waiting("planning"):
        known = results.of(plans.model, cluster)
        shown = {run.flags: run for n, run in enumerate(best) if n < args.top or run.flags in known}
        rows = [shown[flags] for flags in measured.ranked(shown, known)]
        return table.ranking(plans, rows, args.tokens, known), fine


def candidates(plans: Plans, top: int, results: Results) -> Iterator[Recorded]:
    """Yield the first layouts of a plan, and its layouts that were measured before."""
    found = set[str]()
    for run in plans.chosen(top):
        found.add(run.flags)
        yield run
    known = results.of(plans.model, plans.cluster)
    if rest := known.keys() - found:  # some may be of other batch sizes
        rest &= {each.flags() for each in plans.layouts}
    for flags in known:
        if flags in rest:
            yield Recorded(plans.model, plans.cluster, flags)


def measure(
    plans: Plans, layouts: Sequence[Recorded], steps: int, start: Sequence[str], results: Results
) -> bool:
    """Run layouts, and store the measurements; return whether one of them ran.

    start: the words that start a program on every rank. Layouts that ran before are not run again.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the ranks end, too
    signal.signal(signal.SIGHUP, signal.default_int_handler)
    model, cluster = plans.model, plans.cluster
    ran = {flags for flags, run in results.of(model, cluster).items() if not run.error}
    todo = [each for each in layouts if each.flags not in ran]
    fine = len(todo) < len(layouts)
    if fine:
        say(f"{len(layouts) - len(todo)} of {len(layouts)} layouts were measured before, in "
            f"{results.path}: give another --measured to measure them again")  # fmt: skip
    for place, each in enumerate(todo, 1):
        what = f"layout {place} of {len(todo)}"
        words = [*start, PROGRAM, *shlex.split(f"{each.command} {table.EXAMPLE}")]
        with waiting(what) as progress:
            progress.begin("", steps, "steps")
            run = measured.measure(
                model, cluster, each.flags, words,
                steps=steps, folder=results.path.parent, progress=progress,
            )  # fmt: skip
        results.add(run)
        fine |= not run.error
        rate = f"{run.tokens_per_second / cluster.gpus:,.0f} tokens/s/GPU"
        how = f"failed: {run.error}" if run.error else rate
        say(f"{what}: {how}: {table.described(each.config)}")
    return fine


def say(line: str) -> None:
    """Print a line about the work to stderr, apart from the answer."""
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    """Run the command line; return the exit code."""
    args = build_parser().parse_args(argv)
    # a search makes millions of small objects and no reference cycles: looking for them would take
    # a quarter of its time
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    try:
        lines, fits = answer(args)
    except MISTAKES as error:
        print(error_line("plan.py", error), file=sys.stderr)
        return 2
    print("\n".join(wrapped for line in lines for wrapped in table.wrapped(line)))
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
