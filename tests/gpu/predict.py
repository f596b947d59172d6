# SPDX-License-Identifier: Apache-2.0
"""The rehearsal's prediction of every step that gpu-check measures, by device file.

Each is a rehearsal in a process of its own, as many at once as half the cores. Blind predictions
are of the repository's file of this GPU; calibrated ones of device.json, which `calibrate` wrote.
"""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tests.gpu.calibrate import base_of
from tests.gpu.row import ROOT, Row
from tests.gpu.steps import PROGRAM, VARIANTS, flags

TINY = ("step-2", "run-documents")  # the rows of a play at small sizes


def steps(row: Row) -> dict[str, list[str]]:
    """Return the flags of each row whose step is predicted."""
    found = {f"step-{n}": flags(row.sizes, n) for n in (2, 6)}
    for name, words in VARIANTS.items():
        found[f"run-{name}"] = [*flags(row.sizes, 6), *words.split()]
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
    todo = [(device, name) for device in devices(row) for name in steps(row)]
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 2)) as pool:
        jobs = [pool.submit(one, row, device, name) for device, name in todo]
    failed = [str(job.exception()) for job in jobs if job.exception()]
    row.check("steps without a prediction", len(failed), 0, reasons=failed[:3])


def one(row: Row, device: str, name: str) -> None:
    """Rehearse one step. Raises RuntimeError with the rehearsal's own last line."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rehearsal.json"
        words = [sys.executable, str(PROGRAM)]
        words += [*steps(row)[name], "--rehearse-device", device, "--rehearse-json", str(out)]
        env = {
            k: v
            for k, v in os.environ.items()
            if k not in ("RANK", "WORLD_SIZE", "TRITON_INTERPRET")
        }
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
        ends=[each["step_seconds"] for each in made["time"]["range"]],
        launches=sum(each["count"] for each in made["launches"]),
    )  # fmt: skip
