# SPDX-License-Identifier: Apache-2.0
"""Seconds of one kernel on a device: matmuls by shape, attention, and memory-bound kernels.

Pure functions of sizes and of a device file's numbers (forecast/device_file.py), for the
rehearsal's clock and for the planner. The model of a matmul is that of tiles and waves: NVIDIA,
"Matrix Multiplication Background User's Guide", sections "Tile quantization" and "Wave
quantization".
"""

from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from forecast.device_file import Device
from forecast.rehearsal.events import Call, Event, Launch, Transfer

# tile sizes to try, as shares of the largest; numbers of splits of k to try with each
TILES = ((1.0, 1.0), (1.0, 0.5), (0.5, 1.0), (0.5, 0.5), (0.5, 0.25), (0.25, 0.5))
SPLITS = (1, 2, 4, 8)
TRIED = np.array([(m, n, split) for m, n in TILES for split in SPLITS]).T
# kinds of kernels. passes: only move memory; update: all kernels of the optimizer
KINDS = ("matmul", "attention", "passes", "copies", "update")
# ATTENTION_RAMP: tokens of keys at which a kernel reaches half of its best share, by
# docs/planning.md. MEASURED: tokens to which the device files' shares refer
ATTENTION_RAMP, MEASURED = {"flash": 0.0, "cudnn": 512.0}, 8192
MESSAGES = ("send", "receive")
PARTIAL = 4  # bytes of an element of a partial sum, fp32
MATMULS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "_scaled_mm": 0, "_scaled_mm_v2": 0,
           "matmul": 0}  # fmt: skip
GROUPED = "_grouped_mm"
Quantity = Any  # a number, or an array with one for each run


class Numbers(Protocol):
    """A device's numbers by the keys of device_file.NUMBERS: a Device or a planner's profile."""

    def __getitem__(self, key: str, /) -> float: ...


class Kernel(NamedTuple):
    """Seconds of a kernel, start included.

    tail: seconds at its end in which enough SMs are free for a collective queued behind it.
    """

    seconds: Quantity
    tail: Quantity = 0.0


def matmul_seconds(
    device: Device, m: int, n: int, k: int, dtype: str, batch: int = 1, sms: float = 0.0
) -> float:
    """Return the seconds of `batch` products [m, k] x [k, n], kernel start included."""
    return matmul_of(device, m, n, k, dtype, batch=batch, sms=sms).seconds


def matmul_of(
    device: Device, m: int, n: int, k: int, dtype: str, batch: int = 1, sms: float = 0.0
) -> Kernel:
    """Return the seconds of `batch` products in a dtype, and their tail: see `matmul`."""
    if min(m, n, k, batch) < 1:
        return Kernel(device["kernel_seconds"])
    low = dtype.startswith("float8")
    rate = device.peak(dtype) * device["matmul.float8" if low else "matmul"]
    size = 1 if low else 4 if dtype in ("float32", "tf32") else 2
    return Kernel(*map(float, matmul(device, m, n, k, rate, size, batch=batch, sms=sms)))


def matmul(
    device: Numbers, m: Quantity, n: Quantity, k: Quantity, rate: Quantity, size: Quantity = 2,
    batch: Quantity = 1, sms: float = 0.0,
) -> Kernel:  # fmt: skip
    """Return the seconds of `batch` products [m, k] x [k, n], and their tail.

    rate: FLOP/s of a long matmul on all SMs. size: bytes of an operand's element; one of the result
    has 2. sms: number of SMs that it may use; 0 means all. The fastest of the tile sizes and splits
    of k counts, as a library's heuristics would choose. A tile of tm x tn takes the time of
    2 tm tn (k + ramp) FLOPs at an SM's share of the rate: `ramp` elements of k fill and drain the
    pipeline. A smaller tile reads more from shared memory per FLOP, by tile_cost (1/tm + 1/tn). The
    last wave is the tail if it leaves enough SMs for a collective.
    """
    use = sms or device["sms"]
    moved = memory_seconds(device, batch * ((m * k + k * n) * size + 2 * m * n))
    m, n, k, rate, batch = (np.asarray(each, float)[..., None] for each in (m, n, k, rate, batch))
    big_m, big_n, cost = device["tile_m"], device["tile_n"], device["tile_cost"]
    tm, tn, split = big_m * TRIED[0], big_n * TRIED[1], TRIED[2]
    slower = (1 + cost * (1 / tm + 1 / tn)) / (1 + cost * (1 / big_m + 1 / big_n))
    tiles = batch * np.ceil(m / tm) * np.ceil(n / tn) * split
    waves = np.ceil(tiles / use)
    seconds = waves * (2 * tm * tn * slower) * (k / split + device["ramp"])
    seconds = seconds * device["sms"] / rate
    sums = batch * m * n * PARTIAL * split
    spilled = memory_seconds(device, 2 * np.where(sums > device["l2"], sums, 0.0))
    seconds = seconds + np.where(split > 1, spilled, 0.0)
    best = seconds.argmin(-1)[..., None]
    seconds, waves, tiles = (np.take_along_axis(each, best, -1)[..., 0]
                             for each in (seconds, waves, tiles))  # fmt: skip
    tail = np.where(use * waves - tiles >= device["collective_sms"], seconds / waves, 0.0)
    return Kernel(np.maximum(seconds + device["kernel_seconds"], moved), tail)


def memory_seconds(device: Numbers, moved: Quantity, starts: bool = True) -> Quantity:
    """Return the seconds of a kernel that reads and writes `moved` bytes. starts: add its start."""
    seconds = moved / (device["bandwidth"] * device["memory_share"])
    return seconds + device["kernel_seconds"] * starts


def attention_share(
    device: Numbers, kernel: str, backward: bool, length: Quantity = MEASURED
) -> Quantity:
    """Return the share of the peak that attention reaches on rows of `length` keys.

    kernel: "flash" or "cudnn". A device file has the shares at MEASURED tokens.
    """
    ramp = ATTENTION_RAMP[kernel]
    share = device[f"attention.{kernel}.{'backward' if backward else 'forward'}"]
    return share * (1 + ramp / MEASURED) * length / (length + ramp)


def attention(device: Numbers, flops: Quantity, moved: Quantity, rate: Quantity) -> Quantity:
    """Return the seconds of a fused attention. moved: bytes read and written. rate: FLOP/s."""
    return np.maximum(flops / rate + device["kernel_seconds"], memory_seconds(device, moved))


def attention_seconds(
    device: Device,
    flops: float,
    moved: float,
    dtype: str,
    kernel: str = "flash",
    backward: bool = False,
    length: int = MEASURED,
) -> float:
    """Return the seconds of a fused attention: see `attention_share`."""
    rate = device.peak(dtype) * attention_share(device, kernel, backward, length)
    return float(attention(device, flops, moved, rate))


def short_name(launch: Launch) -> str:
    """Return "mm" of "aten::mm.out"."""
    return launch.op.rpartition("::")[2].partition(".")[0]


def matmul_dtype(launch: Launch) -> str:
    """Return the dtype of a matmul's operands, from a record that has the result's.

    _scaled_mm multiplies float8. If the result is fp32 and the kernel moves fewer bytes than fp32
    operands would have, the operands are bfloat16.
    """
    op = short_name(launch)
    if op.startswith("_scaled_mm"):
        return "float8"
    if launch.dtype == "float32" and op in MATMULS:
        if launch.bytes < 4 * sum(prod(shape) for shape in launch.shapes):
            return "bfloat16"
    return launch.dtype


def kind_of(launch: Launch) -> str:
    """Return the kind of a recorded kernel, one of KINDS."""
    if launch.where.phase == "update":
        return "update"
    if launch.op.startswith("memcpy "):
        return "copies"
    if not launch.flops:
        return "passes"
    op = short_name(launch)
    return "attention" if "attention" in op or "flash" in op else "matmul"


def launch_seconds(device: Device, launch: Launch) -> float:
    """Return the seconds of a recorded kernel alone on the device."""
    return kernel_of(device, launch).seconds


def kernel_of(device: Device, launch: Launch, sms: float = 0.0) -> Kernel:
    """Return the seconds of a recorded kernel and its tail. sms: number it may use; 0: all."""
    op = short_name(launch)
    if launch.flops and op in MATMULS:
        a, b = launch.shapes[MATMULS[op] :][:2]
        sizes = a[-2], b[-1], a[-1], matmul_dtype(launch)
        return matmul_of(device, *sizes, batch=prod(a[:-2]), sms=sms)
    if op == GROUPED:  # rows spread evenly over the experts
        (rows, k), (experts, _, n) = launch.shapes[:2]
        each = -(-rows // experts)
        return matmul_of(device, each, n, k, launch.dtype, batch=experts, sms=sms)
    return Kernel(_other_seconds(device, launch, op, sms))


def _other_seconds(device: Device, launch: Launch, op: str, sms: float) -> float:
    if launch.op.startswith("memcpy "):  # between host and device
        return launch.bytes / device["host_bandwidth"] + device["kernel_seconds"]
    if not launch.flops:
        return memory_seconds(device, launch.bytes)
    dtype = matmul_dtype(launch)
    if "attention" in op or "flash" in op:
        kernel = "cudnn" if "cudnn" in op else "flash"
        length = launch.shapes[1][-2] if len(launch.shapes) > 1 else MEASURED  # of k, or of q
        seconds = attention_seconds(
            device,
            launch.flops,
            launch.bytes,
            dtype,
            kernel,
            backward="backward" in op,
            length=length,
        )
        return seconds * (device["sms"] / sms if sms else 1.0)
    peak = device.peak(dtype) * device["matmul"] * (sms / device["sms"] if sms else 1.0)
    return max(launch.flops / peak + device["kernel_seconds"], memory_seconds(device, launch.bytes))


def host_seconds(device: Device, event: Event) -> float:
    """Return the host's seconds for an event, by the device file's number for its kind.

    Each message of a batch has its own; the clock counts only the first (clock.py).
    """
    if isinstance(event, Call):
        return device["function_seconds"]
    if isinstance(event, Transfer):
        return device["message_seconds" if event.verb in MESSAGES else "transfer_seconds"]
    if not isinstance(event, Launch):
        return 0.0
    if event.op.startswith("triton::"):
        return device["triton_seconds"] + event.arguments * device["triton_argument_seconds"]
    return device["launch_seconds"]
