#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run one row of gpu-check in this process: measure, and write each number as it is made.

    python tests/gpu/row.py calibrate --out FILE.jsonl [--device cuda] [--tiny]

A row is a function of a `Row`. Each number is a line of JSON in FILE, flushed to disk before the
next is made, so that a row that dies loses nothing that it had. On a CPU Triton's kernels run in
its interpreter. --tiny: sizes that a CPU computes in seconds. The exit code is 0 where all checks
held, 1 where one did not or the row raised, 3 where the row cannot run here.
"""

import argparse
import functools
import hashlib
import importlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # as a script, find mpu

from tests.gpu.summary import SKIPPED, append  # noqa: E402

ABSENT = ("xxhash", "safetensors")  # imported by checkpoints and by data files
RUNS = (
    "bf16", "fp8-rowwise", "fp8-rowwise-wgrad-bf16", "fp8-tensorwise", "fp8-blockwise",
    "fused-linear-loss", "documents",
    "attention-flash", "attention-fused", "attention-unfused", "muon", "max-logits",
)  # fmt: skip
STEPS = (
    "2", "6", "6-fp8-tensorwise", "6-fp8-blockwise", "6-fp8-rowwise", "6-muon",
    "2-qwen3-30b-a3b", "2-mixtral",
)  # fmt: skip
PEERS = ("eager", "compiled", "fsdp2", "tp")
SEVERAL = (
    "dp", "zero-1", "zero-2", "zero-3", "tp-none", "tp-ring", "tp-symmetric", "cp-p2p", "cp-a2a",
    "cp-all-gather", "pp-1f1b", "pp-zb-v", "pp-interleaved", "tp-pp-dp", "fp8-tp", "fp8-zero-3",
    "muon", "ep", "ep-overlap",
)  # fmt: skip
CURVES = ("bf16", "fp8-tensorwise", "fp8-blockwise", "bf16-seed")
# row: the module and the function that measure it
ROWS = {
    "facts": "calibrate:facts",
    "calibrate": "calibrate:calibrate",
    "kernel-norm": "kernels:norm",
    "kernel-rope": "kernels:rope",
    "kernel-swiglu": "kernels:swiglu",
    "kernel-loss": "kernels:loss",
    "kernel-float8": "kernels:float8_rows",
    "kernel-swiglu-rows": "kernels:swiglu_rows",
    "kernel-sum": "kernels:parts",
    "kernel-max-logits": "kernels:maxima",
    "kernel-expert-rows": "kernels:expert_rows",
    "kernel-grouped-wgrad": "kernels:grouped_wgrad",
    "attention": "attention:paths",
    "context": "attention:context",
    "float8": "products:products",
    "losses": "steps:losses",
    "sync": "steps:waits",
    "collectives": "several:collectives",
    "moe-kernels": "moe:kernels",
    "ep-overlap": "moe:overlap",
    "step-160m": "small:eager",
    "overlap-peers": "overlap_peers:peers",
    "predict": "predict:predict",
    **{f"step-{name}": "steps:steps" for name in STEPS},
    **{f"run-{name}": "steps:program" for name in RUNS},
    **{f"peer-{name}": "peer:peer" for name in PEERS},
    **{f"curve-{name}": "curves:curve" for name in CURVES},
    **{f"several-{name}": "several:layout" for name in SEVERAL},
}


class Sizes(NamedTuple):
    """The sizes of a model and its batch: tokens of a row, and the names of the flags."""

    hidden: int
    ffn: int
    heads: int
    groups: int
    seq: int
    vocab: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


LLAMA = Sizes(4096, 14336, 32, 8, 8192, 128256)  # a layer of Llama 3 8B
TINY = Sizes(256, 256, 4, 2, 128, 512)


class Skip(Exception):
    """The row, or a part of it, cannot run here; the text says why."""


class Row:
    """What a row measures on, and where its numbers go."""

    def __init__(self, name: str, path: Path, kind: str, tiny: bool) -> None:
        import torch

        self.name, self.path, self.tiny = name, path, tiny
        self.device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
        self.cuda, self.sizes = kind == "cuda", TINY if tiny else LLAMA
        self.failed, self.predict = 0, tuple[str, ...]()
        if self.cuda:
            torch.cuda.set_device(self.device)

    def say(self, what: str, of: str = "", **numbers: Any) -> None:
        """Write one line: {"row", "what", and the numbers}. of: another row that it is about."""
        append(self.path, {"row": of or self.name, "what": what, **numbers})

    def check(self, what: str, error: float, limit: float, **numbers: Any) -> None:
        """Write an error and what it may be at most. A failed check fails the row, at its end."""
        ok = bool(error <= limit)  # never of a NaN
        self.failed += not ok
        self.say(what, error=error, limit=limit, ok=ok, **numbers)

    def part(self, what: str, measure: Callable[[], None]) -> None:
        """Measure a part of the row; where it raises, say so and go on with the next part."""
        try:
            measure()
        except Skip as why:
            self.say(what, skipped=str(why))
        except Exception as error:
            traceback.print_exc()
            self.failed += 1
            self.say(what, failed=sentence(error))
            if self.cuda and out_of_memory(error):
                import torch

                torch.cuda.empty_cache()


def sentence(error: BaseException) -> str:
    """Return an exception's type and its first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def out_of_memory(error: BaseException) -> bool:
    """Return whether the host's or the device's memory ran out."""
    return type(error).__name__ in ("OutOfMemoryError", "MemoryError")


class Absent(MetaPathFinder):
    """Stand in for packages that are not installed: names that raise, as no row uses them. Rows do
    read data files, whose identity is an XXH3-128: there another hash of 128 bits is as good.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in ABSENT else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        made = _Stand(spec.name)
        if spec.name == "xxhash":
            vars(made)["xxh3_128"] = functools.partial(hashlib.blake2b, digest_size=16)
            vars(made)["xxh3_128_hexdigest"] = lambda data: made.xxh3_128(data).hexdigest()
        return made

    def exec_module(self, module: ModuleType) -> None: ...


class _Stand(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)

        def use(self: object, *args: Any, **kwargs: Any) -> None:
            raise ModuleNotFoundError(f"{package} is not installed, and {package}.{name} is used")

        package = self.__name__
        return type(name, (Exception,), {"__init__": use})


def read(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("--out", type=Path, required=True, help="the file of JSON lines")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--predict", nargs="*", default=(), help="device files of `predict`")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Run the row; return the exit code."""
    asked = read(argv)
    sys.meta_path.append(Absent())  # last: what is installed is found before
    if asked.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # of what the row starts
    from mpu.launch import environment_defaults

    os.environ.update(environment_defaults(os.environ))
    try:
        row = Row(asked.row, asked.out, asked.device, asked.tiny)
        row.predict = tuple(asked.predict)
        module, _, name = ROWS[asked.row].partition(":")
        getattr(importlib.import_module(f"tests.gpu.{module}"), name)(row)
    except Skip as why:
        append(asked.out, {"row": asked.row, "what": "skipped", "skipped": str(why)})
        return SKIPPED
    except Exception as error:
        traceback.print_exc()
        append(asked.out, {"row": asked.row, "what": "error", "failed": sentence(error)})
        return 1
    return int(row.failed > 0)


# ---- what rows share ----


def synchronize(row: Row) -> None:
    """Wait for the device."""
    if row.cuda:
        import torch

        torch.cuda.synchronize(row.device)


class Time(NamedTuple):
    """The median seconds of some runs; spread: from the 10th to the 90th of 100, over it."""

    seconds: float
    spread: float

    def numbers(self, nbytes: float = 0.0, flops: float = 0.0) -> dict[str, float]:
        """Return what a line says of it: seconds, spread, and GB/s and TFLOP/s where given."""
        said = {"seconds": self.seconds, "spread": self.spread}
        said |= {"gb_per_second": nbytes / self.seconds / 1e9} if nbytes else {}
        return said | ({"tflops": flops / self.seconds / 1e12} if flops else {})


class Stopwatch:
    """Time work on a device: each run after a flush of the L2 cache, and the first few not at all.

    On CUDA the clock is that of events, and a kernel that spins holds the stream until the host has
    queued the run, so what is timed is the device alone. load: seconds for which a run is repeated
    before it is timed, and then without pauses, as in a step: at the limit of its power a GPU
    lowers its clocks. It is for runs that take longer than to queue.
    """

    def __init__(self, row: Row, repeat: int = 20, load: float = 0.0) -> None:
        import torch

        self.row, self.repeat = row, 1 if row.tiny else repeat
        self.load = 0.0 if row.tiny or not row.cuda else load
        size = (256 << 20) if row.cuda and not row.tiny else 1 << 10  # bytes, more than any L2
        self.waste = torch.empty(size, dtype=torch.int8, device=row.device)

    def __call__(self, run: Callable[[], object], warm: int = 3) -> Time:
        import torch

        for _ in range(0 if self.row.tiny else warm):
            run()
        synchronize(self.row)
        spent = list[float]()
        if not self.row.cuda:
            for _ in range(self.repeat):
                begin = time.perf_counter()
                run()
                spent.append(time.perf_counter() - begin)
            return spread_of(spent)
        end = time.perf_counter() + self.load
        while time.perf_counter() < end:
            for _ in range(5):
                run()
            synchronize(self.row)
        marks = []
        for _ in range(self.repeat):
            self.waste.zero_()
            if not self.load:
                torch.cuda._sleep(4_000_000)  # cycles, 2 ms: the host queues the run meanwhile
            marks.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
            marks[-1][0].record()
            run()
            marks[-1][1].record()
        torch.cuda.synchronize(self.row.device)
        return spread_of([begin.elapsed_time(end) / 1e3 for begin, end in marks])


class Watch:
    """Sample numbers in a thread while a block runs: power, clock and temperature of the GPU.

    read returns numbers by name; on a CPU it is the machine's load. `numbers` gives the least, the
    mean and the most of each.
    """

    def __init__(
        self, row: Row, every: float = 0.05, read: Callable[[], Mapping[str, float]] | None = None
    ) -> None:
        self.read, self.every = read or (_of_gpu(row) if row.cuda else _load), every
        self.samples, self.failed = list[Mapping[str, float]](), ""
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._sample)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *about: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        try:
            self.samples.append(self.read())
            while not self._stop.wait(self.every):
                self.samples.append(self.read())
        except Exception as error:  # the block goes on
            self.failed = sentence(error)

    def numbers(self) -> dict[str, Any]:
        """Return what a line says of them."""
        said: dict[str, Any] = {"samples": len(self.samples)}
        if self.failed:
            said["unread"] = self.failed
        for name in self.samples[0] if self.samples else ():
            values = [sample[name] for sample in self.samples]
            mean = sum(values) / len(values)
            said[name] = {"min": min(values), "mean": mean, "max": max(values)}
        return said


def _of_gpu(row: Row) -> Callable[[], Mapping[str, float]]:
    from training.run.gpu_health import read_health

    def read() -> Mapping[str, float]:
        mhz, celsius, watts = read_health(row.device)
        if watts != watts:  # unknown
            raise OSError("the driver's NVML does not answer")
        return {"watts": watts, "mhz": mhz, "celsius": celsius}

    return read


def _load() -> Mapping[str, float]:
    return {"load": os.getloadavg()[0]}


def spread_of(spent: list[float]) -> Time:
    """Return the median of some seconds, and their spread."""
    order = sorted(spent)
    middle = order[len(order) // 2]
    low, high = order[len(order) // 10], order[-1 - len(order) // 10]
    return Time(middle, (high - low) / middle if middle else 0.0)


if __name__ == "__main__":
    from tests.gpu import row as imported  # the module whose Skip and Row the rows know

    sys.exit(imported.main(sys.argv[1:]))
