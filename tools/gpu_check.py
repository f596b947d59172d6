#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check and measure the GPU path on one GPU in an hour: parts of 9 minutes, each of many rows.

    make gpu-check                          all parts that this machine can run, in order
    make gpu-check PART="first peer"        these
    make gpu-check PYTHON=/path/to/python3  another interpreter, which has torch
    make gpu-check ARGS="--tiny --device cpu"   every row at small sizes, without a GPU

It installs nothing and needs no network, no `make setup` and no native library. Each row is a
process of its own with a limit of its own: one that raises, hangs, dies or runs out of memory is
named with the reason, and the next row begins. Each number is a line of OUT/gpu-check.jsonl, on
disk before the next is made; OUT is --out, else $OUT, else runs/gpu-check. What cannot run here is
skipped with the reason. The summary comes last. It exits with 1 where a row failed.

The plan of a first hour, and what was found: docs/gpu-results.md.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # as a script, find tools

from tools import gpu_summary as summary  # noqa: E402
from tools.gpu_summary import SKIPPED, append  # noqa: E402
from training.owned import begins, refuse  # noqa: E402

LIMIT = 540.0  # seconds of a part, compiling included
MOST_PRINTED = 12_000  # characters, of which the summary is sure of its part
OUT_OF_TIME, NO_TIME = 124, 125  # stand for exit codes
SANITIZERS = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")
PYTEST = ("-m", "pytest", "-q", "-rs", "--tb=short", "-p", "no:cacheprovider")
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h


class Row(NamedTuple):
    """One process: what follows the interpreter, its seconds, and the packages that it needs.

    words: () means tests/gpu/row.py of this name. gpus: the least number; 0 needs none.
    """

    name: str
    limit: float
    words: tuple[str, ...] = ()
    gpus: int = 1
    needs: tuple[str, ...] = ()


def pytest(name: str, limit: float, *words: str, gpus: int = 1) -> Row:
    """Return a row of pytest's tests that need a GPU, or of others where gpus is 0."""
    marks = ("-m", "gpu") if gpus else ()
    program = ("xxhash", "safetensors") if PROGRAM.intersection(words) else ()
    return Row(name, limit, (*PYTEST, *marks, *words), gpus, ("pytest", *program))


PROGRAM = {"tests/gpu/test_trainer.py", "tests/gpu/test_activations.py"}  # these start it
CASES, TIMES = "tests/gpu/overlap_cases.py", "tests/gpu/time_overlap.py"
# a part: what it tells, and its rows, the most informative first
PARTS: dict[str, tuple[str, tuple[Row, ...]]] = {
    "first": (
        "facts, kernels against float64, a device file, steps of 2 and 6 layers",
        (
            Row("facts", 60),
            Row("context", 60),
            Row("step-2", 90),
            Row("step-6", 120),
            Row("calibrate", 150),
            *(Row(f"kernel-{name}", 60, needs=("triton",)) for name in (
                "norm", "rope", "swiglu", "loss", "adamw", "float8", "sum")),
            Row("float8", 60),
            Row("attention", 90),
        ),
    ),
    "peer": (
        "the program and the same model in torch's own stack, and losses compared with the CPU's",
        (
            Row("run-bf16", 90),
            Row("peer-eager", 120),
            Row("peer-compiled", 180),
            Row("losses", 150),
            Row("run-fp8-rowwise", 90),
            Row("run-cuda-graph", 90),
        ),
    ),
    "variants": (
        "six layers with other flags, each against run-bf16, and a step that may not wait",
        tuple(Row(f"run-{name}", 90) for name in (
            "fp8-rowwise-wgrad-bf16", "fp8-tensorwise", "fp8-blockwise", "optimizer-triton",
            "fused-linear-loss", "documents",
            "attention-flash", "attention-fused", "attention-unfused")) + (
            Row("step-6-fp8-rowwise", 90), Row("step-6-fp8-blockwise", 90), Row("sync", 60)),
    ),
    "trainer": (
        "the program's own tests: one nccl communicator, two gloo ranks on a GPU, offload, graphs",
        (
            pytest("test-nccl", 60, "tests/gpu/test_nccl.py"),
            pytest("test-activations", 150, "tests/gpu/test_activations.py"),
            pytest("test-offload", 60, "tests/gpu/test_offload.py"),
            pytest("test-trainer", 300, "-k", "not fp64", "tests/gpu/test_trainer.py"),
            pytest("test-attention", 90, "tests/gpu/test_attention.py"),
            pytest("test-trainer-fp64", 200, "-k", "fp64", "tests/gpu/test_trainer.py"),
        ),
    ),
    "overlap": (
        "overlap kernels at shapes of tp 8 against cuBLAS, then between 2 processes on one GPU",
        (
            Row("overlap-time", 150, (TIMES,), needs=("triton",)),
            Row("memcheck", 120, ("SANITIZER", "memcheck", TIMES, "--small"), needs=("triton",)),
            Row("racecheck", 120, ("SANITIZER", "racecheck", TIMES, "--small"), needs=("triton",)),
            Row("overlap-compile", 200, (CASES,), gpus=0, needs=("triton",)),
            pytest("overlap-kernels", 300, "tests/gpu/test_overlap_kernels.py"),
        ),
    ),
    "small": (
        "products and moves of experts, their overlap; 160 M parameters: graphs, loss curves",
        (
            Row("moe-kernels", 150),
            Row("ep-overlap", 180),
            Row("step-160m", 60),
            Row("step-160m-graph", 60),
            *(Row(f"curve-{name}", 150) for name in (
                "bf16", "fp8-tensorwise", "fp8-blockwise", "bf16-seed")),
        ),
    ),
    "several": (
        "NCCL, and the program on layouts of 2, 4 or 8 GPUs, the most informative first",
        (
            Row("collectives", 90, gpus=2),
            *(Row(f"several-{name}", 90, gpus=2) for name in ("zero-3", "tp-ring", "tp-symmetric")),
            *(Row(f"several-{name}", 90, gpus=2) for name in (
                "dp", "zero-1", "tp-none", "cp-p2p", "cp-all-gather", "pp-1f1b", "pp-zb-v",
                "tp-pp-dp")),
        ),
    ),
    "peers": (
        "the same model in torch's own stack on 2, 4 or 8 GPUs: FSDP2, and tensor parallelism",
        (Row("overlap-peers", 150, gpus=2),)
        + tuple(Row(f"peer-{name}", 240, gpus=2) for name in ("fsdp2", "tp")),
    ),
    "predict": (
        "the rehearsal's seconds and bytes of every step above, before or after they are measured",
        (Row("predict", LIMIT, gpus=0),),
    ),
    "compile": (
        "overlap kernels compile for sm_90, without a GPU",
        (
            pytest("ahead-of-time", 300, "tests/mpu/kernels/test_ahead_of_time.py", gpus=0),
            Row("overlap-sample", 200, (CASES, "--sample", "20"), gpus=0, needs=("triton",)),
        ),
    ),
    "interpret": (
        "overlap kernels between processes, in Triton's interpreter",
        (
            pytest("interpreted", 500, "tests/mpu/kernels/test_overlap_kernels.py",
                   "tests/mpu/kernels/test_symmetric_cuda.py", gpus=0),
        ),
    ),
}  # fmt: skip

UNPLAYED = ("trainer", "overlap", "compile", "interpret")  # parts that have no small form


class Options(NamedTuple):
    """The command line, and what was found here: GPUs, and a sentence about the machine."""

    parts: list[str]
    out: Path
    device: str
    tiny: bool
    gpus: int = 0
    machine: str = ""
    predict: tuple[str, ...] = ()


class Printer:
    """Print within MOST_PRINTED characters; the summary's part is reserved for it."""

    def __init__(self) -> None:
        self.left = MOST_PRINTED - summary.MOST - 100

    def __call__(self, line: str) -> None:
        """Print a line, unless the room of such lines is used up."""
        self.left -= len(line) + 1
        if self.left > 0:
            print(line, flush=True)


def main(argv: list[str]) -> int:
    """Run the parts; return 1 where a row failed."""
    options = read(argv)
    if importlib.util.find_spec("torch") is None:
        return with_torch(argv)
    gpus, machine_text = found()
    options = options._replace(gpus=0 if options.device == "cpu" else gpus, machine=machine_text)
    try:
        refuse("--out", options.out / "summary.txt", begins(b"== summary"), "that of gpu-check")
    except ValueError as error:
        sys.exit(f"make gpu-check: {error}")
    options.out.mkdir(parents=True, exist_ok=True)
    path, say = options.out / summary.LINES, Printer()
    say(f"gpu-check: Python {sys.version.split()[0]} ({sys.executable}), {machine_text}")
    adopt_orphans(True)
    outcomes: dict[str, str] = {}
    try:
        for name in order(options):
            outcomes |= run_part(name, options, say)
    finally:
        adopt_orphans(False)
    text = summary.text(summary.read(path), outcomes)
    (options.out / "summary.txt").write_text(text + "\n")
    print(text, flush=True)
    return int(any(outcome.startswith("failed") for outcome in outcomes.values()))


def read(argv: list[str]) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", nargs="*", choices=[*PARTS, []], help="; ".join(PARTS))
    parser.add_argument(
        "--out", type=Path, help="folder of the results [$OUT, else runs/gpu-check]"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small sizes, which a CPU computes too")
    predicted = "device files of `predict` [this GPU's, and OUT/device.json]"
    parser.add_argument("--predict", nargs="*", default=(), metavar="DEVICE", help=predicted)
    given = parser.parse_args(argv)
    out = given.out or Path(os.environ.get("OUT") or ROOT / "runs" / "gpu-check")
    predict = tuple(given.predict)
    return Options(given.part, out.resolve(), given.device, tiny=given.tiny, predict=predict)


def with_torch(argv: list[str]) -> int:
    """Start again with the checkout's own environment, as this interpreter has no torch."""
    own = ROOT / ".venv" / "bin" / "python"
    if not own.exists() or Path(sys.executable) == own:
        print(f"gpu-check: {sys.executable} has no torch: make gpu-check PYTHON=/path/to/python3")
        return 1
    print(f"gpu-check: {sys.executable} has no torch; {own} goes on", flush=True)
    os.execv(own, [str(own), str(Path(__file__).resolve()), *argv])


PROBE = """
import torch, json
from mpu.accelerators import unusable_gpu
n = torch.cuda.device_count() if torch.cuda.is_available() else 0
why = "" if n else unusable_gpu() or "no CUDA device is here, or the environment hides them all"
name = torch.cuda.get_device_name(0) if n else ""
print(json.dumps({"gpus": n, "torch": torch.__version__, "name": name, "why": why}))
"""


def found() -> tuple[int, str]:
    """Return how many GPUs torch sees, and a sentence. A process asks, as torch may hang or die."""
    words, env = [sys.executable, "-c", PROBE], {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=env)
        report = json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return 0, f"torch did not say which GPUs it sees ({type(error).__name__})"
    if not report["gpus"]:
        return 0, f"torch {report['torch']}; on the CPU: {report['why']}"
    return int(report["gpus"]), f"torch {report['torch']}, {report['gpus']} x {report['name']}"


def order(options: Options) -> list[str]:
    """Return the parts to run: those named, else those of which a row can run here."""
    if options.parts:
        return options.parts
    if options.device == "cpu" and options.tiny:
        return [name for name in PARTS if name not in UNPLAYED]
    if options.gpus:
        return [name for name, (_, rows) in PARTS.items() if 0 < rows[0].gpus <= options.gpus]
    return [name for name, (_, rows) in PARTS.items() if not rows[0].gpus]


def run_part(name: str, options: Options, say: Printer) -> dict[str, str]:
    """Run a part's rows, one after another, within LIMIT; return their outcomes by name."""
    what, rows = PARTS[name]
    path, log = options.out / summary.LINES, options.out / "rows.log"
    say(f"== {name}: {what}")
    append(path, {"row": name, "what": "part", "begins": time.time(), "machine": options.machine})
    deadline, outcomes = time.monotonic() + LIMIT, dict[str, str]()
    for row in rows:
        began = time.monotonic()
        if why := cannot(row, options):
            outcome = f"skipped: {why}"
        else:
            with log.open("ab") as file:
                file.write(f"\n==== {row.name}\n".encode())
                file.flush()
                left = deadline - began
                limit, ends = min(row.limit, left), left < min(row.limit, 3.0)
                code = NO_TIME if ends else execute(command(row, options), limit, file)
            outcome = outcome_of(code, row, summary.read(path), limit)
        outcomes[row.name] = outcome
        seconds = time.monotonic() - began
        line = {"row": row.name, "what": "outcome", "outcome": outcome, "seconds": seconds}
        cause = tail(log) if outcome.startswith("failed") else ""
        append(path, {**line, "part": name, "said": cause})
        say(f"{row.name:<22} {seconds:>5.0f} s  {outcome[:90]}")
    return outcomes


def cannot(row: Row, options: Options) -> str:
    """Return why a row cannot run here, or an empty text. Rows of row.py say more themselves."""
    played = options.device == "cpu" and options.tiny and not row.words
    if row.gpus > options.gpus and not played:
        return f"the row needs {row.gpus} GPU{'s' * (row.gpus > 1)}, and {options.gpus} are here"
    missing = [package for package in row.needs if importlib.util.find_spec(package) is None]
    if missing:
        return f"{sys.executable} has no {' and no '.join(missing)}"
    if row.words[:1] == ("SANITIZER",) and sanitizer() is None:
        return "no compute-sanitizer on the path or in /usr/local/cuda/bin"
    return ""


def sanitizer() -> str | None:
    """Return the path of compute-sanitizer."""
    return next((path for path in map(shutil.which, SANITIZERS) if path), None)


def command(row: Row, options: Options) -> list[str]:
    """Return the command of a row."""
    if row.words[:1] == ("SANITIZER",):
        tool = [str(sanitizer()), "--tool", row.words[1], "--error-exitcode", "9"]
        return [*tool, sys.executable, *row.words[2:]]
    if row.words:
        return [sys.executable, *row.words]
    words = [
        sys.executable,
        "tests/gpu/row.py",
        row.name,
        "--out",
        str(options.out / summary.LINES),
    ]
    device = options.device if row.gpus else "cpu"  # also where torch was built without CUDA
    words += ["--device", device] + (["--tiny"] if options.tiny else [])
    return words + (["--predict", *options.predict] if options.predict else [])


def outcome_of(code: int, row: Row, lines: Iterable[dict[str, Any]], limit: float) -> str:
    """Return "passed", "skipped: why" or "failed: why", by the exit code and the row's lines."""
    mine = [line for line in lines if line["row"] == row.name]
    why = [str(line["skipped"]) for line in mine if line["what"] == "skipped"]
    wrong = [line for line in mine if "failed" in line or line.get("ok") is False]
    if code == 0:
        return "passed"
    if code == SKIPPED and why:
        return f"skipped: {why[-1]}"
    if code == NO_TIME:
        return f"skipped: the part's {LIMIT:.0f} s were over"
    if code == OUT_OF_TIME:
        return f"failed: out of time ({limit:.0f} s)"
    if code < 0:
        return f"failed: killed by {signal.Signals(-code).name}"
    if wrong:
        first = wrong[0]
        cause = first.get("failed") or f"error {first['error']}, limit {first['limit']}"
        return f"failed: {first['what']}: {cause}"
    return f"failed: exit code {code}"


def tail(log: Path, most: int = 1500) -> str:
    """Return the end of what the last row printed."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - most))
        return file.read().decode(errors="replace")


# ---- processes ----


def execute(words: Sequence[str], limit: float, file: Any) -> int:
    """Run a command from the checkout, its output to a file; return its exit code.

    At the limit it and all that it started are killed, also what it left behind when it ended.
    """
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    env |= {"PYTHONUNBUFFERED": "1"}
    before = descendants(os.getpid())
    process = subprocess.Popen(
        words, cwd=ROOT, env=env, start_new_session=True, stdin=subprocess.DEVNULL, stdout=file,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        return process.wait(timeout=max(0.1, limit))
    except subprocess.TimeoutExpired:
        return OUT_OF_TIME
    finally:
        kill_all(process, before)


def adopt_orphans(do: bool) -> None:
    """Be the parent of descendants whose own parent dies, so that they can be found (Linux)."""
    try:
        ctypes.CDLL(None).prctl(SUBREAPER, int(do), 0, 0, 0)
    except (OSError, AttributeError):
        return


def kill_all(process: subprocess.Popen[bytes], before: Sequence[int]) -> None:
    """Kill a command's group, and what descends from this process and did not `before`."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for _ in range(40):  # one that is killed may have started another
        left = [pid for pid in descendants(os.getpid()) if pid not in before]
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if not left:
            return
        time.sleep(0.05)


def descendants(pid: int) -> list[int]:
    """Return the processes that a process started, and those that these did (Linux)."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    every, found = [pid], list[int]()
    while every:
        mine = children.get(every.pop(), [])
        found += mine
        every += mine
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
