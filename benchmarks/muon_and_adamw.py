#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train the model of `make train` by Muon and by AdamW, on the same tokens, and compare the losses.

    make check-data train ITERS=10              once: makes the text, the tokenizer and the tokens
    python benchmarks/muon_and_adamw.py [--iters 300] [--seeds 1 2 3] [--out runs/muon_and_adamw]

First each optimizer's learning rate is swept with the first seed; then the best one is trained with
the other seeds. A sweep whose best rate is at its end is extended by one rate. Completed runs are
not repeated, so a stopped call can be continued by the next one. --runs N makes at most N runs, and
exits with 75 if some are left; no run is started once all runs together have taken --cpu-minutes.
Printed: the held-out loss at every rate, and for the best one its mean over seeds with the standard
error; --svg FILE draws them. Muon's scale is 0.2 x spectral, so that the same rates suit both
(docs/muon.md). Each run is one process; there are about 14 runs.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import quickstart  # noqa: E402

MUON = """--optimizer muon --muon-momentum 0.95 --muon-use-nesterov
    --muon-extra-scale-factor 0.2""".split()
OPTIMIZERS = {"AdamW": [], "Muon": MUON}
RATES = [1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3]
FIRST = RATES[1:5]  # rates with which a sweep begins
LATER = 75  # exit code EX_TEMPFAIL: runs are left for another call


def cpu_seconds() -> float:
    """Return the CPU seconds of all ended child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def spent(args: argparse.Namespace) -> float:
    """Return the CPU seconds of all completed runs."""
    done = args.out.glob(f"*-{args.iters}/done.json")
    return sum(json.loads(path.read_text())["cpu_seconds"] for path in done)


def held_out(args: argparse.Namespace, name: str, rate: float, seed: int) -> float:
    """Return the last held-out loss of a run; train it unless it is completed."""
    folder = args.out / f"{name}-{rate:g}-{seed}-{args.iters}"
    log, done = folder / "log.jsonl", folder / "done.json"
    if not done.exists():
        if spent(args) > 60 * args.cpu_minutes:
            sys.exit(f"the runs took {spent(args) / 60:.1f} CPU minutes: more than --cpu-minutes")
        if args.runs <= 0:
            print("some runs are left: start this command again", flush=True)
            sys.exit(LATER)
        args.runs -= 1
        before = cpu_seconds()
        folder.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        data = quickstart.flags_of(args.data, folder, args.iters, args.iters)
        flags = {k: v for k, v in data.items() if k not in ("save", "load", "tensorboard-dir")}
        flags.pop("save-interval")
        flags |= {"lr": rate, "min-lr": rate / 20, "seed": seed, "device": "cpu"}
        command = [sys.executable, "pretrain_llama.py"]
        command += quickstart.command_line(flags, quickstart.SWITCHES) + OPTIMIZERS[name]
        environment = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
        subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        losses = [
            row["validation_loss"]
            for row in map(json.loads, log.read_text().splitlines())
            if "validation_loss" in row
        ]
        row = {"validation_loss": losses[-1], "cpu_seconds": cpu_seconds() - before}
        done.write_text(json.dumps(row))
    loss: float = json.loads(done.read_text())["validation_loss"]
    print(f"{name:<6} lr {rate:<6g} seed {seed}: held-out loss {loss:.4f}", flush=True)
    return loss


def sweep(args: argparse.Namespace, name: str) -> dict[float, float]:
    """Return the held-out loss of each learning rate with the first seed."""
    seed = args.seeds[0]
    found = {rate: held_out(args, name, rate, seed) for rate in FIRST}
    while True:
        best = min(found, key=found.__getitem__)
        at = RATES.index(best)
        more = [rate for rate in RATES[max(0, at - 1) : at + 2] if rate not in found]
        if not more:
            return found
        found |= {rate: held_out(args, name, rate, seed) for rate in more}


def draw(path: Path, iters: int, found: dict[str, dict[float, float]], best: dict[str, list[float]]
) -> None:  # fmt: skip
    """Draw the loss over the learning rate: all rates with one seed, the best with all seeds."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "weft", "font.size": 9}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3.2))
    for name, colour in zip(found, ("tab:blue", "tab:orange"), strict=True):
        losses = found[name]
        rates = sorted(losses)
        axes.plot(rates, [losses[r] for r in rates], "o-", color=colour, label=name, markersize=4)
        at = min(losses, key=losses.__getitem__)
        mean, error = mean_of(best[name])
        axes.errorbar([at * 1.08], [mean], yerr=[error], fmt="s", color=colour, capsize=3)
    axes.set_xscale("log", base=2)
    axes.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
    axes.set_xlabel("peak learning rate")
    axes.set_ylabel("held-out loss, nats a token")
    axes.set_title(f"{iters} iterations; squares: mean over seeds, standard error", fontsize=9)
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def mean_of(losses: list[float]) -> tuple[float, float]:
    """Return the mean over seeds and its standard error."""
    error = statistics.stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else float("nan")
    return statistics.mean(losses), error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "muon_and_adamw")
    parser.add_argument("--data", type=Path, default=ROOT / "runs" / "quickstart")
    parser.add_argument("--iters", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=1000, help="at most so many in this call")
    parser.add_argument("--cpu-minutes", type=float, default=45.0)
    parser.add_argument("--svg", type=Path, help="where to draw the losses")
    args = parser.parse_args()
    if not (args.data / "tokens" / "train" / f"{quickstart.TOKENS}.idx").exists():
        parser.error(f"--data {args.data} has no tokens: run `make train ITERS=10` first")
    found = {name: sweep(args, name) for name in OPTIMIZERS}
    best = {
        name: [held_out(args, name, min(own, key=own.__getitem__), seed) for seed in args.seeds]
        for name, own in found.items()
    }
    lines = []
    for name, losses in best.items():
        rate = min(found[name], key=found[name].__getitem__)
        mean, error = mean_of(losses)
        lines.append(
            f"{name:<6} best lr {rate:g}: {mean:.4f} +- {error:.4f} over {len(losses)} seeds"
        )
    if args.svg:
        draw(args.svg, args.iters, found, best)
    lines.append(f"{spent(args) / 60:.1f} CPU minutes")
    print(f"\n{args.iters} iterations of {quickstart.MODEL['global-batch-size']} samples")
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
