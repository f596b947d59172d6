# SPDX-License-Identifier: Apache-2.0
"""Seconds of one kernel on a device: matmuls by shape, attention, and what moves memory.

Pure functions of sizes and of a device file's numbers (tools/rehearsal/device_file.py), for the
rehearsal's clock and for a planner. The model of a matmul is that of tiles and waves: NVIDIA,
"Matrix Multiplication Background User's Guide", sections "Tile quantization" and "Wave
quantization".
"""

from math import ceil, prod
from typing import NamedTuple

from tools.rehearsal.device_file import Device
from tools.rehearsal.events import Call, Event, Launch, Transfer

TILES = ((1.0, 1.0), (1.0, 0.5), (0.5, 1.0), (0.5, 0.5), (0.5, 0.25), (0.25, 0.5))  # of the largest
SPLITS = (1, 2, 4, 8)  # parts of k, each with its own tiles
MESSAGES = ("send", "receive")
PARTIAL = 4  # bytes of a partial sum, fp32
MATMULS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "_scaled_mm": 0, "_scaled_mm_v2": 0,
           "matmul": 0}  # fmt: skip


class Kernel(NamedTuple):
    """Seconds of a kernel, start included. tail: those at its end in which SMs are free for what
    another stream has queued behind it, as many as a collective takes.
    """

    seconds: float
    tail: float = 0.0


def matmul_seconds(
    device: Device, m: int, n: int, k: int, dtype: str, batch: int = 1, sms: float = 0.0
) -> float:
    """Return the seconds of `batch` products [m, k] x [k, n], kernel start included."""
    return matmul(device, m, n, k, dtype, batch=batch, sms=sms).seconds


def matmul(
    device: Device, m: int, n: int, k: int, dtype: str, batch: int = 1, sms: float = 0.0
) -> Kernel:
    """Return the seconds of `batch` products [m, k] x [k, n], and their tail.

    sms: those that it may use; 0 means all. Of the tile sizes and splits of k the fastest counts,
    as a library's heuristics would choose. A tile of tm x tn does 2 tm tn (k + ramp) FLOPs at an
    SM's share of the peak: `ramp` numbers of k fill and drain its pipeline. A smaller tile reads
    more from shared memory for each FLOP, by tile_cost (1/tm + 1/tn). The last wave is the tail
    where it leaves the SMs of a collective.
    """
    if min(m, n, k, batch) < 1:
        return Kernel(device["kernel_seconds"])
    use = sms or device["sms"]
    share = device["matmul.float8" if dtype.startswith("float8") else "matmul"]
    rate = device.peak(dtype) * share / device["sms"]  # of one SM
    size = 1 if dtype.startswith("float8") else 4 if dtype in ("float32", "tf32") else 2
    moved = memory_seconds(device, batch * ((m * k + k * n) * size + 2 * m * n), False)
    big_m, big_n, cost = device["tile_m"], device["tile_n"], device["tile_cost"]
    best, tail = float("inf"), 0.0
    for scale_m, scale_n in TILES:
        tm, tn = big_m * scale_m, big_n * scale_n
        slower = (1 + cost * (1 / tm + 1 / tn)) / (1 + cost * (1 / big_m + 1 / big_n))
        tiles = batch * ceil(m / tm) * ceil(n / tn)
        for split in SPLITS:
            waves = ceil(tiles * split / use)
            seconds = waves * 2 * tm * tn * (k / split + device["ramp"]) * slower / rate
            if split > 1:
                sums = batch * m * n * PARTIAL * split
                spilled = sums if sums > device["l2"] else 0
                seconds += memory_seconds(device, 2 * spilled)
            if seconds < best:
                left = use * waves - tiles * split
                best = seconds
                tail = seconds / waves if left >= device["collective_sms"] else 0.0
    return Kernel(max(best, moved) + device["kernel_seconds"], tail)


def memory_seconds(device: Device, moved: float, starts: bool = True) -> float:
    """Return the seconds of a kernel that reads and writes so many bytes; starts: a start too."""
    seconds = moved / (device["bandwidth"] * device["memory_share"])
    return seconds + device["kernel_seconds"] * starts


def attention_seconds(
    device: Device,
    flops: float,
    moved: float,
    dtype: str,
    kernel: str = "flash",
    backward: bool = False,
) -> float:
    """Return the seconds of a fused attention that does so many FLOPs and moves so many bytes."""
    way = "backward" if backward else "forward"
    rate = device.peak(dtype) * device[f"attention.{kernel}.{way}"]
    return max(flops / rate + device["kernel_seconds"], memory_seconds(device, moved))


def short_name(launch: Launch) -> str:
    """Return "mm" of "aten::mm.out"."""
    return launch.op.rpartition("::")[2].partition(".")[0]


def matmul_dtype(launch: Launch) -> str:
    """Return the dtype of a matmul's operands; the record has that of its result.

    _scaled_mm multiplies float8. Where a result is fp32 and its kernel moves fewer bytes than fp32
    operands have, the operands are bfloat16.
    """
    op = short_name(launch)
    if op.startswith("_scaled_mm"):
        return "float8"
    if launch.dtype == "float32" and op in MATMULS:
        if launch.bytes < 4 * sum(prod(shape) for shape in launch.shapes):
            return "bfloat16"
    return launch.dtype


def launch_seconds(device: Device, launch: Launch, sms: float = 0.0) -> float:
    """Return the seconds of a recorded kernel alone on the device, or on `sms` of its SMs."""
    return kernel_of(device, launch, sms).seconds


def kernel_of(device: Device, launch: Launch, sms: float = 0.0) -> Kernel:
    """Return the seconds of a recorded kernel, and its tail; sms: as of `launch_seconds`."""
    op = short_name(launch)
    if launch.flops and op in MATMULS:
        a, b = launch.shapes[MATMULS[op] :][:2]
        sizes = a[-2], b[-1], a[-1], matmul_dtype(launch)
        return matmul(device, *sizes, batch=prod(a[:-2]), sms=sms)
    return Kernel(_other_seconds(device, launch, op, sms))


def _other_seconds(device: Device, launch: Launch, op: str, sms: float) -> float:
    if launch.op.startswith("memcpy "):  # between host and device
        return launch.bytes / device["host_bandwidth"] + device["kernel_seconds"]
    if not launch.flops:
        return memory_seconds(device, launch.bytes)
    dtype = matmul_dtype(launch)
    if "attention" in op or "flash" in op:
        kernel = "cudnn" if "cudnn" in op else "flash"
        backward = "backward" in op
        return attention_seconds(device, launch.flops, launch.bytes, dtype, kernel, backward) * (
            device["sms"] / sms if sms else 1.0
        )
    whole = device.peak(dtype) * device["matmul"] * (sms / device["sms"] if sms else 1.0)
    return max(
        launch.flops / whole + device["kernel_seconds"], memory_seconds(device, launch.bytes)
    )


def host_seconds(device: Device, event: Event) -> float:
    """Return what an event costs the host: each kind its own number of the device file.

    Of messages that start as a batch, each; the clock counts the first alone (clock.py).
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
