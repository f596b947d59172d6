# SPDX-License-Identifier: Apache-2.0
"""Run layouts of a plan for some steps on the user's own ranks, and store the measurements.

A run is pretrain_llama.py with the flags of the plan, on mock data, without checkpoints. Its rate
is the median of --log-json's tokens per second, without the first quarter of its steps, in which
kernels are compiled and memory is allocated. Results are stored in a JSON file of the user's. A
later plan of the same model on the same cluster ranks these layouts by their measured rates.
"""

import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from forecast.device_file import read_device
from forecast.planner.cluster import Cluster
from forecast.planner.model import Model
from model.load import digest, load_model_file
from mpu.launch import cores
from training.data.files import write_text
from training.files.owned import json_with
from training.files.untrusted import parse_json, printable, read_json, read_plain
from training.run.waiting import Progress

ROOT = Path(__file__).resolve().parents[2]
FORMAT = "weft-measured"
LOOK = 0.5  # seconds between two reads of a run's log
PATIENCE = 45.0  # seconds for the ranks to end: a step, and torchrun's own 30 s
LARGEST = 1 << 26  # most bytes that are read of a run's log, and of its standard error
NUMBERS = {"tokens_per_second": (int, float), "steps": (int,)}  # the other values are texts
SLURM = ("srun: ", "slurmstepd: ")  # prefixes of SLURM's lines, which follow those of the ranks


class MeasureError(ValueError):
    """A measurement cannot be made, or a file of results cannot be read.

    The message names the flag or file, the value and the rule.
    """


@dataclass(frozen=True)
class Measured:
    """The result of running a layout."""

    model: str  # as `names_of` writes it
    cluster: str  # as `names_of` writes it
    layout: str  # its flags
    tokens_per_second: float  # of all ranks; 0 if the run failed
    steps: int  # number of steps in the median
    error: str  # the reason if the run failed, such as its last line; else ""
    date: str  # such as 2026-11-29


def names_of(model: Model, cluster: Cluster) -> tuple[str, str]:
    """Return the model and the cluster of a result, as text.

    These are the model's flags, with the digest of a fork's file, and the cluster's name with the
    number and kind of its ranks.
    """
    words, file = shlex.join(model.flags), model.config.model.model_file
    if not file.startswith("model/"):
        words += f" (digest {digest(load_model_file(file))})"
    device = read_device(cluster.device).name
    return words, f"{cluster.name}: {cluster.nodes} nodes of {cluster.node} ranks, {device}"


class Results:
    """The results in a file, which need not exist yet. Raises MeasureError, OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs = _read(path)

    def of(self, model: Model, cluster: Cluster) -> dict[str, Measured]:
        """Return the results of a model's layouts on a cluster, by the layouts' flags."""
        names = names_of(model, cluster)
        return {run.layout: run for run in self.runs if (run.model, run.cluster) == names}

    def add(self, run: Measured) -> None:
        """Store a result, replacing an older one of the same layout, and write the file."""
        key = (run.model, run.cluster, run.layout)
        now = _read(self.path)  # another job may have added results
        self.runs = [old for old in now if (old.model, old.cluster, old.layout) != key]
        self.runs.append(run)
        content = {"format": FORMAT, "runs": [asdict(each) for each in self.runs]}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, json.dumps(content, indent=1) + "\n", json_with("format", "runs"))


def _read(path: Path) -> list[Measured]:
    """Return the results of a file, [] if it does not exist. Raises MeasureError, OSError."""
    if not os.path.lexists(path):
        return []
    try:
        found = read_json(path)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        return [_measured(entry) for entry in found["runs"]]
    except (ValueError, KeyError, TypeError) as error:
        raise MeasureError(
            f"--measured {path}: the measurements cannot be read ({error}): move the file away, "
            "or give another"
        ) from None


def _measured(entry: Any) -> Measured:
    """Return the result of an entry of the file. Raises ValueError."""
    names = [field.name for field in fields(Measured)]
    if not isinstance(entry, dict) or entry.keys() != {*names}:
        raise ValueError(f"a run must be an object with {', '.join(names)}")
    for key, value in entry.items():
        kinds = NUMBERS.get(key, (str,))
        if type(value) not in kinds or (key in NUMBERS and value < 0):
            rule = "a number >= 0" if key in NUMBERS else "a string"
            raise ValueError(f"{key} of a run is {value!r}, not {rule}")
    return Measured(**entry)


def ranked(layouts: Iterable[str], results: Mapping[str, Measured]) -> list[str]:
    """Return layouts in the order of the table: measured ones, the fastest first, then those
    without a result in their given order, then failed ones.
    """

    def place(layout: str) -> tuple[int, float]:
        if layout not in results:
            return 1, 0.0
        return 2 * bool(results[layout].error), -results[layout].tokens_per_second

    return sorted(layouts, key=place)


def launcher(cluster: Cluster, launch: str) -> list[str]:
    """Return the command that starts a program on every rank of a cluster.

    launch: the user's command, for ranks on other machines; "": torchrun, on this one. Raises
    MeasureError if the ranks cannot be started.
    """
    if launch:
        words = shlex.split(launch)
        if not words or shutil.which(words[0]) is None:
            raise MeasureError(f"--launch {launch!r}: its first word is no program on the PATH")
        return words
    if cluster.nodes > 1:
        raise MeasureError(
            f"--measure: {cluster.name} has {cluster.nodes} nodes, but torchrun starts the ranks "
            "of one: in a job with all nodes, give the command that starts all ranks by --launch "
            "(examples/measure.slurm)"
        )
    here, what = (torch.cuda.device_count(), "GPUs") if not cluster.cpu else (cores(), "cores")
    if cluster.node > here:
        raise MeasureError(
            f"--measure: {cluster.name} has {cluster.node} ranks, but this machine has {here} "
            f"{what}: name the cluster that you have, or give --launch a command that starts the "
            "ranks elsewhere"
        )
    torchrun = [sys.executable, str(ROOT / "tools/torchrun.py"), "--standalone"]
    return [*torchrun, "--nproc-per-node", str(cluster.node)]


def measure(
    model: Model, cluster: Cluster, layout: str, words: Sequence[str], steps: int, folder: Path,
    progress: Progress,
) -> Measured:  # fmt: skip
    """Run a layout for some steps, and return the result.

    words: the command that starts the ranks. folder: where a temporary folder with the log is made.
    progress: counts the steps. An exception, such as Ctrl-C's, ends the ranks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".measure-", dir=folder) as own:
        log, errors = (Path(own).absolute() / name for name in ("log.jsonl", "errors"))
        more = ["--train-iters", str(steps), "--log-interval", "1", "--log-json", str(log)]
        code = _run([*words, *more], log, errors, progress)
        rates, last = _rates(log), _last_line(errors)
    error = ""
    if code:
        error = last or f"ended with exit code {code} and no error message"
    elif len(rates) < steps:
        error = f"ended after {len(rates)} of {steps} steps"
    timed = rates[max(1, steps // 4) :]
    rate = 0.0 if error else statistics.median(timed)
    today = time.strftime("%Y-%m-%d")
    return Measured(*names_of(model, cluster), layout, rate, len(timed), error, today)


def _run(words: Sequence[str], log: Path, errors: Path, progress: Progress) -> int:
    """Run a command to its end, and return its exit code. errors: file for its standard error."""
    seen = 0
    # in a session of its own, so that Ctrl-C does not reach the launcher a second time
    with (
        errors.open("wb") as file,
        subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            start_new_session=True,
        ) as child,
    ):
        try:
            while child.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(LOOK)
                steps = len(_rates(log))
                progress.add(steps - seen)
                seen = steps
        except BaseException:
            _end(child)
            raise
    return child.returncode


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a launcher and its ranks. The launcher forwards the signal to ranks in other sessions."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(PATIENCE)
            return


def _rates(log: Path) -> list[float]:
    """Return the tokens per second of each step in a log so far."""
    if not log.exists():
        return []
    lines = read_plain(log, LARGEST).split(b"\n")[:-1]
    records = [parse_json(line, str(log)) for line in lines]
    return [each["tokens_per_second"] for each in records if "tokens_per_second" in each]


def _last_line(errors: Path) -> str:
    """Return the last line of a run's standard error, if possible one that is not SLURM's."""
    text = read_plain(errors, LARGEST).decode(errors="replace")
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    own = [line for line in lines if not line.startswith(SLURM)]
    return printable((own or lines or [""])[-1])
