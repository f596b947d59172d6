# SPDX-License-Identifier: Apache-2.0
"""Time the sample-index builder against megatron-core's own, on the same document lengths.

    pip install --no-deps --target /tmp/megatron megatron-core==0.16.1 pybind11
    python benchmarks/bench_index.py --megatron /tmp/megatron

Both take the lengths and one shuffled order of documents, and return where every sample starts. The
results are compared. The two and our numpy twin take turns; medians are printed.
"""

import argparse
import importlib.machinery
import importlib.util
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np

from mpu import native
from training.data.sample_index import sample_index

HINT = "pip install --no-deps --target /tmp/megatron megatron-core==0.16.1 pybind11"


def load_megatron(place: Path) -> ModuleType:
    """Load megatron-core's helpers_cpp from a folder; compile its source if it does not load."""
    folder = place / "megatron" / "core" / "datasets"
    if not (folder / "helpers.cpp").exists():
        sys.exit(f"bench_index.py: {place} holds no megatron-core; get it with\n    {HINT}")
    for built in folder.glob("helpers_cpp*.so"):
        try:
            return _load(built)
        except ImportError as error:
            print(f"{built.name} does not load ({error}); compiling its source")
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None or not (place / "pybind11" / "include").exists():
        sys.exit(
            f"bench_index.py: megatron-core's helper needs a compiler and pybind11\n    {HINT}"
        )
    output = Path(tempfile.mkdtemp()) / "helpers_cpp.so"
    flags = ["-O3", "-Wall", "-shared", "-std=c++17", "-fPIC"]  # those of its own Makefile
    includes = [place / "pybind11" / "include", sysconfig.get_path("include")]
    command = [compiler, *flags, *[f"-I{path}" for path in includes], str(folder / "helpers.cpp")]
    subprocess.run([*command, "-o", str(output)], check=True)
    return _load(output)


def _load(path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader("helpers_cpp", str(path))
    spec = importlib.util.spec_from_loader("helpers_cpp", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def draw_lengths(tokens: int, mean: int) -> np.ndarray:
    """Draw document lengths, log-normal as web text is, that sum to `tokens`."""
    rng = np.random.RandomState(0)
    found = rng.lognormal(np.log(mean) - 0.5, 1.0, size=2 * tokens // mean).astype(np.int32) + 1
    count = int(np.searchsorted(np.cumsum(found, dtype=np.int64), tokens))
    lengths = found[: count + 1]
    lengths[-1] -= int(lengths.sum(dtype=np.int64)) - tokens
    return lengths


def compare(
    megatron: ModuleType, tokens: int, mean: int, seq_length: int, repeats: int
) -> dict[str, float]:
    """Return the median seconds of each builder; their results must be equal."""
    lengths = draw_lengths(tokens, mean)
    order = np.arange(len(lengths), dtype=np.int32)
    np.random.RandomState(1).shuffle(order)
    count = (tokens - 1) // seq_length + 1
    library = native.load()

    def theirs() -> np.ndarray:
        return megatron.build_sample_idx_int32(lengths, order, seq_length, 1, tokens, True, 1)

    def ours() -> np.ndarray:
        return sample_index(lengths, order, 0, seq_length, count, library)

    def twin() -> np.ndarray:
        return sample_index(lengths, order, 0, seq_length, count, None)

    builders: dict[str, Callable[[], np.ndarray]] = {"megatron-core": theirs, "numpy": twin}
    if library is not None:
        builders["weft"] = ours
    results = {name: build() for name, build in builders.items()}
    for name, result in results.items():
        if not np.array_equal(result, results["megatron-core"]):
            sys.exit(f"bench_index.py: {name} and megatron-core disagree")
    times: dict[str, list[float]] = {name: [] for name in builders}
    for _ in range(repeats):
        for name, build in builders.items():
            started = time.perf_counter()
            build()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    """Measure several document lengths and print seconds and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--megatron", type=Path, required=True, help=f"folder made by: {HINT}")
    parser.add_argument("--tokens", type=int, default=10**9, help="tokens (default: a billion)")
    parser.add_argument("--seq-length", type=int, default=4096, help="tokens a sample")
    parser.add_argument(
        "--mean-lengths", type=int, nargs="+", default=[100, 1000, 10_000], help="of documents"
    )
    parser.add_argument("--repeats", type=int, default=9, help="times each builder runs")
    args = parser.parse_args()
    megatron = load_megatron(args.megatron)
    if native.load() is None:
        print(f"the compiled builder is missing, only numpy is timed: {native.reason()}")
    print(f"{args.tokens:,} tokens, samples of {args.seq_length}; median of {args.repeats}, in ms")
    for mean in args.mean_lengths:
        medians = compare(megatron, args.tokens, mean, args.seq_length, args.repeats)
        base = medians["megatron-core"]
        shown = "  ".join(
            f"{name} {1000 * seconds:.1f} ({base / seconds:.2f}x)"
            for name, seconds in medians.items()
        )
        print(f"documents of {mean:6,} tokens on average: {shown}")


if __name__ == "__main__":
    main()
