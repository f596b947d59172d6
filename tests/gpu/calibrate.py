# SPDX-License-Identifier: Apache-2.0
"""Facts about the machine, and its speed as a device file that predictions read.

`calibrate` times what a step of Llama 3 8B consists of: its matmuls, attention by each kernel, a
copy, launches on the host. From these it sets the numbers of a device file (forecast/rehearsal/
device_file.py) so that the rehearsal's model of each operation gives the seconds that were
measured, and writes the file anew after each part.
"""

import ctypes
import json
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forecast.device_file import NUMBERS, Device, path_of, read_device
from forecast.rehearsal import roofline
from tests.gpu.kernels import without_triton
from tests.gpu.row import Row, Skip, Stopwatch, Time, Watch, sentence, synchronize
from training.run.gpu_health import uuid_of

LIBRARIES = {"cublasLt": "cublasLtGetVersion", "cudnn": "cudnnGetVersion"}
QUERY = "name,driver_version,clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu,pstate"
BACKENDS = {
    "CUDNN_ATTENTION": "cudnn",
    "FLASH_ATTENTION": "flash",
    "EFFICIENT_ATTENTION": "",
    "MATH": "",
}
LOAD = 0.5  # seconds, after which a GPU has the clocks of a long run
LONGEST_MATH = 2048  # tokens of attention by whole products, whose memory is a square


def facts(row: Row) -> None:
    """Write what is installed, what the GPU says of itself, and which attention torch chooses."""
    row.say("python", version=sys.version.split()[0], executable=sys.executable)
    said: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    said["cudnn"] = torch.backends.cudnn.version() if row.cuda else None
    for package in ("triton", "pytest", "numpy", "xxhash", "safetensors", "flash_attn_interface"):
        said[package] = _version(package)
    row.say("packages", **said)
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    row.say(
        "compiler", cc=os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc"),
        python_h=headers.exists(), nvcc=shutil.which("nvcc"), cores=len(os.sched_getaffinity(0)),
    )  # fmt: skip
    row.say("settings", **{n: v for n, v in os.environ.items() if n.startswith(SETTINGS)})
    if not row.cuda:
        row.say("gpu", skipped="no GPU: the rest of the facts is about one")
        return
    p = torch.cuda.get_device_properties(row.device)
    row.say(
        "gpu", name=p.name, count=torch.cuda.device_count(), bytes=p.total_memory,
        capability=f"{p.major}.{p.minor}", sms=p.multi_processor_count,
        nccl=".".join(map(str, torch.cuda.nccl.version())),
    )  # fmt: skip
    row.say("nvidia-smi", **clocks(row.device))
    row.part("libraries", lambda: row.say("libraries", **_libraries()))
    row.part("a Triton kernel", lambda: _trial(row))
    q, k, v = _heads(row, row.sizes.seq)
    choice = torch._fused_sdp_choice(q, k, v, None, 0.0, True, enable_gqa=True)
    names = {int(b): name for name, b in torch.nn.attention.SDPBackend.__members__.items()}
    row.say("attention that torch chooses for a step", chosen=names.get(int(choice), str(choice)))


SETTINGS = ("CUDA", "NCCL", "TORCH", "PYTORCH", "CUBLAS", "TRITON", "NVIDIA_")


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package) if find_spec(package) else None
    except PackageNotFoundError:
        return "there"


def clocks(device: torch.device) -> dict[str, str]:
    """Return what nvidia-smi says now of a GPU's driver, clocks, power and temperature."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return {"nvidia-smi": "not found"}
    words = [tool, f"--query-gpu={QUERY}", "--format=csv,noheader", f"--id={uuid_of(device)}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(QUERY.split(","), values, strict=False))


def _libraries() -> dict[str, int]:
    """Return the versions of libraries that torch has loaded, as they give them."""
    found = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split()[-1]
        for name, function in LIBRARIES.items():
            if f"lib{name}.so" in path and name not in found:
                found[name] = int(getattr(ctypes.CDLL(path), function)())
    return found


def _trial(row: Row) -> None:
    """Compile and launch one kernel, as the first norm of a step would."""
    from mpu.kernels.swiglu import swiglu_forward

    begin = time.perf_counter()
    swiglu_forward(torch.ones(4, 64, device=row.device).bfloat16())
    synchronize(row)
    row.say("a Triton kernel", compiled_and_ran_seconds=time.perf_counter() - begin)


# ---- speed ----


def _heads(row: Row, s: int) -> list[Tensor]:
    """Return q, k, v [1, n, s, d] as a layer gives them to attention: slices of one product."""
    z = row.sizes
    x = torch.randn(s, 1, z.heads + 2 * z.groups, z.head_dim, device=row.device).bfloat16()
    return [part.permute(1, 2, 0, 3) for part in x.split([z.heads, z.groups, z.groups], 2)]


def calibrate(row: Row) -> None:
    """Time the parts of a step; write them and the device file."""
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # as the trainer
    file = Calibrated(row)
    with Watch(row) as watch:
        for name, measure in (
            ("copy", _copies), ("launches", _launches), ("matmuls", _matmuls),
            ("attention", _attention),
            ("float8", _float8),
        ):  # fmt: skip
            row.part(name, lambda measure=measure: measure(row, file))
            file.write()
    row.say("power and clocks", **watch.numbers())


class Calibrated:
    """A device file whose numbers are replaced by measured ones."""

    def __init__(self, row: Row) -> None:
        self.row, self.path = row, row.path.parent / "device.json"
        self.name = torch.cuda.get_device_name(row.device) if row.cuda else "CPU"
        self.base = base_of(self.name)
        self.content = json.loads(path_of(self.base).read_text())
        for number in self.content["numbers"].values():
            number.pop("other", None)  # a range is of a card that nobody has measured
        self.content["name"] = f"{self.name}, calibrated on {date.today()} over {self.base}.json"
        self.set = dict[str, float]()

    @property
    def device(self) -> Device:
        """Return the device as it is so far."""
        return read_device(self.base).changed(**self.set)

    def number(self, key: str, value: float, how: str) -> None:
        """Set a number. A key that this version's device files do not have is left out."""
        if key not in NUMBERS:
            return
        if NUMBERS[key].startswith("share"):
            value = min(1.0, value)
        self.set[key] = value
        source = f"measured by gpu-check on {self.name}, {date.today()}: {how}"
        self.content["numbers"][key] = {"value": value, "unit": NUMBERS[key], "source": source}

    def fit(
        self, key: str, predict: Callable[[Device], list[float]], seconds: Sequence[float], how: str
    ) -> None:
        """Set a share of the peak so that all predicted seconds add up to those measured."""
        low, high = 1e-9, 1.0
        for _ in range(60):
            middle = math.sqrt(low * high)
            said = predict(self.device.changed(**{key: middle}))
            low, high = (middle, high) if sum(said) > sum(seconds) else (low, middle)
        self.number(key, high, how)
        said = predict(self.device)
        ratios = [a / b for a, b in zip(said, seconds, strict=True)]
        self.row.say(f"fitted {key}", value=high, predicted_over_measured=ratios)

    def write(self) -> None:
        """Write the file in one go."""
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.content, indent=1))
        os.replace(new, self.path)


def base_of(name: str) -> str:
    """Return the device file that is nearest to a GPU's name."""
    known = ("h200", "h100", "b200", "a100")
    return next((base for base in known if base.upper() in name.upper()), "h100")


def _copies(row: Row, file: Calibrated) -> None:
    clock, size = Stopwatch(row), (1 << 16) if row.tiny else 1 << 31
    x = torch.randint(0, 255, (size,), dtype=torch.uint8, device=row.device)
    y = torch.empty_like(x)
    took = clock(lambda: y.copy_(x))
    row.say("copy on the device", bytes=2 * size, **took.numbers(2 * size))
    file.number("memory_share", 2 * size / took.seconds / file.device["bandwidth"], said(took))
    host = torch.empty(size // 8, dtype=torch.uint8, pin_memory=row.cuda)
    here = x[: size // 8]
    for what, run in {
        "copy to the host": lambda: host.copy_(here, non_blocking=True),
        "copy from the host": lambda: here.copy_(host, non_blocking=True),
    }.items():
        took = clock(run)
        row.say(what, bytes=len(host), **took.numbers(len(host)))
    file.number("host_bandwidth", len(host) / took.seconds, said(took))


def said(took: Time) -> str:
    """Return how a number was measured, in words."""
    return f"median of 20, spread {took.spread:.1%}"


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


def _launches(row: Row, file: Calibrated) -> None:
    """Host seconds of a call of each kind: 100 calls at a time, which the device's queue takes."""
    x = torch.ones(64, device=row.device)
    leaf = x.clone().requires_grad_()
    calls: dict[str, Callable[[], object]] = {
        "an aten call, add_": lambda: x.add_(1.0),
        "an autograd function": lambda: _Nothing.apply(leaf),
    }
    if row.cuda:
        calls["a CUDA event's record"] = torch.cuda.Event(enable_timing=True).record
    arguments = _triton_calls(row, calls)
    found, count = dict[str, float](), 2 if row.tiny else 100
    for what, call in calls.items():
        spent = []
        for _ in range(2 if row.tiny else 15):
            synchronize(row)
            begin = time.perf_counter()
            for _ in range(count):
                call()
            spent.append((time.perf_counter() - begin) / count)
        order = sorted(spent)
        found[what] = order[len(order) // 2]
        row.say(f"host: {what}", seconds=found[what], least=order[0], most=order[-1])
    how = "host seconds, median of 15 x 100 calls"
    file.number("launch_seconds", found["an aten call, add_"], how)
    file.number("function_seconds", found["an autograd function"], how)
    if arguments:
        (few, least), (many, most) = sorted((n, found[what]) for what, n in arguments.items())
        each = max(0.0, (most - least) / (many - few))
        file.number("triton_argument_seconds", each, f"{how}, of kernels of {few} and {many}")
        file.number("triton_seconds", max(0.0, least - few * each), how)
    took = Stopwatch(row)(lambda: x.add_(1.0))
    row.say("device: the smallest kernel between two events", **took.numbers())


def _triton_calls(row: Row, calls: dict[str, Callable[[], object]]) -> dict[str, int]:
    """Add two launches of Triton to the calls; return their names with their arguments' number."""
    if why := without_triton(row):
        row.say("host: a Triton launch", skipped=why)
        return {}
    from mpu.kernels import rope, sum_of_parts

    pair, out = torch.ones(2, 64, device=row.device), torch.empty(64, device=row.device)
    x = torch.ones(2, 1, 3, 8, device=row.device)
    parts, angle, turned = (
        x.split([1, 1, 1], 2),
        torch.ones(2, 1, 1, 4, device=row.device),
        x.clone(),
    )
    two = {
        "a Triton launch of few arguments": (
            sum_of_parts.sum_of_parts_kernel, lambda: sum_of_parts.sum_of_parts(pair, out)
        ),
        "a Triton launch of many arguments": (
            rope.rope_kernel, lambda: rope.rope(parts, angle, angle, turned, copy=True)
        ),
    }  # fmt: skip
    calls.update({what: call for what, (_, call) in two.items()})
    return {what: len(kernel.arg_names) for what, (kernel, _) in two.items()}


def _matmuls(row: Row, file: Calibrated) -> None:
    """The five products of a layer and the head: forward, dgrad, and wgrad into fp32."""
    from mpu.layers.linear import Recipe

    z, clock, recipe = row.sizes, Stopwatch(row, load=LOAD), Recipe(row.cuda)
    qkv = (z.heads + 2 * z.groups) * z.head_dim
    shapes = {
        "qkv": (qkv, z.hidden), "proj": (z.hidden, z.hidden), "gate_up": (2 * z.ffn, z.hidden),
        "down": (z.hidden, z.ffn), "head": (z.vocab, z.hidden),
    }  # fmt: skip
    sizes, seconds = list[tuple[int, int, int]](), list[float]()
    n, peak = z.seq, file.device.peak("bfloat16")
    for name, (o, i) in shapes.items():
        n = z.seq if name != "head" or row.tiny else 2048  # of the head a part of the tokens
        x = torch.randn(n, i, device=row.device).bfloat16()
        w = torch.randn(o, i, device=row.device).bfloat16()
        dy = torch.randn(n, o, device=row.device).bfloat16()
        main = torch.zeros(o, i, device=row.device)
        for what, mnk, run in (
            ("NT, forward", (n, o, i), lambda: recipe.product(x, w)),  # noqa: B023
            ("NN, dgrad", (n, i, o), lambda: recipe.dgrad(dy, w.t())),  # noqa: B023
            ("TN, wgrad into fp32", (o, i, n), lambda: recipe.accumulate(main, False, x, dy)),  # noqa: B023
        ):
            took, flops = clock(run), 2.0 * math.prod(mnk)
            share = flops / took.seconds / peak
            row.say(f"matmul {name}, {what}", mnk=mnk, **took.numbers(0, flops), share=share)
            sizes.append(mnk)
            seconds.append(took.seconds)
    side = 256 if row.tiny else 8192
    a, b = (torch.randn(side, side, device=row.device).bfloat16() for _ in range(2))
    took = clock(lambda: a @ b)
    row.say(
        f"matmul {side}^3",
        **took.numbers(0, 2.0 * side**3),
        share=2.0 * side**3 / took.seconds / peak,
    )
    file.fit(
        "matmul",
        lambda device: [roofline.matmul_seconds(device, *mnk, "bfloat16") for mnk in sizes],
        seconds, f"{len(sizes)} products of Llama 3 8B, medians of 20",
    )  # fmt: skip


def _attention(row: Row, file: Calibrated) -> None:
    """Causal attention of a layer, forward and backward, by each kernel, and of documents."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from mpu.layers.attention.block_attention import block_attention
    from mpu.layers.packed_seq_params import PackedSeqParams

    z, clock = row.sizes, Stopwatch(row, load=LOAD)
    ends = PackedSeqParams.of([z.seq // 4] * 4).to(row.device)

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    kernels: dict[str, tuple[str, Callable[..., Tensor], list[SDPBackend], float]] = {
        name: (key, causal, [SDPBackend.__members__[name]], 0.5) for name, key in BACKENDS.items()
    }
    every = [*SDPBackend.__members__.values()][1:]
    kernels["documents, by cumulative lengths"] = (
        "", lambda q, k, v: block_attention(q, k, v, ends, 0), every, 0.125
    )  # fmt: skip
    for name, (key, attend, allowed, part) in kernels.items():
        s = min(z.seq, LONGEST_MATH) if name == "MATH" else z.seq
        leaves = [x.requires_grad_() for x in _heads(row, s)]
        flops = 4.0 * z.heads * z.head_dim * s * s * part  # part: of all pairs
        nbytes = 2.0 * s * z.head_dim * (2 * z.heads + 2 * z.groups)
        try:
            with sdpa_kernel(allowed):
                forward = clock(lambda: attend(*leaves))  # noqa: B023
                y = attend(*leaves)
                dy = torch.randn_like(y)
                backward = clock(lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True))  # noqa: B023
        except RuntimeError as error:
            row.say(f"attention {name}", skipped=sentence(error))
            continue
        row.say(f"attention {name}, forward", tokens=s, **forward.numbers(0, flops))
        row.say(f"attention {name}, backward", tokens=s, **backward.numbers(0, 2.5 * flops))
        if key:
            whole = partial(roofline.attention_seconds, dtype="bfloat16", kernel=key)
            for way, took, times, moved in (
                ("forward", forward, 1.0, nbytes), ("backward", backward, 2.5, 2 * nbytes),
            ):  # fmt: skip
                given = dict(flops=times * flops, moved=moved, backward=way == "backward")
                file.fit(
                    f"attention.{key}.{way}",
                    lambda device, given=given, whole=whole: [whole(device, **given)],
                    [took.seconds], f"{s} tokens, {said(took)}",
                )  # fmt: skip


def _float8(row: Row, file: Calibrated) -> None:
    """scaled_mm by recipe: the product of the rows, in fast and in exact sums."""
    from mpu.layers.float8 import cuda as float8_cuda
    from mpu.layers.float8.rows import BLOCKS, E4M3, made

    if not row.cuda:
        raise Skip("scaled_mm multiplies float8 on a GPU alone")
    z, clock = row.sizes, Stopwatch(row, load=LOAD)
    sizes, seconds = list[tuple[int, int, int]](), list[float]()
    for scaling, block in BLOCKS.items():
        if why := float8_cuda.unsupported(scaling, row.device):
            row.say(f"scaled_mm {scaling}", skipped=why)
            continue
        for name, (o, i) in {"gate_up": (2 * z.ffn, z.hidden), "down": (z.hidden, z.ffn)}.items():
            x, w = (torch.randn(n, i, device=row.device).bfloat16() for n in (z.seq, o))
            rows = made(x, block, E4M3), made(w, block, E4M3, square=scaling == "blockwise")
            float8_cuda.prepare(rows[1], scaling)
            a, b = (float8_cuda.Operand(each, E4M3) for each in rows)
            for fast in (True, False):
                what = f"scaled_mm {scaling}, {name}, {'fast' if fast else 'exact'} sums"
                try:
                    took = clock(
                        lambda: float8_cuda.multiply(a, b, scaling, torch.bfloat16, fast)  # noqa: B023
                    )
                except (RuntimeError, ValueError, NotImplementedError) as error:
                    row.say(what, skipped=sentence(error))
                    continue
                mnk, flops = (z.seq, o, i), 2.0 * z.seq * o * i
                row.say(what, mnk=mnk, **took.numbers(0, flops))
                if scaling == "rowwise":
                    sizes.append(mnk)
                    seconds.append(took.seconds)
    if sizes:
        file.fit(
            "matmul.float8",
            lambda device: [roofline.matmul_seconds(device, *mnk, "float8") for mnk in sizes],
            seconds, f"{len(sizes)} products by rowwise scales, medians of 20",
        )  # fmt: skip
