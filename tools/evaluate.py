#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Evaluate a checkpoint on tasks of lm-evaluation-harness, without an export.

    python tools/evaluate.py --load runs/llama/checkpoints --tasks arc_easy,hellaswag
    torchrun --nproc-per-node 8 tools/evaluate.py --load runs/llama/checkpoints --tasks mmlu \\
        --tensor-model-parallel-size 2 --output runs/llama/eval --watch 60

It needs the package lm_eval (pip install 'weft-llm[eval]'). A model that Hugging Face does not know
is evaluated as any other: its file is named by --model-file, or by the checkpoint. Ranks beyond the
tensor-parallel size are replicas, which divide the requests among them. With --output, each
checkpoint's scores are written to a file named after its step; with --watch, every checkpoint that
a run makes is evaluated, except those that have such a file already.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, find its own parts

from mpu.launch import Launch, environment_defaults
from mpu.needs import explain_missing_packages

os.environ.update(environment_defaults(os.environ))
if __name__ == "__main__":
    explain_missing_packages()

import torch

from mpu.accelerators import own_gpu, unusable_gpu
from mpu.grid import Grid
from tools.command_line import Parser, add_tokenizer, integer
from tools.evaluator.harness import check_installed, find_tasks, harness_model
from tools.evaluator.score import Scorer
from tools.generate import TIMEOUT, load_model, tokenizer_of
from training.checkpoint import Checkpoint
from training.checkpoint.agree import first_error, on_all, together
from training.checkpoint.find import at_or_below, candidates
from training.checkpoint.manifest import STEP
from training.data.files import write_text
from training.data.tokenizer import Tokenizer
from training.files.owned import json_with
from training.files.untrusted import nothing_downloaded, printable, sentence
from training.run.device import set_arithmetic
from training.run.process import as_process
from training.run.rendezvous import meet
from training.run.waiting import Progress, waiting

Scores = dict[str, dict[str, float]]  # by task, by metric


def parse(argv: Iterable[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add(
        "--load",
        required=True,
        metavar="DIR",
        help="folder of a run's checkpoints, one checkpoint, or a Hugging Face folder",
    )
    add("--tasks", required=True, metavar="A,B", help="tasks and groups of lm_eval")
    add("--include-path", metavar="DIR", help="where to look for more tasks (.yaml)")
    add(
        "--num-fewshot",
        type=integer(0),
        metavar="N",
        help="examples before each question (default: the task's)",
    )
    add("--limit", type=integer(1), metavar="N", help="first N questions of a task; default: all")
    add("--batch-size", type=integer(1), default=8, metavar="N", help="rows of a forward; 8")
    add(
        "--max-length",
        type=integer(2),
        metavar="N",
        help="tokens of a row (default: the model's max_position_embeddings)",
    )
    add("--tensor-model-parallel-size", type=integer(1), metavar="N", help="default: all")
    add("--output", metavar="DIR", help="folder for a file of scores per step")
    add("--watch", type=integer(1), metavar="S", help="look for new checkpoints every S seconds")
    add("--last-step", type=integer(1), metavar="N", help="with --watch: end after this step")
    add_tokenizer(parser, "the checkpoint's")
    parser.add_trust_owner()
    add(
        "--model-file",
        metavar="PATH",
        help="a fork's model file; default: the one that the checkpoint names",
    )
    add("--dtype", choices=("float32", "bfloat16", "float64"), help="default: as stored")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    args = parser.parse_args(None if argv is None else list(argv))
    args.tasks = [name for name in args.tasks.split(",") if name]
    if not args.tasks:
        parser.error("--tasks names no task")
    if args.watch and not args.output:
        parser.error("--watch needs --output, whose files show what has been evaluated")
    if args.last_step and not args.watch:
        parser.error("--last-step needs --watch")
    return args


def write(
    output: str | None, name: str, step: int | None, scores: Scores, about: dict[str, Any]
) -> None:
    """Print a checkpoint's scores, and write their file in `output`."""
    print(f"{printable(name)}:")
    for task, metrics in scores.items():
        for metric, value in metrics.items():
            if not metric.endswith("_stderr"):
                error = metrics.get(f"{metric}_stderr", math.nan)
                error_text = "" if math.isnan(error) else f" +- {error:.4f}"
                print(f"  {task:24} {metric:18} {value:.4f}{error_text}", flush=True)
    if output:
        found = {"checkpoint": name, "step": step, **about, "scores": scores}
        text = json.dumps(found, indent=1) + "\n"
        write_text(Path(output) / f"{name}.json", text, json_with("checkpoint", "scores"))


def evaluate(
    args: argparse.Namespace, load: str, manager: Any, grid: Grid, device: torch.device
) -> tuple[str, int | None, Scores, dict[str, Any]]:
    """Load one checkpoint and run the tasks; return (name, step, scores, facts on the evaluation).

    Rank 0 shows the progress (training/run/waiting.py), and has the scores: they are empty on other
    ranks. Raises ValueError.
    """
    with waiting("evaluating") if grid.rank == 0 else nullcontext(Progress()) as progress:
        progress.begin("reading the checkpoint")
        return _evaluate(args, load, manager, grid, device, progress=progress)


def prepare(
    args: argparse.Namespace, load: str, grid: Grid, device: torch.device
) -> tuple[Any, Checkpoint, Tokenizer, int]:
    """Return a checkpoint's model, itself, its tokenizer, and the tokens of a row.

    Raises ValueError, on every rank if one rank fails.
    """
    dtype = getattr(torch, args.dtype) if args.dtype else None
    model, found = load_model(load, grid, device, dtype, args.model_file)
    at = device if grid.world.size > 1 else None
    tokenizer = on_all(lambda: tokenizer_of(args, found), grid.world, at)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model's vocabulary only "
            f"{model.config.vocab_size}: give the model's own (--tokenizer-type, --tokenizer-model)"
        )
    length = args.max_length or model.config.max_position_embeddings
    if length > model.config.max_position_embeddings:
        raise ValueError(
            f"--max-length {length} is more than the model's max_position_embeddings "
            f"({model.config.max_position_embeddings})"
        )
    return model, found, tokenizer, length


def _evaluate(
    args: argparse.Namespace,
    load: str,
    manager: Any,
    grid: Grid,
    device: torch.device,
    progress: Progress,
) -> tuple[str, int | None, Scores, dict[str, Any]]:
    from lm_eval import simple_evaluate

    model, found, tokenizer, length = prepare(args, load, grid, device)
    scorer = Scorer(model, grid, args.batch_size, length, progress)
    progress.begin("building the requests")
    began = time.monotonic()
    results = simple_evaluate(
        model=harness_model(scorer, tokenizer),
        tasks=args.tasks,
        task_manager=manager,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        log_samples=False,
    )
    name = found.directory.name
    about = {
        "seconds": round(time.monotonic() - began, 1),
        "lm_eval": check_installed(),
        "torch": torch.__version__,
        "dtype": str(model.ctx.dtype).removeprefix("torch."),
        "limit": args.limit,
        "num_fewshot": (results or {}).get("n-shot"),
        "versions": (results or {}).get("versions"),
    }
    return name, step_of(name), plain(results), about


def plain(results: dict[str, Any] | None) -> Scores:
    """Return lm_eval's scores by task and metric, with the name of a filter other than none."""
    scores: Scores = {}
    for task, metrics in ((results or {}).get("results") or {}).items():
        for key, value in metrics.items():
            metric, _, chosen = key.partition(",")
            if isinstance(value, (int, float)) and not isinstance(value, bool) and chosen:
                name, error = metric.removesuffix("_stderr"), metric.endswith("_stderr")
                name += "" if chosen == "none" else f"/{chosen}"
                scores.setdefault(task, {})[name + "_stderr" * error] = float(value)
    return scores


def to_do(load: str, output: Path, passed_over: set[str]) -> list[str]:
    """Return the checkpoints below `load` that have no file of scores yet, the oldest first."""
    found = [Path(name) for name in reversed(candidates(Path(load), None)[0])]
    return [
        str(path)
        for path in found
        if path.name not in passed_over and not (output / f"{path.name}.json").exists()
    ]


def watch(args: argparse.Namespace, manager: Any, grid: Grid, device: torch.device) -> None:
    """Evaluate each checkpoint that appears, in order; one that is no longer whole is skipped.

    All ranks evaluate the checkpoints that rank 0 finds. Returns after --last-step, else never.
    """
    passed_over: set[str] = set()
    at = device if grid.world.size > 1 else None
    last = 0
    while True:

        def look() -> list[str]:
            return to_do(args.load, Path(args.output), passed_over) if grid.rank == 0 else []

        outcome = together(look, grid.world, at)[0]
        if outcome.error:
            raise ValueError(outcome.error)
        for path in outcome.value:
            name = Path(path).name
            try:
                done = evaluate(args, path, manager, grid, device)
            except (ValueError, OSError) as error:  # removed by the run's retention, or damaged
                passed_over.add(name)
                last = max(last, step_of(name) or 0)
                if grid.rank == 0:
                    print(f"evaluate: {name} is skipped: {sentence(error)}", file=sys.stderr)
                continue
            if grid.rank == 0:
                write(args.output, *done)
            last = max(last, done[1] or 0)
        if not outcome.value:
            done_before = [step_of(file.stem) or 0 for file in Path(args.output).glob("*.json")]
            if args.last_step and max([last, *done_before]) >= args.last_step:
                return
            time.sleep(args.watch)


def step_of(name: str) -> int | None:
    """Return the step in a directory's name, or None for a Hugging Face folder."""
    match = STEP.fullmatch(name)
    return int(match[1]) if match else None


def make(output: str | None, rank: int) -> None:
    """Make the folder of the scores, on rank 0."""
    if output and not rank:
        Path(output).mkdir(parents=True, exist_ok=True)


def main(argv: Iterable[str] | None = None) -> int:
    """Connect the ranks and evaluate; print a refusal as one sentence and exit with code 2."""
    args = parse(argv)
    launch = Launch.from_env()
    kind = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    tp = args.tensor_model_parallel_size or launch.world
    grid = None
    try:
        if launch.world % tp:
            raise ValueError(
                f"--tensor-model-parallel-size {tp} must divide the {launch.world} ranks"
            )
        check_installed()
        if args.device != "cpu" and (why := unusable_gpu()):
            raise ValueError(f"{why}; or evaluate on the CPU with --device cpu")
        if not Path(args.load).exists():
            raise ValueError(f"--load {args.load}: not found ({nothing_downloaded(args.load)})")
        args.load = str(at_or_below(args.load))
        manager = find_tasks(args.tasks, args.include_path)
        set_arithmetic(deterministic=False)
        device = own_gpu(launch) if kind == "cuda" else torch.device("cpu")
        grid = Grid(launch.world, tp_size=tp, launch=launch)
        if launch.world > 1:
            launch.check_rendezvous()
            grid.connect(device, meet(TIMEOUT, launch), TIMEOUT)
        at = device if launch.world > 1 else None
        failed = first_error(together(lambda: make(args.output, grid.rank), grid.world, at))
        if failed is not None:
            raise ValueError(failed.error)
        if args.watch:
            watch(args, manager, grid, device)
        else:
            done = evaluate(args, args.load, manager, grid, device)
            if grid.rank == 0:
                write(args.output, *done)
    except BrokenPipeError:  # the reader of the scores has closed the pipe
        return 1
    except (ValueError, OSError) as error:
        who = f"rank {launch.rank}: " if launch.rank else ""  # every rank prints its own
        print(f"evaluate: {who}{sentence(error)}", file=sys.stderr)
        sys.exit(2)
    finally:
        if grid is not None:
            grid.close()
    return 0


if __name__ == "__main__":
    as_process(main, None, "evaluate")
