#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare a model on one rank with the same model on every kind of layout, in fp64.

    make fork-check MODEL=path/to/fork.py
    python tools/fork_check.py --model path/to/fork.py --only "tp 2" -- --my-own-flag 3

One rank is right by definition, except for its gradients, which are compared with finite
differences of the loss, and for decode, which is compared with forward. Every other layout must
then have the same initial weights, loss, gradients, updates and decode, and load the checkpoint of
another layout. It prints one table, and a sentence for each disagreement. Exit code: 0 if all
agree, 1 if something does not, 2 for a mistake in the command line.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, find pretrain_llama

from mpu.needs import explain_missing_packages

if __name__ == "__main__":
    explain_missing_packages()

import torch
import torch.distributed as dist

from model.load import load_model_file
from mpu.grid import Grid
from mpu.launch import bind_loopback
from mpu.torch_private import running_node
from pretrain_llama import model_provider
from tools.command_line import Parser
from tools.compare.first_difference import Allowed, compare
from tools.compare.join import Side
from tools.compare.launch import Ended, Tell, launch, where
from tools.compare.verdict import conclude, verdict_of
from tools.forks.case import Case, Desk, describe_error, raised_in
from tools.forks.fields import FEW, windows_of
from tools.forks.layouts import LAYERS, NEEDS, cases, one_rank, sizes
from tools.forks.rank import work
from tools.forks.results_table import Row, head, initial_finding, row_of, table
from training.flags.foreign import value_of
from training.run.model_profile import meta_context, model_profile
from training.run.waiting import time_left, waiting
from training.run.watch.recorder import FRAME

LOADED = 1e-7  # tolerance of loaded weights against one rank's, relative to the norm
PRELOADED = ("tools.forks.rank", "transformers.modeling_utils")
SIDES = ("one rank", "this layout")
LONGER = 5  # times --timeout for the references, which do more and wait for no other rank
Answer = dict[str, Any] | None  # a Report, {"error": ...}, or None: the rank died or hung


def be_rank(desk: Desk, case: Case, port: int, limit: float, rank: int, tell: Tell) -> None:
    """Run a case on one rank, and send the answer. port: of the store of all cases."""
    torch.set_num_threads(1)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    bind_loopback()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    try:
        tell(explained(desk, case, rank, store, limit))
    except (Exception, SystemExit) as error:  # a model's file may call sys.exit
        kind = "refused" if isinstance(error, ValueError) else "raised"
        hint = "; flags after -- (with make, in ARGS) set other sizes" * case.oracle
        text = describe_error(error, desk.model) + hint * (kind == "refused")
        tell({"error": text, "kind": kind, "by model": raised_in(error, desk.model)})
        sys.exit(1)


def explained(desk: Desk, case: Case, rank: int, store: Any, limit: float) -> Answer:
    """Run a case. An error in the backward pass of one rank, whose steps autograd keeps the lines
    of, gets a note with a line of the model's file.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            return work(desk, case, rank, store, limit)
        except RuntimeError as error:
            written = "".join(getattr(error, "__notes__", ()))  # lines that write in place
            error.__notes__ = []
            for text in (str(each.message) for each in said):
                lines = [line for file, line in FRAME.findall(text) if file == desk.model]
                if "Traceback of forward call" in text and lines:
                    at = f"{Path(desk.model).name} line {lines[-1]}"
                    error.add_note(f"{at}{again(error, written)}")
            raise


def again(error: BaseException, written: str) -> str:
    """Return how a tensor is used that was overwritten, as the loss overwrites the logits, or "".

    written: the lines that write in place, in words.
    """
    if "modified by an inplace operation" not in str(error):
        return ""
    if "AllGatherMatmul" not in str(error):  # no ColumnParallelLinear's output
        later = written or "a later line"
        return f" keeps it for backward, and {later} overwrites it: make a new tensor there"
    return "; the loss overwrites the logits with their gradient: use logits.clone() there"


def limit_of(case: Case, timeout: float) -> float:
    """Return the seconds that a case may take."""
    return timeout * LONGER if case.oracle else timeout


class Ranks:
    """Starts the ranks of a case. limit: seconds for a case; now: for the last case."""

    def __init__(self, desk: Desk, limit: float) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.desk, self.limit, self.now = desk, limit, limit
        self.ended: list[Ended] = []

    def run(self, case: Case) -> list[Answer]:
        """Run a case on its ranks; return their answers."""
        self.now = limit_of(case, self.limit)
        work = partial(be_rank, self.desk, case, self.store.port, self.now)
        self.ended = launch(case.ranks, work, Path(self.desk.folder), self.now, PRELOADED)
        return [each.answer for each in self.ended]

    def hung(self) -> str:
        """Return where hanging ranks were: the line in the model's file, or the one that waits."""
        model = str(Path(self.desk.model).resolve())
        return where(self.ended, Path(self.desk.folder), self.now, model)


def read(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return this program's arguments, and those after `--`: flags of the run."""
    at = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(__doc__, usage="%(prog)s [...] [-- FLAGS]")
    add = parser.add_argument
    add("--model", metavar="FILE", help="the model's file, as --model-file names it")
    add("--only", default="", metavar="NAMES", help='layouts by name: "tp 2; dp 2 + ZeRO 3"')
    add("--own-loss", action="store_true", help="the loss is not the logits' cross entropy")
    add("--timeout", type=float, default=60.0, metavar="SECONDS", help="per layout (default: 60)")
    options = parser.parse_args(argv[:at])
    if options.model is None:
        parser.error("--model FILE is missing: make fork-check MODEL=my_model.py")
    return options, list(argv[at + 1 :])


def experts_of(model: str, own: Sequence[str]) -> int:
    """Return a model's number of experts: the flag's, else its file's default, 0 for none."""
    kinds = {kind.name: kind for kind in fields(load_model_file(model).ModelConfig)}
    if "num_experts" not in kinds:
        return 0
    given, default = value_of(own, "--num-experts"), kinds["num_experts"].default
    return int(given) if given.isdigit() else default if isinstance(default, int) else 0


def fitting(desk: Desk, experts: int, one: Case) -> tuple[str, ...]:
    """Return the first sizes with which the model runs on one rank and has all the kinds of layers
    that a deeper one has, unless each layer is of its own kind; else the usual sizes.
    """
    known = load_model_file(desk.model).ModelConfig.__dataclass_fields__
    made: tuple[str, ...] = ()  # with which a model is built but does not run
    for needs in NEEDS:
        best: tuple[str, ...] = ()
        most = count = 0
        for layers in LAYERS:
            some = sizes(experts, known, needs | layers)
            with suppress(Exception):
                config = replace(desk, sizes=some).config(one)
                model = model_provider(config, meta_context(config, Grid()))
                made = made or some
                model_profile(config, model_provider)
                numbers = range(config.model.num_layers)
                kinds = len({repr(model.layer_config(i)) for i in numbers})
                if kinds > most and most != count or not best:
                    best, most, count = some, kinds, len(numbers)
        if best:
            return with_short_windows(replace(desk, sizes=best), one)
    return made or sizes(experts, known)


def with_short_windows(desk: Desk, one: Case) -> tuple[str, ...]:
    """Return the sizes with windows shorter than a row, if a flag sets them."""
    config, made = desk.config(one), desk.sizes
    model = model_provider(config, meta_context(config, Grid()))
    tokens = torch.arange(config.model.seq_length)[None] % model.config.vocab_size
    for name in windows_of(load_model_file(desk.model), model.config, tokens):
        some = (*made, f"--{name.replace('_', '-')}", str(FEW))
        with suppress(Exception, SystemExit):  # no flag sets this field
            replace(desk, sizes=some).config(one)
            made = some
    return made


def chosen(only: str, experts: bool = False) -> list[Case]:
    """Return the cases, those of one rank first. Raises ValueError for an unknown name.

    experts: the model has experts: include the layouts with expert parallelism.
    """
    every = cases(experts)
    names = [name.strip() for name in only.split(";") if name.strip()]
    for name in names:
        if name not in [case.name for case in every]:
            known = "; ".join(case.name for case in every)
            raise ValueError(f"--only {name!r} is not the name of a layout; the names are: {known}")
    picked = [case for case in every if not names or case.name in names]
    loaded = {case.load for case in picked}
    tied = {case.tied for case in picked}
    needed = [case for case in every if case.save in loaded - {""}]
    tied |= {case.tied for case in needed}
    return [c for c in every if c in picked or c in needed or (c.oracle and c.tied in tied)]


def hold(world: Ranks, row: Row) -> None:
    """Compare the records of a layout's ranks with one rank's record.

    If a step differs, both sides repeat it and record all its tensors, to find the first that
    differs. Raises RuntimeError if a rank does not end that step.
    """
    case, desk = row.case, world.desk
    whats: tuple[int | str, ...] = (2,) if case.load else ("initial", 0, 1)
    distances = {"": LOADED}  # of the weights with which a step begins
    for what in whats:
        allowed = Allowed(what == "initial", begins=what == 0, distances=distances)
        verdict = None
        if what == "initial" or not row.found("replicas"):  # these end the first step
            one, other = desk.one_rank(case.tied, what), Side(desk.record(case.name, what))
            found = compare(one, other, allowed, to_end=True)
            row.measure(found)
            distances = found.weights
            verdict = conclude(found, one, other, allowed, SIDES)
            if found.first is None:
                continue
            if what == "initial":
                row.findings.append(initial_finding(found.first, verdict))
                if row.found("shape"):
                    return
                continue
        assert isinstance(what, int)
        sides = [Side(recorded_inside(world, each, what)) for each in (one_rank(case.tied), case)]
        inside = verdict_of(sides[0], sides[1], allowed, SIDES)
        verdict = verdict if inside.same else inside
        if verdict is not None:
            row.explain_with(what, (sides[1].numbers["loss"], sides[0].numbers["loss"]), verdict)
        return


def recorded_inside(world: Ranks, case: Case, number: int) -> Path:
    """Run a step and record all its tensors, if not done yet; return the folder."""
    folder = world.desk.record(case.name, number, inside=True)
    if not folder.exists():
        answers = world.run(case._replace(record=number, save=""))
        if wrong := [each for each in answers if each is None or "error" in each]:
            shutil.rmtree(folder, ignore_errors=True)  # it is incomplete
            raise RuntimeError(f"a record of {case.name} failed: {wrong[0]}")
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases and print the table; see above for the exit code."""
    options, own = read(sys.argv[1:] if argv is None else argv)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="fork-check-") as folder:
        model = str(Path(options.model).resolve())
        desk = Desk(model, folder, (), tuple(own), options.own_loss)
        try:
            running_node()
            experts = experts_of(model, own)
            some = chosen(options.only, experts > 0)
            desk.sizes = fitting(desk, experts, some[0])
            for case in some:
                if case.oracle:
                    desk.config(case)
        except ValueError as error:
            print(f"tools/fork_check.py: {error}", file=sys.stderr)
            return 2
        except Exception as error:  # from the model's file: its config, its flags
            print(f"tools/fork_check.py: {describe_error(error, model)}", file=sys.stderr)
            return 2
        width = max(len(case.name) for case in some)
        print("on the CPU over gloo, also where there is a GPU")
        print(head(width))
        world = Ranks(desk, options.timeout)
        started = time.monotonic()

        def state() -> str:
            left = time_left(time.monotonic() - started, len(rows), len(some))
            return f"layout {len(rows) + 1} of {len(some)}{left}"

        broken: set[bool] = set()  # models, tied or not, that could not be run on one rank
        spoiled: set[str] = set()  # checkpoints of layouts that are wrong, or not run
        for case in some:
            if case.tied in broken:
                continue
            if why := desk.refusal(case):
                rows.append(Row(case, 0.0, refused=why))
                spoiled.add(case.save or case.name)
                print(rows[-1].line(width), flush=True)
                continue
            if case.load in spoiled:
                rows.append(Row(case, 0.0, result="not run: the checkpoint to load is wrong"))
                print(rows[-1].line(width), flush=True)
                continue
            began = time.monotonic()
            try:
                with waiting(case.name, state):
                    answers = world.run(case)
                    seconds = time.monotonic() - began
                    row = row_of(case, answers, seconds, world.hung)
                    if not (case.oracle or row.blocks or row.refused):
                        hold(world, row)
            except Exception as error:
                line = f"fork-check itself failed: {describe_error(error, model)}"
                row = Row(case, time.monotonic() - began, findings=[("internal", "", line)])
            if case.oracle and row.blocks:
                broken.add(case.tied)
            if row.differs or row.blocks or row.refused or row.found("shape"):
                spoiled.add(case.save or case.name)
            rows.append(row)
            print(row.line(width), flush=True)
    for line in table(rows):
        print(line)
    return int(any(row.findings for row in rows))


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # no threads where ranks are forked
    sys.exit(main())
