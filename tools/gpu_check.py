#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check the GPU path on one GPU, in parts of under 8 minutes, most informative first.

    make gpu-check                          all parts
    make gpu-check PART="first kernels"     these
    make gpu-check PYTHON=/path/to/python3  another interpreter, which has torch
    make gpu-check PART=predict             write the prediction alone; it needs no GPU

It installs nothing. Before a part's time begins it writes down the prediction and compiles the
part's kernels. Where there is no GPU it runs what needs none and prints what waits for one. What
cannot be run is named with the reason and fails nothing; it exits with 1 where something failed.
The plan, and what was found: docs/gpu-results.md.
"""

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "runs" / "gpu-check"
LIMIT, OUT_OF_TIME = 460.0, 124  # seconds of a part; the exit code of one that took more
SANITIZERS = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")
# The step of `first`: four layers of Llama 3 8B, 1.9e9 parameters; 80 GB hold them and Adam's state
STEP = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 128256 --num-layers 4
    --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
    --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --swiglu
    --untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 2
    --train-iters 20 --lr 1e-4 --clip-grad 1.0 --bf16
""".split()
PYTEST = ("-m", "pytest", "-v", "-rs", "--tb=short", "-p", "no:cacheprovider")


class Part(NamedTuple):
    """One call of the plan. commands: what follows the interpreter, after `prepare`.

    gpu: it needs one. needs: packages, without which it is skipped. plain: what it runs where only
    pytest is missing.
    """

    what: str
    commands: tuple[tuple[str, ...], ...]
    gpu: bool = True
    needs: tuple[str, ...] = ()
    prepare: tuple[tuple[str, ...], ...] = ()
    plain: tuple[tuple[str, ...], ...] = ()


COMPILE = ("tests/gpu/overlap_cases.py",)
SMALL = ("tests/gpu/time_overlap.py", "--small")
PARTS = {
    "predict": Part("the rehearsal's numbers, to a file", (), gpu=False),
    "compile": Part(
        "overlap kernels compile for sm_90: what a Hopper needs is in their code, and a sample of "
        "the cases' kernels",
        (
            (*PYTEST, "tests/mpu/kernels/test_ahead_of_time.py"),
            (*COMPILE, "--sample", "20"),
        ),
        gpu=False,
        needs=("triton", "pytest"),
    ),
    "interpret": Part(
        "overlap kernels between processes, in Triton's interpreter",
        (
            (*PYTEST, "tests/mpu/kernels/test_overlap_kernels.py",
             "tests/mpu/kernels/test_symmetric_cuda.py"),
        ),
        gpu=False,
        needs=("triton", "pytest"),
    ),
    "first": Part(
        "a training step: does it wait for the device, which attention ran, memory, launches, time",
        (("tests/gpu/measure_step.py", str(OUT / "first.json"), "PREDICTION"),),
    ),
    "overlap": Part(
        "overlap kernels at shapes of tp 8 against cuBLAS, alone and beside a kernel on some SMs",
        (("tests/gpu/time_overlap.py",),),
        needs=("triton",),
    ),
    "kernels": Part(
        "overlap kernels between 2, 4 and 8 processes on one GPU",
        ((*PYTEST, "-m", "gpu", "tests/gpu/test_overlap_kernels.py"),),
        needs=("triton", "pytest"),
        prepare=(COMPILE,),
        plain=((*COMPILE, "--run"),),
    ),
    "sanitizer": Part(
        "compute-sanitizer: memcheck and racecheck of the overlap kernels",
        (("SANITIZER", "memcheck", *SMALL), ("SANITIZER", "racecheck", *SMALL)),
        needs=("triton",),
        prepare=(SMALL,),
    ),
    "trainer": Part(
        "one nccl communicator, attention, the trainer, two gloo ranks on one GPU, offload, graphs",
        (
            (*PYTEST, "-m", "gpu", "-k", "not fp64", "tests/gpu/test_nccl.py",
             "tests/gpu/test_trainer.py", "tests/gpu/test_offload.py",
             "tests/gpu/test_activations.py",
             "tests/gpu/test_attention.py"),
            (*PYTEST, "-m", "gpu", "-k", "fp64", "tests/gpu/test_trainer.py"),  # last: time ends
        ),
        needs=("pytest",),
    ),
}  # fmt: skip


def main(argv: list[str]) -> int:
    """Run the parts; return 1 where one failed."""
    asked = read(argv)
    if importlib.util.find_spec("torch") is None:
        return with_torch(argv)
    gpu, told = device()
    print(f"gpu-check: Python {sys.version.split()[0]} ({sys.executable}), {told}", flush=True)
    prediction = Path(asked.prediction) if asked.prediction else OUT / "prediction.json"
    outcomes = {}
    for name in order(asked.part, gpu):
        began = time.monotonic()
        outcomes[name] = run_part(name, gpu, prediction, asked)
        print(f"== {name}: {outcomes[name]} ({time.monotonic() - began:.0f} s)", flush=True)
    waiting = [name for name in PARTS if PARTS[name].gpu and not gpu]
    if waiting:
        print("== these wait for a GPU:")
        for name in waiting:
            print(f"   {name:<10} {PARTS[name].what}")
    print("gpu-check: " + "; ".join(f"{name} {outcome}" for name, outcome in outcomes.items()))
    return int(any(outcome.startswith("failed") for outcome in outcomes.values()))


def read(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", nargs="*", choices=[*PARTS, []], help="; ".join(PARTS))
    parser.add_argument("--prediction", help="a JSON of --rehearse-json, made before")
    parser.add_argument("--device", default="", help="of the prediction, as in --rehearse-device")
    return parser.parse_args(argv)


def with_torch(argv: list[str]) -> int:
    """Start again with the checkout's own environment, as this interpreter has no torch."""
    own = ROOT / ".venv" / "bin" / "python"
    if not own.exists() or Path(sys.executable) == own:
        print(f"gpu-check: {sys.executable} has no torch: make gpu-check PYTHON=/path/to/python3")
        return 1
    print(f"gpu-check: {sys.executable} has no torch; {own} goes on", flush=True)
    os.execv(own, [str(own), str(Path(__file__).resolve()), *argv])


def device() -> tuple[bool, str]:
    """Return whether there is a GPU, and what there is."""
    import torch

    sys.path.insert(0, str(ROOT))
    from mpu.accelerators import unusable_gpu

    if not torch.cuda.is_available():
        why = unusable_gpu() or "no CUDA device is here, or the environment hides them all"
        return False, f"torch {torch.__version__}; on the CPU: {why}"
    first = torch.cuda.get_device_properties(0)
    count = torch.cuda.device_count()
    return True, f"torch {torch.__version__}, {count} x {first.name}, {first.total_memory:,} bytes"


def order(names: list[str], gpu: bool) -> list[str]:
    """Return the parts to run: those named, else on a GPU the plan's five calls, elsewhere the
    parts that need none.
    """
    return names or [name for name, part in PARTS.items() if part.gpu == gpu]


def run_part(name: str, gpu: bool, prediction: Path, asked: argparse.Namespace) -> str:
    """Run one part; return "passed", "failed ..." or "skipped: why"."""
    part = PARTS[name]
    print(f"== {name}: {part.what}", flush=True)
    if part.gpu and not gpu:
        return "skipped: no GPU"
    missing = [package for package in part.needs if importlib.util.find_spec(package) is None]
    if part.plain and missing == ["pytest"]:
        print(f"without pytest: {part.plain[0][0]} runs the cases; how waits run out is not tested")
        part = part._replace(commands=part.plain)
    elif missing:
        return f"skipped: {sys.executable} has no {' and no '.join(missing)}"
    sanitizer = next((path for path in map(shutil.which, SANITIZERS) if path), None)
    if name == "sanitizer" and sanitizer is None:
        return "skipped: no compute-sanitizer on the path or in /usr/local/cuda/bin"
    told = ""
    if name in ("predict", "first") and not asked.prediction:
        told = write_prediction(prediction, asked.device)
        if told and name == "predict":
            return f"failed: {told}"
    for words in part.prepare:
        if execute([sys.executable, *words], LIMIT):
            return f"failed before its time began: {' '.join(words)}"
    deadline = time.monotonic() + LIMIT
    for words in part.commands:
        command = [sys.executable, *words]
        if words[0] == "SANITIZER":
            command = [str(sanitizer), "--tool", words[1], "--error-exitcode", "9",
                       sys.executable, *words[2:]]  # fmt: skip
        if words[-1] == "PREDICTION":
            command[-1:] = [str(prediction)] if prediction.exists() else []
        if code := execute(command, deadline - time.monotonic()):
            why = "out of time" if code == OUT_OF_TIME else f"exit code {code}"
            return f"failed: {why} of {' '.join(words)}"
    return "passed" + (f", without a prediction: {told}" if told else "")


def write_prediction(path: Path, device: str) -> str:
    """Write the prediction where there is none yet; return why there is none."""
    if path.exists():
        print(f"prediction: {path}, written before")
        return ""
    words = [sys.executable, str(ROOT / "pretrain_llama.py"), *STEP]
    words += ["--rehearse", "--rehearse-json", str(path)]
    words += ["--rehearse-device", device] if device else []
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    path.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT)
    why = ""
    if done.returncode not in (0, 1) or not path.exists():
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        why = f"the rehearsal ended with {done.returncode} and said: {said[-1][:200]}"
    print(f"prediction: {why or f'written to {path}'}", flush=True)
    return why


def execute(command: list[str], limit: float) -> int:
    """Run a command from the checkout and return its exit code; its group dies at the limit."""
    OUT.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    process = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True)
    try:
        return process.wait(timeout=max(1.0, limit))
    except subprocess.TimeoutExpired:
        print(f"gpu-check: out of time ({LIMIT:.0f} s a part)", flush=True)
        return OUT_OF_TIME
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
