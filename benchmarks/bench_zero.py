#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare the ZeRO levels with FSDP2 and DeepSpeed ZeRO, in one run.

    python benchmarks/bench_zero.py [--cases tiny-fp32-2 ...] [--levels 1 3]
                                    [--deepspeed-python PATH]

Weft runs as users run it: pretrain_llama.py under torchrun, whose log is read. FSDP2 is
peers/native.py; DeepSpeed is peers/deepspeed_zero.py in an interpreter that has it. All start from
the same weights, read the same tokens and make the same steps: 4 sequences, 4 / dp of them on a
rank in one micro-batch, AdamW, clipping at 1.0. Their losses are compared before their times.
Launches alternate, so that drifts of the machine's speed affect all equally; a figure is the median
over the timed steps of all launches. The ranks divide the cores, with at least one thread each.

FSDP2 reshards weights after forward, as ZeRO-3 does, and is compared with level 3. "FSDP2 kept"
keeps them until the end of backward (reshard_after_forward=False) and is compared with levels 0 to
2. DeepSpeed's stage 0 is left out: in bf16 it has no fp32 masters.

bound   only the step's matmuls and attention, on the same number of ranks
alone   Weft's ranks without communication: the same number of processes at once, each of which
        trains its part of the batch by itself. The difference is the cost of ZeRO
peak    the largest rank's resident memory in the timed steps, of the whole process. The peers trim
        their heap (malloc_trim) and reset the kernel's peak (VmHWM) before the last warm-up step.
        Weft's peak is reset from outside at that step and its heap is not trimmed, so memory left
        over from its start-up counts.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.bench_step import (  # noqa: E402
    BATCH,
    PEER,
    SIZES,
    Side,
    command,
    environment,
    model_flags,
    report,
    run_bound,
)
from benchmarks.peak import watch  # noqa: E402
from benchmarks.peers import native  # noqa: E402
from model.llama import LlamaConfig, hf_config  # noqa: E402
from mpu.grid import Grid  # noqa: E402
from training import checkpoint  # noqa: E402
from training.checkpoint.pieces import whole  # noqa: E402
from training.data.build import build_datasets  # noqa: E402
from training.data.tokenizer import build_tokenizer  # noqa: E402
from training.flags.model_sizes import of_model  # noqa: E402
from training.flags.parse import parse  # noqa: E402

DEEPSPEED = PEER.parent / "deepspeed_zero.py"
CASES = [f"{size}-{dtype}-{dp}" for size in SIZES for dtype in ("fp32", "bf16") for dp in (2, 4)]
WARM = 2
STEPS, LAUNCHES = {"tiny": 10, "small": 2}, {"tiny": 3, "small": 2}
TOLERANCE = {"fp32": 1e-3, "bf16": 1e-2}  # of a loss
UNLIKE = "not the same training"
HEAD = """
| model, dtype, ranks | level | Weft | {0} | ratio | of bound, alone | peak, Weft / {0} | loss off |
|---|---|---|---|---|---|---|---|"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES, metavar="SIZE-DTYPE-DP")
    parser.add_argument("--levels", nargs="+", type=int, choices=range(4), default=[1, 3],
                        metavar="LEVEL", help="of Weft, and stages of DeepSpeed (1 3)")  # fmt: skip
    parser.add_argument("--deepspeed-python", metavar="PATH", help="interpreter with deepspeed")
    parser.add_argument("--launches", type=int, default=0, help="of each (tiny 3, small 2)")
    parser.add_argument("--steps", type=int, default=0, help="timed, a launch (tiny 10, small 2)")
    args = parser.parse_args()
    why = missing_deepspeed(args.deepspeed_python)
    print(f"torch {torch.__version__}, {len(os.sched_getaffinity(0))} cores; tokens/s, medians of "
          "alternating launches; peak memory of a rank in MB")  # fmt: skip
    tables: dict[str, list[str]] = {"FSDP2": [], "DeepSpeed": [], UNLIKE: []}
    for case in args.cases:
        sides, bound, alone = run_all(case, args, with_deepspeed=not why)
        for peer, row in rows(case, sides, bound, alone):
            tables[peer].append(row)
            print(f"{peer}: {row}", file=sys.stderr, flush=True)
    unlike = tables.pop(UNLIKE)
    for peer, lines in tables.items():
        if lines:
            print(HEAD.format(peer), *lines, sep="\n")
    if why:
        print(f"\nDeepSpeed is left out: {why}")
    if unlike:
        sys.exit("\n".join([f"\n{UNLIKE}, so left out:", *unlike]))


def missing_deepspeed(python: str | None) -> str:
    """Return why DeepSpeed is left out, or "" if the interpreter has it."""
    if python is None:
        return (
            "--deepspeed-python names no interpreter; make one by python3 -m venv DIR, and install "
            "in it torch==2.13.0, then deepspeed==0.19.8, by pip"
        )
    try:
        words = [python, "-c", "import deepspeed"]
        found = subprocess.run(words, capture_output=True, text=True)
    except OSError as error:
        return f"--deepspeed-python {python}: {error.strerror}"
    if found.returncode:
        return f"--deepspeed-python {python}: {found.stderr.strip().splitlines()[-1]}"
    return ""


def run_all(
    case: str, args: argparse.Namespace, with_deepspeed: bool
) -> tuple[dict[tuple[str, int], tuple[Side, list[float]]], float, float]:
    """Launch a case's sides in turn; return {(side, level): (steps, losses)}, and the seconds of
    the bound and of ranks alone.
    """
    size, dtype, dp = case.split("-")
    steps = args.steps or STEPS[size]
    sides: dict[tuple[str, int], tuple[Side, list[float]]] = {}
    bounds, alone = [], Side()
    with tempfile.TemporaryDirectory() as folder:
        start = Start(size, WARM + steps, Path(folder))
        launches = [("Weft", level) for level in args.levels]
        launches += [("FSDP2", 3)] * (3 in args.levels)
        launches += [("FSDP2 kept", 2)] * (min(args.levels) < 3)
        launches += [("DeepSpeed", level) for level in args.levels if level and with_deepspeed]
        for _ in range(args.launches or LAUNCHES[size]):
            for name, level in launches:
                if name == "Weft":
                    times, peak, losses = run_weft(case, level, start)
                else:
                    python = args.deepspeed_python if name == "DeepSpeed" else sys.executable
                    times, peak, losses = run_peer(case, name, level, start, python)
                side, _ = sides.setdefault((name, level), (Side(), losses))
                side.add(times, peak)
            bounds.append(run_bound(f"{size}-{dtype}-1", int(dp)))
            alone.add(run_alone(case, start), 0.0)
    return sides, min(bounds), alone.median()


def rows(
    case: str, sides: dict[tuple[str, int], tuple[Side, list[float]]], bound: float, alone: float
) -> list[tuple[str, str]]:
    """Return (table, row) for each level and peer; the table is UNLIKE if losses differ."""
    size, dtype, dp = case.split("-")
    tokens = BATCH * SIZES[size][-1]
    made = []
    for level in [level for name, level in sides if name == "Weft"]:
        ours, curve = sides["Weft", level]
        fsdp2 = ("FSDP2", 3) if level == 3 else ("FSDP2 kept", 2)
        for peer in (fsdp2, ("DeepSpeed", level)):
            if peer not in sides:
                continue
            theirs, other = sides[peer]
            off = max(abs(a - b) for a, b in zip(curve, other, strict=True))
            if off > TOLERANCE[dtype]:
                problem = f"losses differ by {off:.1e}, {TOLERANCE[dtype]:g} is allowed"
                made.append(
                    (UNLIKE, f"{case}, Weft {level}, {peer[0]}: {problem}: {curve} {other}")
                )
                continue
            took, limit = ours.median(), theirs.median()
            kept = " (kept)" if peer[0] == "FSDP2 kept" else ""
            made.append((
                peer[0].removesuffix(" kept"),
                f"| {size}, {dtype}, {dp} | {level} | {tokens / took:.0f} "
                f"| {tokens / limit:.0f}{kept} | **{limit / took:.2f}** "
                f"| {bound / took:.0%}, {alone / took:.0%} "
                f"| {ours.peak:.0f} / {theirs.peak:.0f} | {off:.0e} |",
            ))  # fmt: skip
    return made


class Start:
    """Writes the common inputs of all sides of a case.

    Weft gets a checkpoint with the weights that the peers draw; the peers get a file with Weft's
    mock tokens (--mock-data).
    """

    def __init__(self, size: str, steps: int, folder: Path) -> None:
        self.steps, self.folder = steps, folder
        self.weights, self.tokens = folder / "weights", folder / "tokens.npy"
        flags = [*model_flags(size), "--train-iters", str(steps)]
        flags += ["--micro-batch-size", str(BATCH), "--global-batch-size", str(BATCH)]
        config = parse(flags, 1)
        tokenizer = build_tokenizer(config.data.tokenizer_type, None, config.model.vocab_size)
        config = config.with_vocab(tokenizer.vocab_size)
        data = build_datasets(config, tokenizer)["train"]
        samples = [data.sample(i) for i in range(steps * BATCH)]
        np.save(self.tokens, np.stack(samples).reshape(steps, BATCH, -1))
        sizes = native.SIZES[size] | {"rope": "half", "gqa": "expand"}
        model = native.Transformer(SimpleNamespace(**sizes))
        model.init_weights(seed=1)
        checkpoint.save(
            self.weights,
            step=0,
            pieces=[whole(native.hf_name(n), p.detach()) for n, p in model.named_parameters()],
            state={
                "iteration": 0,
                "consumed_samples": 0,
                "hf_config": hf_config(LlamaConfig(**of_model(config.model))),
            },
            grid=Grid(),
        )


def run_weft(case: str, level: int, start: Start) -> tuple[list[float], float, list[float]]:
    """Run pretrain_llama.py; return the timed steps' seconds, the peak, and every step's loss."""
    size, dtype, dp = case.split("-")
    log, script = start.folder / "log.json", "pretrain_llama.py"
    log.unlink(missing_ok=True)
    flags = f"""
        --micro-batch-size {BATCH // int(dp)} --global-batch-size {BATCH} --zero-stage {level}
        --train-iters {start.steps} --overlap-grad-reduce --log-json {log}
        --load {start.weights} --finetune --exit-on-missing-checkpoint
    """.split()
    flags += ["--overlap-param-gather"] if level else []
    flags += ["--bf16"] if dtype == "bf16" else []
    words = [*command(int(dp)), str(ROOT / script), *model_flags(size), *flags]

    def steps() -> list[dict[str, Any]]:
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [row for row in found if "step_seconds" in row]

    with open(start.folder / "weft.txt", "w+") as text:
        run = subprocess.Popen(
            words, stdout=text, stderr=subprocess.STDOUT, env=environment(int(dp)), cwd=ROOT
        )
        peaks = watch(run, script, due=lambda: len(steps()) >= WARM - 1)
        if run.returncode:
            text.seek(0)
            sys.exit(f"{' '.join(words)} failed:\n{text.read()[-4000:]}")
    found = steps()
    times = [row["step_seconds"] for row in found[WARM:]]
    return times, max(peaks.values()), [row["loss"] for row in found]


def run_alone(case: str, start: Start) -> list[float]:
    """Run a one-rank process for each rank of the case, all at once; return all steps' seconds."""
    size, dtype, dp = case.split("-")
    share = str(BATCH // int(dp))
    flags = ["--micro-batch-size", share, "--global-batch-size", share, "--train-iters"]
    flags += [str(start.steps), *["--bf16"] * (dtype == "bf16")]
    logs = [start.folder / f"alone{rank}.json" for rank in range(int(dp))]
    words = [sys.executable, str(ROOT / "pretrain_llama.py"), *model_flags(size), *flags]
    ranks = [
        subprocess.Popen([*words, "--log-json", str(log)], stdout=subprocess.DEVNULL,
                         env=environment(int(dp)), cwd=ROOT)
        for log in logs
    ]  # fmt: skip
    if any([rank.wait() for rank in ranks]):
        sys.exit(f"{' '.join(words)} failed")
    seconds = []
    for log in logs:
        found = [json.loads(line) for line in log.read_text().splitlines()]
        seconds += [row["step_seconds"] for row in found if "step_seconds" in row][WARM:]
        log.unlink()
    return seconds


def run_peer(
    case: str, name: str, level: int, start: Start, python: str
) -> tuple[list[float], float, list[float]]:
    """Run FSDP2 or DeepSpeed; return the same as run_weft."""
    size, dtype, dp = case.split("-")
    flags = f"--size {size} --dtype {dtype} --warmup {WARM} --steps {start.steps} --rope half "
    flags += f"--data {start.tokens} "
    if name == "DeepSpeed":
        script, flags = DEEPSPEED, flags + f"--stage {level}"
    else:
        script, flags = PEER, flags + f"--dp-shard {dp}" + " --no-reshard" * (name != "FSDP2")
    found = report([*command(int(dp), python), str(script), *flags.split()], int(dp))
    return found["times"], max(found["peak_rss_mb"]), found["losses"]


if __name__ == "__main__":
    main()
