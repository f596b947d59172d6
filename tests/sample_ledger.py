# SPDX-License-Identifier: Apache-2.0
"""Print which samples each step of a run consumes, without running it.

    WORLD_SIZE=16 python tests/sample_ledger.py --first-step 100 --steps 3 -- FLAG...

For each step: the samples consumed before it, its batch size, and a SHA-256 of the (sample,
dataset, document, offset) of all its rows, as the loaders of all data-parallel ranks hand them out.
The lines depend on data, seed, sequence length and batch size only. They must be the same for every
number of ranks and workers, micro-batch and point of resumption. `--rows` also lists the rows. A
step that is counted and not trained on says "skipped": those of --iterations-to-skip, and those
that the newest checkpoint of --load says a rewind skipped. With --data-stages a line names its
stage, and data sets are numbered over all stages.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, find its own parts

from mpu.needs import explain_missing_packages

if __name__ == "__main__":
    explain_missing_packages()

from mpu.grid import Grid
from tools.command_line import Parser, error_line, integer
from training.checkpoint import find_latest
from training.data.build import build_loaders
from training.data.dataset import Dataset
from training.data.loader import Loader
from training.data.tokenizer import Tokenizer, tokenizer_for
from training.flags.parse import parse
from training.settings.batch_size import global_batch_size, samples_after
from training.settings.config import Config
from training.settings.stages import name_at, stage_at, waits_for

Row = tuple[int, int, int, int]  # sample, dataset, document, offset


@dataclass(frozen=True)
class Entry:
    """One step: samples consumed before it, and where each of its rows begins."""

    step: int
    consumed: int
    rows: tuple[Row, ...]
    passed_over: bool = False
    stage: str = ""  # of --data-stages

    def line(self) -> str:
        """Return the step as one line, its rows as a hash."""
        digest = hashlib.sha256(json.dumps(self.rows).encode()).hexdigest()
        end = f"  stage {self.stage}" * bool(self.stage) + "  skipped" * self.passed_over
        return f"step {self.step}  consumed {self.consumed}  batch {len(self.rows)}  {digest}{end}"


def ledger(
    config: Config,
    tokenizer: Tokenizer,
    steps: range,
    of_stage: Callable[[int], Config] | None = None,
) -> Iterator[Entry]:
    """Yield the entry of each step (counted from 1), by asking the loaders of all ranks.

    of_stage: gives the config of a process in that stage of --data-stages. Raises ValueError if the
    ranks together do not hand out every sample of a step exactly once.
    """
    size, passed = config.parallel.data_parallel_size, passed_over(config)

    def loaders_of(config: Config) -> list[Loader]:
        return [
            build_loaders(config, tokenizer, rank, size, lambda line: None, begun=any_run).train
            for rank in range(size)
        ]

    loaders = loaders_of(config)
    for step in steps:
        consumed = samples_after(config, step - 1)
        if waits_for(config, consumed):
            assert of_stage is not None, "the stages differ in length"
            for loader in loaders:
                loader.close()
            config = of_stage(stage_at(config.stages, consumed))
            loaders = loaders_of(config)
        count = global_batch_size(config, consumed)
        samples = sorted(
            batch.first_sample + i
            for loader in loaders
            for batch in loader.next_global_batch(consumed, count)
            for i in range(len(batch.tokens))
        )
        if samples != list(range(consumed, consumed + count)):
            raise ValueError(f"step {step}: the ranks hand out samples {samples}")
        dataset = loaders[0].dataset
        rows = tuple((i, *dataset.origin(i)) for i in samples)
        yield Entry(step, consumed, rows, step in passed, name_at(config, consumed))
    for loader in loaders:
        loader.close()


def any_run(split: str, train: Dataset) -> bool:
    """Say that the run was begun with data that is read twice: its order is what is asked for."""
    return True


def passed_over(config: Config) -> set[int]:
    """Return the steps that a run with these flags counts and does not train on."""
    found = set(config.fault.iterations_to_skip)
    if config.checkpoint.load:
        saved = find_latest(config.checkpoint.load, Grid(), note=lambda line: None)
        found |= set(saved.state.get("passed_over", ())) if saved is not None else set()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Read the flags and print the ledger; return the exit status."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--first-step", type=integer(high=1 << 40), default=1, help="step to begin with, from 1"
    )
    parser.add_argument("--steps", type=integer(), default=10, help="number of steps")
    parser.add_argument("--rows", action="store_true", help="list the rows of each step")
    parser.add_argument("flags", nargs="*", help="after --: the flags of pretrain_llama.py")
    args = parser.parse_args(argv)
    try:
        if args.first_step < 1 or args.steps < 0:
            raise ValueError("--first-step counts from 1 and --steps from 0")
        world = int(os.environ.get("WORLD_SIZE", "1"))
        config = parse(args.flags, world)
        tokenizer = tokenizer_for(config)
        steps = range(args.first_step, args.first_step + args.steps)

        def of_stage(stage: int) -> Config:
            return parse(args.flags, world, stage=stage)

        for entry in ledger(config, tokenizer, steps, of_stage):
            print(entry.line())
            for row in entry.rows if args.rows else ():
                print("  sample {}  dataset {}  document {}  offset {}".format(*row))
    except (ValueError, OSError) as error:
        print(error_line("sample_ledger.py", error), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
