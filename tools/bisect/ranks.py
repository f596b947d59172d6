# SPDX-License-Identifier: Apache-2.0
"""Run the program of one side on its ranks, here, on CPUs; a rank is forked from this process.

Whatever of the product this process has imported, a rank imports anew, from any checkout. What
is wanted of a run besides its flags is done in the rank, where `train_step` of pretrain_llama.py is
called: at a step the rank records every tensor (tools/bisect/record.py), and ends.
"""

import importlib
import importlib.util
import json
import os
import resource
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mpu.torch_private import preload_compiler
from tools.bisect.recorded import enter

PROGRAM = "pretrain_llama.py"
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


class RunError(Exception):
    """A run did not end as it should; the text says how."""


@dataclass(frozen=True)
class Program:
    """What a side runs. tree: the checkout. script: its program, or one that imports it.

    argv: the flags. world: how many ranks.
    """

    tree: Path
    script: Path
    argv: tuple[str, ...]
    world: int = 1


@dataclass
class Ran:
    """How a run went. seconds: of all of it; peak: the most bytes that a rank had resident."""

    folder: Path
    seconds: float
    peak: int


def run(
    program: Program, folder: Path, more: Sequence[str] = (), record: int = 0, limit: float = 900.0
) -> Ran:
    """Run a program with further flags; record: the step to record and to end at.

    A model's file that is named from a checkout's root is that checkout's, wherever this runs.

    The ranks' output, and records, come to `folder`. Raises RunError where a rank fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    preload_compiler()  # which optimizers import, in seconds
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.monotonic()
    left: dict[int, int] = {}
    codes: dict[int, int] = {}
    peak = 0
    try:
        for rank in range(program.world):
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                flags = [*program.argv, *_own_model(program), *more]
                _be_rank(program, folder, flags, record, rank, port)
            left[pid] = rank
        while left and time.monotonic() - began < limit and not any(codes.values()):
            for pid in list(left):
                done, status, used = os.wait4(pid, os.WNOHANG)
                if done:
                    codes[left.pop(pid)] = os.waitstatus_to_exitcode(status)
                    peak = max(peak, used.ru_maxrss * 1024)
            time.sleep(0.02)
    finally:
        patience = time.monotonic() + (5.0 if codes else 0.0)
        while left and time.monotonic() < patience:  # the others say why, too
            for pid in list(left):
                done, status, _ = os.wait4(pid, os.WNOHANG)
                if done:
                    codes[left.pop(pid)] = os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        late = sorted(left.values())
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if any(codes.values()):
        raise RunError(_why(folder, codes))
    if late:
        raise RunError(f"ranks {late} did not end within {limit:.0f} s")
    return Ran(folder, time.monotonic() - began, peak)


def _own_model(program: Program) -> list[str]:
    """Return the flag that names the model's file in the checkout, and not where this runs."""
    name = "model/llama.py"
    for word, value in zip(program.argv, [*program.argv[1:], ""], strict=False):
        flag, has, text = word.partition("=")
        if flag.replace("_", "-") == "--model-file":
            name = text if has else value
    file = program.tree / name
    tables = (program.tree / "training").rglob("arguments.py")  # an older commit has not the flag
    known = any("model_file" in table.read_text() for table in tables)
    relative = not Path(name).is_absolute() and file.is_file() and known
    return ["--model-file", str(file)] if relative else []


def _why(folder: Path, codes: dict[int, int]) -> str:
    rank, code = next((rank, code) for rank, code in sorted(codes.items()) if code)
    errors = (folder / f"err.{rank}").read_text().strip().splitlines()
    lines = [line for line in errors if "Error" in line or ": error" in line] or errors
    why = f": {lines[-1]}" if lines else " and printed no error"
    return f"rank {rank} exited with code {code}{why}"


def _be_rank(
    program: Program, folder: Path, argv: list[str], record: int, rank: int, port: int
) -> None:
    """Run one rank in this forked process; never return."""
    try:
        for number, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / f"{kind}.{rank}", os.O_WRONLY | os.O_CREAT, 0o600), number)
        os.environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(program.world), "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(program.world), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }  # fmt: skip
        enter(program.tree)
        sys.argv = [str(program.script), *argv]
        module: Any = importlib.import_module("pretrain_llama")
        if record:
            _record_at(module, record, folder, program.tree)
        if program.script.name == PROGRAM:
            module.as_process(lambda: module.main(argv), None)
        else:
            sys.path.insert(0, str(program.script.parent))
            runpy.run_path(str(program.script), run_name="__main__")
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
    except BaseException:
        traceback.print_exc()
    else:
        os._exit(0)
    finally:
        sys.stderr.flush()
        os._exit(1)


def _load(name: str, file: Path) -> Any:
    """Import a file of this checkout under a name; what it imports is the run's checkout's."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _record_at(program: Any, number: int, folder: Path, tree: Path) -> None:
    """Let train_step record one step, write what a replay says of it, and end the rank."""
    if not (tree / "mpu" / "module_tracker.py").exists():  # an older commit
        _load("mpu.module_tracker", ROOT / "mpu" / "module_tracker.py").ROOT = tree
    recorder = _load("weft_recorder", HERE / "record.py")
    take, leave = program.train_step, os._exit  # later as_process takes os._exit(0) for a fault

    rates: dict[int, float] = {}

    def train_step(run: Any, batches: Any, lr: float, decoupled_lr: float | None = None) -> Any:
        rates[run.iteration + 1] = lr
        if run.iteration + 1 != number:
            return take(run, batches, lr, decoupled_lr)
        file = run.config.model.model_file
        names = program.load_model_file(file).hf_names(run.model)
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
        program.sum_in_order(loss.detach().double(), run.grid.world)  # all have written
        sys.stdout.flush()
        sys.stderr.flush()
        leave(0)

    program.train_step = train_step
