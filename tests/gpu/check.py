#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check and measure the GPU path, call by call: each of at most 9 minutes, of many rows.

    make gpu-check                          all that can run here, without a result in OUT first
    make gpu-check PART="steps experts"     these parts
    make gpu-check ROWS="step-6 run-bf16"   these rows, in this order
    make gpu-check PYTHON=/path/to/python3  another interpreter, which has torch
    make gpu-check ARGS="--seconds 3600"    a call of an hour
    make gpu-check ARGS="--tiny --device cpu"   every row at small sizes, without a GPU

It installs nothing and needs no network, no `make setup` and no native library. Each row is a
process of its own with a limit of its own: one that raises, hangs, dies or runs out of memory is
named with the reason, and the next row begins. Each number is a line of OUT/gpu-check.jsonl, on
disk before the next is made; OUT is --out, else $OUT, else runs/gpu-check. Rows of parts that have
a result there come last, so the same command again goes on where the last call ended. A row that is
compared with another brings that one into its call: ratios are of one call, so of one card. What
cannot run here is skipped with the reason. The summary comes last. It exits with 1 where a row
failed.

The calls for one GPU and for several, and what was found: docs/gpu-results.md.
"""

import argparse
import ctypes
import difflib
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # as a script, find tests

from tests.gpu import summary  # noqa: E402
from tests.gpu.summary import SKIPPED, append  # noqa: E402
from training.files.owned import begins, refuse  # noqa: E402

LIMIT = 540.0  # seconds of a call, compiling included, unless --seconds says otherwise
MOST_PRINTED = 12_000  # characters, of which the summary is sure of its part
OUT_OF_TIME = 124  # stands for an exit code
NO_TESTS = 5  # pytest's
SANITIZERS = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")
PYTEST = ("-m", "pytest", "-q", "-rs", "--tb=short", "-p", "no:cacheprovider")
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h


class Row(NamedTuple):
    """One process: what follows the interpreter, its seconds, and the packages that it needs.

    words: () means tests/gpu/row.py of this name. gpus: the least number; 0 needs none. base: the
    row whose tokens a second this one's are divided by. small: what follows the interpreter with
    --tiny on a CPU; where words are given without it, the row has no such form.
    """

    name: str
    limit: float
    words: tuple[str, ...] = ()
    gpus: int = 1
    needs: tuple[str, ...] = ()
    base: str = ""
    small: tuple[str, ...] = ()


def pytest(name: str, limit: float, *words: str, gpus: int = 1, small: str = "") -> Row:
    """Return a row of pytest's tests that need a GPU, or of others where gpus is 0.

    small: the expression of -k that chooses what a CPU runs, "" where there is nothing.
    """
    marks = ("-m", "gpu") if gpus else ()
    program = ("xxhash", "safetensors") if PROGRAM.intersection(words) else ()
    files = tuple(word for word in words if word.endswith(".py"))
    less = (*PYTEST, *marks, *(("--on", "cpu") if gpus else ()), "-k", small, *files)
    return Row(
        name,
        limit,
        (*PYTEST, *marks, *words),
        gpus,
        ("pytest", *program),
        small=less if small else (),
    )


PROGRAM = {"tests/gpu/test_trainer.py", "tests/gpu/test_activations.py"}  # these start it
CASES, TIMES = "tests/gpu/overlap_cases.py", "tests/gpu/time_overlap.py"
# a part: what it tells, and its rows; parts and rows that have not run yet come first
PARTS: dict[str, tuple[str, tuple[Row, ...]]] = {
    "steps": (
        "steps of Llama 3 8B by recipe of float8 and by optimizer, each profiled, beside torch's",
        (
            Row("facts", 60),
            Row("step-6", 120),
            *(Row(f"step-6-{name}", 90, base="step-6") for name in (
                "fp8-tensorwise", "fp8-blockwise", "fp8-rowwise", "muon")),
            Row("run-bf16", 90),
            Row("run-max-logits", 90, base="run-bf16"),
            Row("peer-compiled", 180, base="run-bf16"),
            Row("peer-eager", 120, base="run-bf16"),
        ),
    ),
    "experts": (
        "layers of Qwen3-30B-A3B and of Mixtral 8x7B, their parts, kernels, a device file",
        (
            Row("step-2-qwen3-30b-a3b", 120),
            Row("step-2-mixtral", 120),
            Row("moe-kernels", 150),
            Row("ep-overlap", 180),
            pytest("test-offload", 90, "tests/gpu/test_offload.py", small="state or dtype1"),
            *(Row(f"kernel-{name}", 60, needs=("triton",)) for name in (
                "norm", "max-logits", "expert-rows", "grouped-wgrad", "float8",
                "swiglu-rows")),
            Row("calibrate", 150),
        ),
    ),
    "small": (
        "160 M parameters: a step; losses of bf16 and of float8 on one text",
        (
            Row("step-160m", 60),
            Row("curve-bf16", 150),
            *(Row(f"curve-{name}", 150, base="curve-bf16") for name in (
                "fp8-tensorwise", "fp8-blockwise", "bf16-seed")),
        ),
    ),
    "overlap": (
        "overlap kernels at shapes of tp 8 against cuBLAS and between processes; losses; waits",
        (
            Row("overlap-time", 150, (TIMES,), needs=("triton",)),
            Row("memcheck", 120, ("SANITIZER", "memcheck", TIMES, "--small"), needs=("triton",)),
            Row("racecheck", 120, ("SANITIZER", "racecheck", TIMES, "--small"), needs=("triton",)),
            Row("overlap-compile", 200, (CASES,), gpus=0, needs=("triton",),
                small=(CASES, "--sample", "400")),
            pytest("overlap-kernels", 300, "tests/gpu/test_overlap_kernels.py"),
            Row("losses", 150),
            Row("sync", 60),
        ),
    ),
    "variants": (
        "six layers with other flags, each against run-bf16",
        tuple(Row(f"run-{name}", 90, base="run-bf16") for name in (
            "fp8-rowwise-wgrad-bf16", "fp8-tensorwise", "fused-linear-loss", "documents", "muon",
            "attention-flash", "attention-fused", "attention-unfused", "fp8-blockwise",
            "fp8-rowwise")),
    ),
    "kernels": (
        "kernels, float8's products and attention against float64; a step of 2 layers",
        (
            Row("attention", 90),
            Row("context", 60),
            Row("float8", 60),
            *(Row(f"kernel-{name}", 60, needs=("triton",)) for name in (
                "rope", "swiglu", "loss", "sum")),
            Row("step-2", 90),
        ),
    ),
    "trainer": (
        "the program's own tests: one nccl communicator, two gloo ranks on a GPU, offload",
        (
            pytest("test-nccl", 60, "tests/gpu/test_nccl.py"),
            pytest("test-activations", 150, "tests/gpu/test_activations.py"),
            pytest("test-trainer", 300, "-k", "not fp64", "tests/gpu/test_trainer.py",
                   small="3-fp32"),
            pytest("test-attention", 90, "tests/gpu/test_attention.py",
                   small="512-20 or backend"),
            pytest("test-trainer-fp64", 200, "-k", "fp64", "tests/gpu/test_trainer.py",
                   small="sp-fp64"),
        ),
    ),
    "several": (
        "NCCL, and the program on layouts of 2, 4 or 8 GPUs, the most informative first",
        (
            Row("collectives", 90, gpus=2),
            *(Row(f"several-{name}", 90, gpus=2, base=base and f"several-{base}")
              for name, base in (
                ("dp", ""), ("zero-3", "dp"), ("tp-none", ""), ("tp-symmetric", "tp-none"),
                ("tp-ring", "tp-none"), ("ep", ""), ("ep-overlap", "ep"), ("fp8-tp", "tp-none"),
                ("fp8-zero-3", "zero-3"), ("pp-1f1b", ""), ("pp-zb-v", "pp-1f1b"),
                ("pp-interleaved", "pp-1f1b"), ("cp-p2p", ""), ("cp-a2a", "cp-p2p"),
                ("cp-all-gather", "cp-p2p"), ("zero-2", "dp"), ("zero-1", "dp"), ("muon", "dp"),
                ("tp-pp-dp", "dp"))),
        ),
    ),
    "peers": (
        "the same model in torch's own stack on 2, 4 or 8 GPUs: FSDP2, and tensor parallelism",
        (
            Row("overlap-peers", 150, gpus=2),
            Row("peer-fsdp2", 240, gpus=2, base="several-zero-3"),
            Row("peer-tp", 240, gpus=2, base="several-tp-ring"),
        ),
    ),
    "predict": (
        "the rehearsal's seconds and bytes of every step above, before or after they are measured",
        (Row("predict", 3600, gpus=0),),
    ),
    "compile": (
        "overlap kernels compile for sm_90, without a GPU",
        (
            pytest("ahead-of-time", 300, "tests/mpu/kernels/test_ahead_of_time.py", gpus=0,
                   small="pusher_reads or flags_by or program_for"),
            Row("overlap-sample", 200, (CASES, "--sample", "20"), gpus=0, needs=("triton",),
                small=(CASES, "--sample", "400")),
        ),
    ),
    "interpret": (
        "overlap kernels between processes, in Triton's interpreter",
        (
            pytest("interpreted", 500, "tests/mpu/kernels/test_overlap_kernels.py",
                   "tests/mpu/kernels/test_symmetric_cuda.py", gpus=0,
                   small="a_pusher or do_not_take"),
        ),
    ),
}  # fmt: skip


def every() -> dict[str, Row]:
    """Return the rows of all parts by name."""
    return {row.name: row for _, rows in PARTS.values() for row in rows}


class Options(NamedTuple):
    """The command line, and what was found here: GPUs, and a sentence about the machine.

    names: of parts and rows. seconds: of the whole call.
    """

    names: list[str]
    out: Path
    device: str
    tiny: bool
    gpus: int = 0
    machine: str = ""
    predict: tuple[str, ...] = ()
    seconds: float = LIMIT

    @property
    def plays(self) -> bool:
        """Whether rows run at small sizes on a CPU."""
        return self.device == "cpu" and self.tiny

    @property
    def kind(self) -> tuple[str, bool]:
        """What the results of a call have in common with those of another: device, sizes."""
        return self.device, self.tiny


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
    """Run the rows; return 1 where one failed."""
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
    rows = chosen(options, summary.finished(summary.of_kind(summary.read(path), options.kind)))
    line = {"row": "call", "what": "call", "begins": int(time.time()), "machine": options.machine}
    bases = {row.name: row.base for row in rows if row.base}
    append(path, {**line, "device": options.device, "tiny": options.tiny, "bases": bases})
    adopt_orphans(True)
    try:
        outcomes = run_rows(rows, options, say)
    finally:
        adopt_orphans(False)
    text = summary.text(summary.of_kind(summary.read(path), options.kind), outcomes)
    (options.out / "summary.txt").write_text(text + "\n")
    print(text, flush=True)
    return int(any(outcome.startswith("failed") for outcome in outcomes.values()))


def read(argv: list[str]) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help=f"parts ({', '.join(PARTS)}) and rows")
    parser.add_argument(
        "--out", type=Path, help="folder of the results [$OUT, else runs/gpu-check]"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small sizes, which a CPU computes too")
    parser.add_argument(
        "--seconds", type=float, default=LIMIT, help="of the whole call [%(default)s]"
    )
    predicted = "device files of `predict` [this GPU's, and OUT/device.json]"
    parser.add_argument("--predict", nargs="*", default=(), metavar="DEVICE", help=predicted)
    given = parser.parse_args(argv)
    out = given.out or Path(os.environ.get("OUT") or ROOT / "runs" / "gpu-check")
    predict = tuple(given.predict)
    for name in given.names:
        if name not in PARTS and name not in every():
            close = difflib.get_close_matches(name, [*PARTS, *every()], 3)
            meant = f"did you mean {' or '.join(close)}?" if close else f"parts: {', '.join(PARTS)}"
            sys.exit(f"make gpu-check: there is no part and no row {name!r}; {meant}")
    if not (given.seconds > 0 and math.isfinite(given.seconds)):
        sys.exit(f"make gpu-check: --seconds {given.seconds} is not a number of seconds above 0")
    return Options(
        given.names, out.resolve(), given.device, given.tiny, predict=predict, seconds=given.seconds
    )


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
if n:  # the first part of the UUID tells cards apart
    name += " " + str(getattr(torch.cuda.get_device_properties(0), "uuid", "")).split("-")[0]
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


def chosen(options: Options, finished: set[str]) -> list[Row]:
    """Return the rows of a call: those named in the order given, of parts the finished ones last.

    A row that can run is preceded by its base, where that was not named itself.
    """
    names = options.names or default(options)
    rows = [row for name in names for row in (PARTS[name][1] if name in PARTS else [every()[name]])]
    rows.sort(key=lambda row: row.name in finished and row.name not in names)
    found: dict[str, Row] = {}
    for row in rows:
        if row.base and row.base not in names and not cannot(row, options):
            found.setdefault(row.base, every()[row.base])
        found.setdefault(row.name, row)
    return list(found.values())


def default(options: Options) -> list[str]:
    """Return the parts of which a row can run here."""
    if options.plays:
        return list(PARTS)
    if options.gpus:
        return [name for name, (_, rows) in PARTS.items() if 0 < rows[0].gpus <= options.gpus]
    return [name for name, (_, rows) in PARTS.items() if not rows[0].gpus]


def run_rows(rows: Sequence[Row], options: Options, say: Printer) -> dict[str, str]:
    """Run rows, one after another, within the call's seconds; return their outcomes by name."""
    path, log = options.out / summary.LINES, options.out / "rows.log"
    deadline, outcomes = time.monotonic() + options.seconds, dict[str, str]()
    for row in rows:
        began = time.monotonic()
        left = deadline - began
        if why := cannot(row, options):
            outcome = f"skipped: {why}"
        elif left < min(row.limit, 3.0):
            outcome = f"skipped: the call's {options.seconds:.0f} s were over"
        else:
            before = len(summary.read(path))
            with log.open("ab") as file:
                start = file.tell()
                file.write(f"\n==== {row.name}\n".encode())
                file.flush()
                code = execute(command(row, options), min(row.limit, left), file)
            said = tail(log, start)
            outcome = outcome_of(code, row, summary.read(path)[before:], said)
            if code == OUT_OF_TIME and left < row.limit:
                outcome = f"skipped: the call's {options.seconds:.0f} s were over while it ran"
        outcomes[row.name] = outcome
        seconds = time.monotonic() - began
        line = {"row": row.name, "what": "outcome", "outcome": outcome, "seconds": seconds}
        append(path, {**line, "said": said if outcome.startswith("failed") else ""})
        say(f"{row.name:<22} {seconds:>5.0f} s  {outcome[:90]}")
    return outcomes


def cannot(row: Row, options: Options) -> str:
    """Return why a row cannot run here, or an empty text. Rows of row.py say more themselves."""
    played = options.plays and (row.small or not row.words)
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
        return [sys.executable, *(row.small if options.plays and row.small else row.words)]
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


def outcome_of(code: int, row: Row, lines: Iterable[dict[str, Any]], said: str) -> str:
    """Return "passed", "skipped: why" or "failed: why".

    It goes by the exit code, what the row wrote and, of pytest, the end of what it printed.
    """
    mine = [line for line in lines if line["row"] == row.name]
    why = [str(line["skipped"]) for line in mine if line["what"] == "skipped"]
    wrong = [line for line in mine if "failed" in line or line.get("ok") is False]
    if row.words[:2] == PYTEST[:2] and code in (0, NO_TESTS) and not re.search(r"\d passed", said):
        reasons = re.findall(r"^SKIPPED \[\d+\] \S+ (.*)", said, re.M)
        return f"skipped: {reasons[-1] if reasons else 'pytest found no test to run'}"
    if code == 0:
        return "passed"
    if code == SKIPPED and why:
        return f"skipped: {why[-1]}"
    if code == OUT_OF_TIME:
        return f"failed: out of time ({row.limit:.0f} s)"
    if code < 0:
        return f"failed: killed by {signal.Signals(-code).name}"
    if wrong:
        first = wrong[0]
        cause = first.get("failed") or f"error {first['error']}, limit {first['limit']}"
        return f"failed: {first['what']}: {cause}"
    return f"failed: exit code {code}"


def tail(log: Path, start: int, most: int = 1500) -> str:
    """Return the end of what the last row printed, from `start` on."""
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - most))
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
