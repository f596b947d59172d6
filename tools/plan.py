#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plan a run: which flags, whether it fits, how long a step takes.

    python tools/plan.py MODEL CLUSTER [--nodes N] [--seq-length N] [--global-batch-size N]
    python tools/plan.py MODEL CLUSTER --why "--tensor-model-parallel-size 8 ..."
    python tools/plan.py MODEL CLUSTER --rank-orders "--tensor-model-parallel-size 8 ..."

MODEL is a size such as 8B, the config.json of Hugging Face, or flags of pretrain_llama.py in quotes
(with --model-file for a fork). CLUSTER is a file like those of tools/planner/clusters, or a name of
theirs, or a number of nodes, of GPUs of one, and a GPU: 4x8xh100, 8xrtx-4090. docs/planning.md
explains the table and how far to trust it. The exit code is 0 where a plan was found, 1 where
nothing fits (no layout, or the layout of --why), 2 where an argument or a file is wrong.
"""

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, find its own parts

from mpu.needs import explain_missing_packages

if __name__ == "__main__":
    explain_missing_packages()

from tools.command_line import Parser, error_line, integer, number
from tools.planner import own, picture, rank_order, search, table
from tools.planner.cluster import Cluster, read_cluster
from tools.planner.model import read_model
from tools.planner.played import Worker
from tools.planner.recorded import Recorded, play
from tools.planner.search import Plans
from tools.waiting import Progress, waiting
from training.update_rules import RULES

TOKENS, SEQUENCE, BATCH_TOKENS, TOP = 1e12, 8192, 4 * 1024**2, 5
RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8")
Question = dict[str, int | str]  # seq-length, global-batch-size, float8 and optimizer
MISTAKES = (OSError, ValueError)  # every error of the planner's files is a ValueError


Answer = tuple[list[str], bool]  # lines to print, and whether what was asked for fits


def plans_of(
    model: str,
    cluster: Cluster,
    question: Question,
    flags: str = "",
    progress: Progress | None = None,
) -> Plans:
    """Return every layout. question: what is asked; the rest has defaults.

    flags: may name the optimizer. progress: is told what is done.
    """
    sequence = int(question.get("seq-length", SEQUENCE))
    batch = batch_of(cluster, question, sequence)
    found = read_model(model, sequence, str(question.get("optimizer", "")))
    found = own.with_optimizer(found, flags)
    dtype = str(question.get("float8", "bf16"))
    return search.plan(found, cluster, batch, dtype, progress)


def batch_of(cluster: Cluster, question: Question, sequence: int) -> int:
    """Return the sequences of a step: those asked for, or BATCH_TOKENS' worth."""
    return int(question.get("global-batch-size", max(cluster.gpus, BATCH_TOKENS // sequence)))


def compare(
    model: str, cluster: Cluster, question: Question, flags: str, top: int, progress: Progress
) -> Answer:
    """Compare the layout of flags with the best of `top`. Raises PlanError, UsageError.

    What the question leaves open, of sequence length, batch and dtype, is that of the flags, for
    both; where these say no batch, it is the plan's.
    """
    optimizer = str(question.get("optimizer", ""))
    named = read_model(model, int(question.get("seq-length", SEQUENCE)), optimizer)
    length = named.config.model.seq_length
    config = own.config_of(named, cluster, flags, batch_of(cluster, question, length))
    batch = config.batch.global_batch_size
    mine = Recorded(named, cluster, f"{flags} --global-batch-size {batch}")
    same: Question = {"seq-length": config.model.seq_length, "global-batch-size": batch}
    if (dtype := own.dtype_of(config)) != "bf16":
        search.check_dtype(cluster, dtype)
        same["float8"] = dtype
    with Worker() as worker:
        plans = plans_of(model, cluster, {**same, **question}, flags, progress)
        found = plans.chosen(top)
        play([mine, *found], worker, progress)
        best = play(found, worker)[0] if found else None
    return table.why(mine, best), mine.fits


def build_parser() -> Parser:
    """Return the command line's parser."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a size, a config.json, or flags in quotes")
    parser.add_argument("cluster", help="a cluster file, or its name")
    parser.add_argument("--nodes", type=integer(1, 65_536), help="instead of the cluster file's")
    parser.add_argument(
        "--seq-length", type=integer(1, 1 << 24), help=f"tokens; default: {SEQUENCE:,}"
    )
    parser.add_argument("--global-batch-size", type=integer(1, 1 << 24), help="sequences of a step")
    parser.add_argument("--top", type=integer(1, 1000), default=TOP, help="layouts printed")
    parser.add_argument("--float8", choices=RECIPES, help="layers' matmuls; default: bfloat16")
    parser.add_argument(
        "--optimizer", choices=list(RULES), help="default: what the model's flags say, or adam"
    )
    parser.add_argument(
        "--tokens", type=number(1), default=TOKENS, help="that GPU-hours are given for"
    )
    parser.add_argument(
        "--why", metavar="FLAGS", help="your layout compared with the best, term by term"
    )
    parser.add_argument("--rank-orders", metavar="FLAGS", help="orders of your layout's ranks")
    parser.add_argument(
        "--svg", type=Path, metavar="FILE", help="draw all layouts and the best step"
    )
    return parser


def answer(args: argparse.Namespace, progress: Progress) -> Answer:
    """Return the answer to the command line. progress: is told what is done. Raises MISTAKES."""
    cluster = read_cluster(args.cluster)
    given = {"seq-length": args.seq_length, "global-batch-size": args.global_batch_size,
             "float8": args.float8, "optimizer": args.optimizer}  # fmt: skip
    question: Question = {name: value for name, value in given.items() if value}
    if args.nodes:
        cluster = cluster.of(args.nodes)
    if args.rank_orders is not None:
        found = read_model(args.model, args.seq_length or SEQUENCE, args.optimizer or "")
        config = rank_order.config_of(found, cluster, args.rank_orders)
        return rank_order.table(config, cluster), True
    if args.why is not None:
        return compare(args.model, cluster, question, args.why, args.top, progress)
    with Worker() as worker:
        plans = plans_of(args.model, cluster, question, progress=progress)
        if args.svg is not None:
            picture.draw(plans, args.svg)
        best = play(plans.chosen(args.top), worker, progress)
    return table.ranking(plans, best, args.tokens), bool(best)


def main(argv: Sequence[str]) -> int:
    """Run the command line; return the exit code."""
    args = build_parser().parse_args(argv)
    # a search makes millions of small objects and no circle of them: looking for some is a quarter
    # of its time
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    try:
        with waiting("planning") as progress:
            lines, fits = answer(args, progress)
    except MISTAKES as error:
        print(error_line("plan.py", error), file=sys.stderr)
        return 2
    print("\n".join(wrapped for line in lines for wrapped in table.wrapped(line)))
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
