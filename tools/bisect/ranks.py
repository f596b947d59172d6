# SPDX-License-Identifier: Apache-2.0
"""Run the program of one side on its ranks, on CPUs of this machine.

A rank imports the product anew, from its side's checkout. To record a step, the rank replaces
`train_step` of pretrain_llama.py: at that step it records every tensor
(training/run/watch/recorder.py), and ends.
"""

import importlib
import importlib.util
import json
import os
import resource
import runpy
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tools.bisect.recorded import enter
from tools.compare.launch import Ended, Tell, launch, where
from training.flags.foreign import uses_of, value_of

PROGRAM = "pretrain_llama.py"
ROOT = Path(__file__).resolve().parents[2]


class RunError(Exception):
    """A run did not end as it should; the message has the reason."""


@dataclass(frozen=True)
class Program:
    """The program of a side. tree: the checkout. script: its program, or one that imports it.

    argv: the flags. world: the number of ranks.
    """

    tree: Path
    script: Path
    argv: tuple[str, ...]
    world: int = 1


def run(
    program: Program, folder: Path, more: Sequence[str] = (), record: int = 0, limit: float = 900.0
) -> float:
    """Run a program with further flags; return the seconds that it took.

    record: the step to record and to end at. The relative path of a model's file is taken from the
    checkout's root, whatever the current folder is. The ranks write their output and records to
    `folder`. Raises RunError if a rank fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.monotonic()
    argv = (*program.argv, *_own_model(program), *more)
    work = partial(_be_rank, replace(program, argv=argv), folder, record, port)
    ended = launch(program.world, work, folder, limit)
    if any(each.code for each in ended):
        raise RunError(_why(folder, ended, limit))
    if late := [rank for rank, each in enumerate(ended) if each.code is None]:
        raise RunError(f"ranks {late} did not end within {limit:.0f} s (--timeout)")
    return time.monotonic() - began


def _own_model(program: Program) -> list[str]:
    """Return the flag that names the model's file in the checkout, not in the current folder.

    A run without the flag uses model/moe.py if it has experts, else model/llama.py. A run with
    --qk-layernorm alone cannot have the flag.
    """
    given = {use.dashed for use in uses_of(program.argv)}
    name = "model/moe.py" if "--num-experts" in given else "model/llama.py"
    if "--qk-layernorm" in given and not given & {"--num-experts", "--model-file"}:
        return []
    name = value_of(program.argv, "--model-file") or name
    file = program.tree / name
    relative = not Path(name).is_absolute() and file.is_file()
    return ["--model-file", str(file)] if relative else []


def _why(folder: Path, ended: Sequence[Ended], limit: float) -> str:
    """Return why a run failed: the error of the first rank with one, else how each rank ended."""
    for rank, each in enumerate(ended):
        path = folder / f"err.{rank}"
        errors = path.read_text().strip().splitlines() if each.code and path.is_file() else []
        if lines := [line for line in errors if "Error" in line or ": error" in line] or errors:
            return f"rank {rank} exited with code {each.code}: {lines[-1]}"
    return where(ended, folder, limit)


def _be_rank(
    program: Program, folder: Path, record: int, port: int, rank: int, tell: Tell
) -> None:
    """Run one rank in this process, which was started for that."""
    for number, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{kind}.{rank}", os.O_WRONLY | os.O_CREAT, 0o600), number)
    argv = list(program.argv)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(program.world), "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(program.world), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    enter(program.tree)
    sys.argv = [str(program.script), *argv]
    module: Any = importlib.import_module("pretrain_llama")
    if record:
        _record_at(module, record, folder)
    if program.script.name == PROGRAM:
        module.as_process(lambda: module.main(argv), None)
    else:
        sys.path.insert(0, str(program.script.parent))
        runpy.run_path(str(program.script), run_name="__main__")


def _record_at(program: Any, number: int, folder: Path) -> None:
    """Replace train_step by one that records a step, writes step.json, and ends the rank."""
    file = ROOT / "training" / "run" / "watch" / "recorder.py"  # it imports the run's own modules
    spec = importlib.util.spec_from_file_location("weft_recorder", file)
    assert spec is not None and spec.loader is not None
    recorder: Any = importlib.util.module_from_spec(spec)
    sys.modules["weft_recorder"] = recorder
    spec.loader.exec_module(recorder)
    take, leave = program.train_step, os._exit  # later os._exit(0) counts as a fault: as_process

    rates: dict[int, float] = {}

    def train_step(run: Any, batches: Any, lr: float, decoupled_lr: float | None = None) -> Any:
        rates[run.iteration + 1] = lr
        if run.iteration + 1 != number:
            return take(run, batches, lr, decoupled_lr)
        file = run.config.model.model_file
        names = program.load_model_file(file).hf_names(run.model)
        run.sink.check = None  # of the first gradients: also record a step that it would refuse
        step = recorder.recorded(take, names, folder / "record", file)
        began = time.monotonic()
        loss, norm, _ = step(run, batches, lr, decoupled_lr)
        recorded = {
            "iteration": number, "loss": loss.item(), "norm": norm.item(),
            "seconds": time.monotonic() - began, "torch": torch.__version__,
            "config": run.config.flat(), "rates": rates,
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }  # fmt: skip
        if run.grid.rank == 0:
            (folder / "record" / "step.json").write_text(json.dumps(recorded))
        program.sum_in_order(loss.detach().double(), run.grid.world)  # wait for all ranks
        sys.stdout.flush()
        sys.stderr.flush()
        leave(0)

    program.train_step = train_step
