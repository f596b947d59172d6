#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare a model on one rank with itself on every kind of layout, in fp64.

    make fork-check MODEL=path/to/fork.py
    python tools/fork_check.py --model path/to/fork.py --only "tp 2" -- --my-own-flag 3

One rank is right by definition, but for its gradients, which are compared with differences of the
loss, and for decode, which is compared with forward. Every other layout must then have the same
initial weights, loss, gradients, updates and decode, load what another has saved, and keep and send
what the dry run says. Prints one table, and a sentence for whatever disagrees. Exit code: 0 if all
agree, 1 if something does not, 2 for a mistake in the command line.
"""

import argparse
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from multiprocessing.connection import Connection, wait
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
from mpu.torch_private import COMPILER, running_node
from pretrain_llama import model_provider
from tools.bisect.compare import Allowed
from tools.bisect.record import FRAME
from tools.bisect.side import Side
from tools.bisect.sides import value_of
from tools.bisect.verdict import Verdict, verdict_of
from tools.forks.case import Case, Desk, describe_error
from tools.forks.fields import FEW, windows_of
from tools.forks.layouts import LAYERS, NEEDS, cases, sizes
from tools.forks.rank import work
from tools.forks.results_table import Row, head, row_of, table
from training.run.model_profile import meta_context, model_profile
from training.run.waiting import time_left, waiting

# Imported once for all ranks: optimizers import the third, a comparison the fourth, if it is there.
PRELOADED = ["tools.forkserver_start", "tools.forks.rank", COMPILER, "transformers.modeling_utils"]
GRACE = 3.0  # seconds for the other ranks to answer when one has failed
LONGER = 5  # times --timeout for the references, which are asked more and wait for nobody
Answer = dict[str, Any] | None  # a Report, {"error": ...}, or None: the rank died or hung


def serve(rank: int, desk: Desk, port: int, limit: float, pipe: Connection) -> None:
    """Be one rank: do each case that comes, and answer. A case that hangs ends the process."""
    torch.set_num_threads(1)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    bind_loopback()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    with open(log_of(desk, rank), "w") as log:
        while True:
            case: Case = pipe.recv()
            faulthandler.dump_traceback_later(limit_of(case, limit), exit=True, file=log)
            try:
                answer: Answer = explained(desk, case, rank, store, limit)
            except (Exception, SystemExit) as error:  # a model's file may call sys.exit
                kind = "refused" if isinstance(error, ValueError) else "raised"
                answer = {"error": describe_error(error, desk.model), "kind": kind}
            faulthandler.cancel_dump_traceback_later()
            pipe.send(answer)


def explained(desk: Desk, case: Case, rank: int, store: Any, limit: float) -> Answer:
    """Do a case. On one rank autograd keeps the lines of the forward pass, so that an error in
    backward names one of the model's file, as a note.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with torch.autograd.set_detect_anomaly(case.oracle, check_nan=False):
                return work(desk, case, rank, store, limit)
        except RuntimeError as error:
            for text in (str(each.message) for each in said):
                lines = [line for file, line in FRAME.findall(text) if file == desk.model]
                if "Traceback of forward call" in text and lines:
                    error.add_note(f"{Path(desk.model).name} line {lines[-1]}{again(error)}")
            raise


def again(error: BaseException) -> str:
    """Say how a tensor is used a second time that is overwritten, as the loss does the logits."""
    if "modified by an inplace operation" not in str(error):
        return ""
    if "AllGatherMatmul" not in str(error):  # no ColumnParallelLinear's output
        return " keeps it for backward, and a later line writes over it: make a new tensor there"
    return "; the loss writes the gradient of the logits over them: use logits.clone() there"


def limit_of(case: Case, timeout: float) -> float:
    """Return how many seconds a case may take."""
    return timeout * LONGER if case.oracle else timeout


def log_of(desk: Desk, rank: int) -> Path:
    """Return the file in which a rank that hangs says where."""
    return Path(desk.folder, f"rank-{rank}")


class World:
    """The ranks, forked from one process that has imported everything; made anew after a death."""

    def __init__(self, desk: Desk, size: int, limit: float) -> None:
        self.desk, self.size, self.limit = desk, size, limit
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.ranks: list[Any] = []
        self.pipes: list[Connection] = []
        self.ended: dict[int, int] = {}  # the exit codes of ranks that ended by themselves

    def start(self) -> None:
        """Start the ranks."""
        for rank in range(self.size):
            here, there = self.context.Pipe()
            args = (rank, self.desk, self.store.port, self.limit, there)
            process = self.context.Process(target=serve, args=args, daemon=True)
            process.start()
            there.close()
            self.ranks.append(process)
            self.pipes.append(here)

    def run(self, case: Case) -> list[Answer]:
        """Let the first ranks do a case; return their answers."""
        if not self.ranks:
            self.start()
        pipes = self.pipes[: case.ranks]
        for pipe in pipes:
            pipe.send(case)
        answers: dict[Connection, Answer] = {}
        deadline = time.monotonic() + limit_of(case, self.limit) + GRACE
        while len(answers) < len(pipes) and (left := deadline - time.monotonic()) > 0:
            silent = [pipe for pipe in pipes if pipe not in answers]
            ready = wait(silent, left)
            for pipe in (pipe for pipe in silent if pipe in ready):
                try:
                    answers[pipe] = pipe.recv()
                except EOFError:
                    answers[pipe] = None
                    self.ranks[pipes.index(pipe)].join(GRACE)  # for its exit code
                if "error" in (answers[pipe] or {"error": ""}):
                    deadline = min(deadline, time.monotonic() + GRACE)
        found = [answers.get(pipe) for pipe in pipes]
        codes = [process.exitcode for process in self.ranks]
        self.ended = {rank: code for rank, code in enumerate(codes) if code is not None}
        if any("error" in (answer or {"error": ""}) for answer in found):
            self.close()
        return found

    def close(self) -> None:
        """End the ranks."""
        for process in self.ranks:
            process.kill()
        for process in self.ranks:
            process.join()
            process.close()
        for pipe in self.pipes:
            pipe.close()
        self.ranks, self.pipes = [], []

    def hung(self) -> str:
        """Say where the ranks stood that hung: in the model's file, or what waits for others."""
        model = str(Path(self.desk.model).resolve())
        places = [f"rank {rank} ended: {code_of(code)}" for rank, code in self.ended.items()]
        for rank in range(self.size):
            path = log_of(self.desk, rank)
            text = path.read_text() if path.is_file() else ""
            lines = text.rpartition("most recent call first")[2].splitlines()  # the main thread
            frames = [line.strip() for line in lines if line.strip().startswith("File ")]
            frames = [frame for frame in frames if "/mpu/comm/" not in frame] or frames
            if frames:
                frame = next((f for f in frames if model in f), frames[0])
                file, _, at = frame.removeprefix('File "').partition('", ')
                places.append(f"rank {rank} was in {Path(file).name} {at}")
        return "; ".join(places)


def code_of(code: int) -> str:
    """Say how a process ended; 1 is faulthandler's, after a dump of where it hung."""
    if code < 0:
        return f"signal {-code} ({signal.strsignal(-code)})"
    return "it took longer than --timeout" if code == 1 else f"exit code {code}"


def read(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return this program's arguments, and those after `--`: flags of the run."""
    at = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], allow_abbrev=False, usage="%(prog)s [...] [-- FLAGS]"
    )
    add = parser.add_argument
    add("--model", metavar="FILE", help="the model's file, as --model-file names it")
    add("--full", action="store_true", help="every layout of up to 8 ranks; takes long")
    add("--only", default="", metavar="NAMES", help='layouts by name: "tp 2; dp 2 + ZeRO 3"')
    add("--own-loss", action="store_true", help="the loss is not its logits' cross entropy")
    add("--timeout", type=float, default=60.0, metavar="SECONDS", help="for one layout (60)")
    options = parser.parse_args(argv[:at])
    if options.model is None:
        parser.error("--model FILE is missing: make fork-check MODEL=my_model.py")
    return options, list(argv[at + 1 :])


def experts_of(model: str, own: Sequence[str]) -> int:
    """Return how many experts a model has if no flag says it: its file's default, 0 for none."""
    kinds = {kind.name: kind for kind in fields(load_model_file(model).ModelConfig)}
    if "num_experts" not in kinds:
        return 0
    given, default = value_of(own, "--num-experts"), kinds["num_experts"].default
    return int(given) if given and given.isdigit() else default if isinstance(default, int) else 0


def fitting(desk: Desk, full: bool, experts: int, one: Case) -> tuple[str, ...]:
    """Return the first sizes with which the model runs on one rank, and has all kinds of layers
    that more layers have, unless each layer is of its own kind; else the usual ones.
    """
    known = load_model_file(desk.model).ModelConfig.__dataclass_fields__
    made: tuple[str, ...] = ()  # of a model that is made and does not run
    for needs in NEEDS:
        best, most, count = (), 0, 0
        for layers in LAYERS:
            some = sizes(full, experts, known, needs | layers)
            with suppress(Exception):
                config = replace(desk, sizes=some).config(one)
                model = model_provider(config, meta_context(config, Grid()))
                made = made or some
                model_profile(config, model_provider)
                numbers = range(config.model.num_layers)
                kinds = len({model.layer_config(i) for i in numbers})
                if kinds > most and most != count or not best:
                    best, most, count = some, kinds, len(numbers)
        if best:
            return with_short_windows(replace(desk, sizes=best), one)
    return made or sizes(full, experts, known)


def with_short_windows(desk: Desk, one: Case) -> tuple[str, ...]:
    """Return the sizes with windows that are shorter than a row, where a flag sets them."""
    config, made = desk.config(one), desk.sizes
    model = model_provider(config, meta_context(config, Grid()))
    tokens = torch.arange(config.model.seq_length)[None] % model.config.vocab_size
    for name in windows_of(load_model_file(desk.model), model.config, tokens):
        some = (*made, f"--{name.replace('_', '-')}", str(FEW))
        with suppress(Exception, SystemExit):  # no flag sets this field
            replace(desk, sizes=some).config(one)
            made = some
    return made


def chosen(full: bool, only: str, experts: bool = False) -> list[Case]:
    """Return the cases, those of one rank first. Raises ValueError for a name that is none's.

    experts: of a model that has some, whose layouts deal them out, too.
    """
    every = cases(full, experts)
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


def first_difference(world: World, case: Case, number: int) -> Verdict:
    """Record a step of a case and of one rank, and say which tensor differs first.

    Raises RuntimeError where a rank does not end the step.
    """
    number = 2 if case.load else number
    one = cases(False)[int(case.tied)]
    sides = []
    for each in (one, case):
        again = each._replace(name=f"{case.name}, recorded as {each.name}", record=number)
        folder = world.desk.record(again)
        answers = world.run(again._replace(save=""))
        wrong = [answer for answer in answers if answer is None or "error" in answer]
        if wrong:
            raise RuntimeError(f"a record of {each.name} failed: {wrong[0]}")
        sides.append(Side(folder))
    why = "fp64, in other orders of sums"
    return verdict_of(sides[0], sides[1], Allowed(False, why, begins=not number))


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
            some = chosen(options.full, options.only, experts > 0)
            desk.sizes = fitting(desk, options.full, experts, some[0])
            for case in some:
                if case.oracle:
                    desk.config(case)
        except ValueError as error:
            print(f"tools/fork_check.py: {error}", file=sys.stderr)
            return 2
        except Exception as error:  # of the model's file: its config, its flags
            print(f"tools/fork_check.py: {describe_error(error, model)}", file=sys.stderr)
            return 2
        width = max(len(case.name) for case in some)
        print("on the CPU over gloo, also where there is a GPU")
        print(head(width))
        world = World(desk, max(case.ranks for case in some), options.timeout)
        started = time.monotonic()

        def state() -> str:
            left = time_left(time.monotonic() - started, len(rows), len(some))
            return f"layout {len(rows) + 1} of {len(some)}{left}"

        broken: set[bool] = set()  # models, tied or not, of which one rank could not be run
        spoiled: set[str] = set()  # checkpoints of layouts that are wrong, or not run
        try:
            for case in some:
                if case.tied in broken:
                    continue
                if why := desk.refusal(case):
                    rows.append(Row(case, 0.0, refused=why))
                    spoiled.add(case.save or case.name)
                    print(rows[-1].line(width), flush=True)
                    continue
                if case.load in spoiled:
                    rows.append(Row(case, 0.0, result="not run: what it would load is wrong"))
                    print(rows[-1].line(width), flush=True)
                    continue
                began = time.monotonic()
                try:
                    with waiting(case.name, state):
                        answers = world.run(case)
                        seconds = time.monotonic() - began
                        row = row_of(case, answers, seconds, world.hung, desk)
                        if row.to_record >= 0:
                            row.explain_with(first_difference(world, case, row.to_record))
                except Exception as error:
                    world.close()
                    line = f"fork-check itself failed: {describe_error(error, model)}"
                    row = Row(case, time.monotonic() - began, findings=[("internal", "", line)])
                if case.oracle and row.blocks:
                    broken.add(case.tied)
                if row.differs:
                    spoiled.add(case.save or case.name)
                rows.append(row)
                print(row.line(width), flush=True)
        finally:
            world.close()
    for line in table(rows):
        print(line)
    return int(any(row.findings for row in rows))


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # no threads where ranks are forked
    sys.exit(main())
