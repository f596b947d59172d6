# SPDX-License-Identifier: Apache-2.0
"""The rehearsal's prediction of every step that gpu-check measures, by device file.

Each is a rehearsal in a process of its own, as many at once as half the cores: the rows step-*,
run-* and, of the GPUs that are here, else of 8, several-*; those without a prediction in OUT first,
so that another call goes on where one ran out of time. Other rows measure no step of the program;
the predictions of torch's own stack are frozen (benchmarks/freeze_predictions.py). Blind ones are
of the repository's file of this GPU, calibrated ones of device.json, which `calibrate` wrote.
"""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from tests.gpu.calibrate import base_of
from tests.gpu.logged import PROGRAM
from tests.gpu.row import ROOT, ROWS, RUNS, SEVERAL, STEPS, Row
from tests.gpu.several import LAYOUTS
from tests.gpu.several import words_of as words_of_layout
from tests.gpu.steps import words_of
from tests.gpu.summary import read

RANKS = ("RANK", "WORLD_SIZE")
TINY = ("step-2", "step-2-mixtral", "run-documents", "several-ep")  # of a play at small sizes


class Step(NamedTuple):
    """A row's ranks and flags."""

    world: int
    flags: list[str]


def steps(row: Row) -> dict[str, Step]:
    """Return each row whose step is predicted."""
    names = [f"step-{name}" for name in STEPS] + [f"run-{name}" for name in RUNS]
    found = {name: Step(1, words_of(row, name)) for name in names}
    here = torch.cuda.device_count()
    n = 2 if row.tiny else max((n for n in (2, 4, 8) if n <= here), default=8)
    for name in SEVERAL:
        if n >= LAYOUTS[name].least:
            found[f"several-{name}"] = Step(n, words_of_layout(row, name, n))
    return {name: found[name] for name in TINY} if row.tiny else found


def devices(row: Row) -> list[str]:
    """Return the device files: those asked for, else this GPU's and the calibrated one."""
    made = row.path.parent / "device.json"
    if row.predict:
        return list(row.predict)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "H200"
    return [base_of(name), *([str(made)] if made.exists() else [])]


def predict(row: Row) -> None:
    """Rehearse each step with each device file; write seconds, MFU, bytes and launches."""
    lines = [line for line in read(row.path) if line["what"] == "prediction"]
    made = {(line["device"], line["row"]) for line in lines}
    every = steps(row)
    todo = [(device, name) for device in devices(row) for name in every]
    todo.sort(key=lambda pair: pair in made)
    others = [name for name in ROWS if name not in every]
    row.say("not predicted", rows=others, why="they measure no step of the program on its own")
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 2)) as pool:
        jobs = [pool.submit(one, row, device, name, every[name]) for device, name in todo]
    failed = [str(job.exception()) for job in jobs if job.exception()]
    row.check("steps without a prediction", len(failed), 0, reasons=failed[:3])


def one(row: Row, device: str, name: str, each: Step) -> None:
    """Rehearse one step of rank 0. Raises RuntimeError with the rehearsal's own last line."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rehearsal.json"
        words = [sys.executable, *PROGRAM]
        words += [*each.flags, "--rehearse-device", device, "--rehearse-json", str(out)]
        env = {k: v for k, v in os.environ.items() if k not in (*RANKS, "TRITON_INTERPRET")}
        env |= {"WORLD_SIZE": str(each.world)} if each.world > 1 else {}
        done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)
        made = json.loads(out.read_text()) if out.exists() else {}
    if not made.get("time"):
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        row.say("no prediction", step=name, device=device, failed=said[-1][:300])
        raise RuntimeError(f"{name}: {said[-1][:200]}")
    row.say(
        "prediction", of=name, device=device, seconds=made["time"]["step_seconds"],
        mfu=made["time"]["mfu"], bound_by=made["time"]["bound_by"],
        peak_bytes=made["memory"]["peak_bytes"], findings=len(made["findings"]),
        ends=[end["step_seconds"] for end in made["time"]["range"]],
        launches=sum(kernel["count"] for kernel in made["launches"]), flags=" ".join(each.flags),
    )  # fmt: skip
