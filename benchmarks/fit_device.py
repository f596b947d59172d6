# SPDX-License-Identifier: Apache-2.0
"""Fit a few constants of the device files on a part of the published runs, and print the errors.

    python benchmarks/fit_device.py --runs FOLDER --device h100 [--write]

Only runs of some groups (a model on a number of nodes; a hidden size and layers on a number of
GPUs) are fitted: `is_fitted` draws the groups by a hash of their names. Runs of several nodes with
an MFU below LEAST_MFU are not used. Each constant has a meaning and a plausible range. The capped
mean of |log(predicted / measured)| is minimized by coordinate descent over the constants. --folds
parts of the groups are left out in turn, to estimate the error on unseen groups. --write writes the
constants to the device file and to host_seconds.json.
"""

import argparse
import hashlib
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.planning.published_rows import (  # noqa: E402
    HOST_SECONDS,
    Run,
    mfu_of,
    predicted,
    read_runs,
)
from forecast.device_file import Device, path_of, read_device  # noqa: E402

CAP = math.log(2)  # largest error that counts, a factor of 2, as some of the runs had failures
ROUNDS, RUNS = 3, 160
START = {  # initial values, independent of the files; attention's depends on the device
    "ramp": 96.0, "memory_share": 0.85, "kernel_seconds": 2e-6,
    "transfer_seconds": 2.5e-5, "collective_start": 1e-5, "network_share": 0.9,
}  # fmt: skip
ATTENTION = {"h100": 0.35, "a100": 0.6}  # FlashAttention-2 and -3, abstracts
RANGES = {  # least and largest value
    "matmul": (0.45, None),  # largest: the best measured one, BEST_MATMUL
    "ramp": (32.0, 1024.0),
    "memory_share": (0.5, 0.95),
    "attention.flash.forward": (0.15, 0.75),
    "kernel_seconds": (1e-6, 4e-6),
    "transfer_seconds": (1e-5, 2e-4),
    "collective_start": (1e-6, 5e-5),
    "network_share": (0.1, 0.96),
}
BEST_MATMUL = {  # best measured share of the peak, bfloat16 and float8: sources in the files
    "h100": (0.803, 0.709), "a100": (0.869, 0.0), "h200": (0.803, 0.734), "b200": (0.776, 0.763),
}  # fmt: skip
CARRIED = {"h100": ("h200", "b200"), "a100": ()}  # devices without published runs that follow
WITH = {"matmul": "matmul.float8", "attention.flash.forward": "attention.flash.backward"}
BACKWARD = 0.8  # of the forward's rate; FlashAttention-2, 4.1
HOST, HOST_START = (1e-5, 4e-3), (3e-4, 1e-4, 1e-3, 2e-3, 3e-3)  # host seconds per layer
NODE, LEAST_MFU = 8, 0.1  # slower runs on several nodes have waits that are not modelled


def is_fitted(group: str) -> bool:
    """Return whether a group's runs may be used for fitting: about one group in three."""
    return hashlib.sha256(group.encode()).digest()[0] < 85


def loss(runs: Sequence[Run], device: Device, host: dict[str, float]) -> float:
    """Return the mean of |log(predicted / measured)|, capped."""
    return sum(
        min(CAP, abs(math.log(predicted(run, device, host) / run.seconds))) for run in runs
    ) / len(runs)


def thinned(runs: Sequence[Run]) -> list[Run]:
    """Return at most RUNS / 2 runs of each source, evenly spread."""
    kept = []
    for source in sorted({run.source for run in runs}):
        own = [run for run in runs if run.source == source]
        step = max(1.0, len(own) / (RUNS // 2))
        kept += [own[int(n * step)] for n in range(int(len(own) / step))]
    return kept


def fit(runs: Sequence[Run], name: str) -> tuple[Device, dict[str, float], float]:
    """Return the fitted device and host seconds, and their loss, by coordinate descent."""
    frameworks = sorted({run.recipe.name for run in runs})
    host = dict.fromkeys(frameworks, HOST_START[0])
    first = {**START, "matmul": BEST_MATMUL[name][0], "attention.flash.forward": ATTENTION[name]}
    device = read_device(name).changed(**first, **follows(first, name))
    best = loss(runs, device, host)
    for framework in frameworks:  # small steps of host seconds have no effect while they are hidden
        for value in HOST_START[1:]:
            found = loss(runs, device, {**host, framework: value})
            if found < best - 1e-6:
                best, host = found, {**host, framework: value}
    factor = 1.3
    for _ in range(ROUNDS):
        for framework in frameworks:
            for way in (factor, 1 / factor):
                while True:
                    value = min(max(host[framework] * way, HOST[0]), HOST[1])
                    found = loss(runs, device, {**host, framework: value})
                    if found >= best - 1e-6:
                        break
                    best, host = found, {**host, framework: value}
        for key, (low, high) in RANGES.items():
            top = BEST_MATMUL[name][0] if high is None else high
            for way in (factor, 1 / factor):
                while True:
                    value = min(max(device[key] * way, low), top)
                    if value == device[key]:
                        break
                    tried = device.changed(**{key: value}, **follows({key: value}, name))
                    found = loss(runs, tried, host)
                    if found >= best - 1e-6:
                        break
                    best, device = found, tried
        factor = math.sqrt(factor)
    return device, host, best


def follows(values: dict[str, float], name: str) -> dict[str, float]:
    """Return the numbers that are fixed shares of fitted ones."""
    shares = {"matmul": BEST_MATMUL[name][1] / BEST_MATMUL[name][0]}
    return {
        other: values[key] * shares.get(key, BACKWARD)
        for key, other in WITH.items()
        if key in values
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True, help="folder of published runs")
    parser.add_argument("--device", choices=sorted(CARRIED), required=True)
    parser.add_argument("--folds", type=int, default=3, help="parts left out in turn; 0: none")
    parser.add_argument("--write", action="store_true", help="write the constants")
    args = parser.parse_args(argv)
    runs = [r for r in read_runs(args.runs)[0] if r.device == args.device and is_fitted(r.group)]
    runs = thinned([run for run in runs if run.gpus <= NODE or mfu_of(run) >= LEAST_MFU])
    groups = sorted({run.group for run in runs})
    print(f"{args.device}: {len(runs)} runs of {len(groups)} groups are fitted on")
    for fold in range(args.folds):
        out = set(groups[fold :: args.folds])
        device, host, _ = fit([r for r in runs if r.group not in out], args.device)
        errors = [
            abs(predicted(run, device, host) / run.seconds - 1) for run in runs if run.group in out
        ]
        print(f"fold {fold}: {len(errors)} runs left out, median {statistics.median(errors):.1%}")
    device, host, mean = fit(runs, args.device)
    errors = [abs(predicted(run, device, host) / run.seconds - 1) for run in runs]
    print(f"all: median {statistics.median(errors):.1%}, mean |log| capped {mean:.3f}")
    for key in RANGES:
        print(f"  {key:18} {device[key]:.4g}")
    print("  host seconds a layer:", {k: f"{v:.4g}" for k, v in host.items()})
    if args.write:
        write(args.device, device, host, len(runs))
    return 0


def write(name: str, device: Device, host: dict[str, float], runs: int) -> None:
    """Write the constants with their source, also to the files of devices without runs."""
    told = f"fitted by benchmarks/fit_device.py on {runs} published runs"
    values = {key: device[key] for key in RANGES}
    _write(name, values, told)
    for other in CARRIED[name]:
        own = {**values, "matmul": values["matmul"] * BEST_MATMUL[other][0] / BEST_MATMUL[name][0]}
        if other == "b200":
            own.pop("attention.flash.forward")  # it has other kernels
        _write(other, own, f"assumed to be that of {name}.json, {told} of that device")
    hosts = json.loads(HOST_SECONDS.read_text())
    hosts[name] = {k: float(f"{v:.4g}") for k, v in sorted(host.items())}
    HOST_SECONDS.write_text(json.dumps(hosts, indent=1, sort_keys=True) + "\n")


def _write(name: str, values: dict[str, float], told: str) -> None:
    path = path_of(name)
    content = json.loads(path.read_text())
    for key, value in {**values, **follows(values, name)}.items():
        entry = content["numbers"][key]
        limit = entry["source"].partition("; at most: ")[2]
        if not limit and key in ("matmul", "matmul.float8"):
            limit = entry["source"]
        share = f"; {BACKWARD} of the forward: FlashAttention-2 (arXiv:2307.08691), section 4.1"
        entry["value"] = float(f"{value:.4g}")
        entry["source"] = told + (f"; at most: {limit}" if limit else "")
        entry["source"] += share if key == "attention.flash.backward" else ""
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
