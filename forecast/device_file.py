# SPDX-License-Identifier: Apache-2.0
"""Read a device file: the properties of a GPU and its links, each with its unit and its source.

A file is JSON, {"name": ..., "numbers": {key: {"value", "unit", "source"}}, "levels": [level]}, a
level {"name", "ranks", "bandwidth", "step_seconds", "tree_seconds"} whose last three are numbers in
the same form. NUMBERS and LEVEL list every key with its unit, and no other is allowed.

A GPU without such a file is a row of training/run/gpus.py, or a small file with such a row as an
object, {"name", "like", "memory", ...} in the units of the rows: it has the peaks of its data
sheet, and reaches the same shares of them as the device of the file `like`.

A number may have an "other", {"value", "source"}: its value from another source. A prediction is a
range, from the device with all the values to the device with the "other" ones. A file measured on
the card itself has no "other".
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from training.files.untrusted import read_json
from training.run.gpus import Gpu, UnknownGpu, gpu_of, named, of_driver

FOLDER = Path(__file__).resolve().parent / "devices"
DTYPES = ("bfloat16", "float16", "float8", "tf32", "float32")
# kernels: FlashAttention 1 and 2, and cuDNN's of Hopper and later
ATTENTION = tuple(f"{kernel}.{way}" for kernel in ("flash", "cudnn")
                  for way in ("forward", "backward"))  # fmt: skip
PROTOCOLS = ("LL", "LL128", "Simple")  # of NCCL
NUMBERS = {
    **{f"peak.{dtype}": "FLOP/s" for dtype in DTYPES},  # dense; 0 where it has no such unit
    "sms": "1",
    "memory": "B",
    "bandwidth": "B/s",
    "l2": "B",
    "host_bandwidth": "B/s",  # of copies between host and device, one direction
    "tile_m": "1",
    "tile_n": "1",
    "tile_cost": "1",
    "ramp": "1",
    "matmul": "share of peak",
    "matmul.float8": "share of peak",
    "memory_share": "share of bandwidth",
    **{f"attention.{kernel}": "share of peak" for kernel in ATTENTION},
    "kernel_seconds": "s",
    # seconds of the host for: an aten call that launches a kernel; an autograd function, forward or
    # backward, without its launches; a Triton launch, plus a part for each argument; a message, or
    # a batch of them; a collective
    "launch_seconds": "s",
    "function_seconds": "s",
    "triton_seconds": "s",
    "triton_argument_seconds": "s",
    "message_seconds": "s",
    "transfer_seconds": "s",
    "collective_start": "s",
    "collective_sms": "1",
    "link_share": "share of bandwidth",
    "network_share": "share of bandwidth",
    "oversubscription": "1",
    **{f"ring_base.{protocol}": "s" for protocol in PROTOCOLS},
    **{f"tree_base.{protocol}": "s" for protocol in PROTOCOLS},
    "low_latency_bandwidth": "B/s",
}
LEVEL = {"bandwidth": "B/s", "step_seconds": "s", "tree_seconds": "s"}


class DeviceFileError(ValueError):
    """A device file cannot be used. The message names the file, the key and the rule."""


@dataclass(frozen=True)
class Level:
    """A level of links that joins blocks of `ranks` GPUs (0: all GPUs).

    bandwidth: bytes per second of one GPU in one direction. step_seconds, tree_seconds: latency of
    a step of a ring and of a tree across this level, one for each of PROTOCOLS.
    """

    name: str
    ranks: int
    bandwidth: float
    step_seconds: tuple[float, ...]
    tree_seconds: tuple[float, ...]


@dataclass(frozen=True)
class Device:
    """A GPU and its links. numbers: by the keys and in the units of NUMBERS. levels: inner first.

    other: the numbers that have another value in another source; {} if the device was measured.
    capability: compute capability: Ampere 8.0, Hopper 9.0, Blackwell 10.0, a CPU 0.0.
    """

    name: str
    numbers: dict[str, float]
    levels: tuple[Level, ...]
    other: dict[str, float] = field(default_factory=dict)
    capability: tuple[int, int] = (8, 0)

    def __getitem__(self, key: str) -> float:
        return self.numbers[key]

    @property
    def blocks(self) -> list[int]:
        """Return the number of ranks that each level joins, inner levels first; 0: all."""
        return [level.ranks for level in self.levels]

    @property
    def major(self) -> int:
        """Return the first digit of the compute capability."""
        return self.capability[0]

    def peak(self, dtype: str) -> float:
        """Return the dense peak in FLOP/s of matmuls of a torch dtype, such as "bfloat16"."""
        name = "float8" if dtype.startswith("float8") else dtype
        peak = self.numbers.get(f"peak.{name}", 0.0)
        if not peak:
            raise DeviceFileError(f"{self.name} has no matmuls of {dtype}")
        return peak

    def changed(self, **numbers: float) -> "Device":
        """Return the device with other numbers, by their keys: changed(**{"peak.tf32": 1e15})."""
        unknown = sorted(numbers.keys() - self.numbers.keys())
        if unknown:
            raise DeviceFileError(f"{self.name} has no number {unknown[0]}")
        return replace(self, numbers={**self.numbers, **numbers})

    def ends(self) -> tuple["Device", ...]:
        """Return the device with its file's values and, if there are any, with the "other" ones."""
        return (self, self.changed(**self.other)) if self.other else (self,)


def path_of(name: str) -> Path:
    """Return the path of a device file: a path with a "/" or ".json", or a name in devices/."""
    if "/" in name or name.endswith(".json"):
        return Path(name)
    return FOLDER / f"{name.lower()}.json"


def read_device(name: str) -> Device:
    """Return the device of a file, or of a row of training/run/gpus.py.

    Raises DeviceFileError where a file breaks a rule, or a name is unknown.
    """
    path = path_of(name)
    if not path.is_file():
        if path.parent != FOLDER:
            raise DeviceFileError(f"{name}: no device file {path}")
        try:
            return of_gpu(named(name))
        except UnknownGpu as error:
            raise DeviceFileError(str(error)) from None
    content = read_json(path)
    if isinstance(content, dict) and "like" in content:
        return of_gpu(_row(path, content))
    if not isinstance(content, dict) or content.keys() != {"name", "numbers", "levels"}:
        raise DeviceFileError(f"{path}: must be an object with name, numbers and levels")
    if not isinstance(content["numbers"], dict):
        raise DeviceFileError(f"{path}: numbers must be an object")
    if not isinstance(content["levels"], list):
        raise DeviceFileError(f"{path}: levels must be a list")
    numbers = {key: _number(path, key, content["numbers"].get(key), unit)
               for key, unit in NUMBERS.items()}  # fmt: skip
    unknown = sorted(content["numbers"].keys() - NUMBERS.keys())
    if unknown:
        raise DeviceFileError(f"{path}: numbers has the unknown key {unknown[0]}")
    levels = tuple(_level(path, level) for level in content["levels"])
    if not levels or levels[-1].ranks != 0 or any(level.ranks < 2 for level in levels[:-1]):
        raise DeviceFileError(f"{path}: the last level must have ranks 0, all others at least 2")
    other = {
        key: _number(path, key, _other(entry), NUMBERS[key])[0]
        for key, entry in content["numbers"].items()
        if "other" in entry
    }
    found = Device(str(content["name"]), {k: v for k, (v,) in numbers.items()}, levels, other)
    known = of_driver(found.name)
    newer = (9, 0) if found["peak.float8"] else (8, 0)
    return replace(found, capability=known.capability if known else newer)


def of_gpu(gpu: Gpu) -> Device:
    """Return the device with a data sheet's peaks and the efficiencies of the device `gpu.like`."""
    base = read_device(gpu.like)
    inner, *outer = base.levels
    wire = "nvlink" if gpu.link > 64e9 else "pcie"
    numbers = {
        "peak.bfloat16": gpu.bf16, "peak.float16": gpu.bf16, "peak.float8": gpu.float8,
        "peak.tf32": gpu.tf32, "peak.float32": gpu.fp32, "sms": gpu.sms, "memory": gpu.memory,
        "bandwidth": gpu.bandwidth, "l2": gpu.l2, "host_bandwidth": gpu.host,
        "matmul.float8": base["matmul.float8"] or base["matmul"],
        "collective_sms": min(base["collective_sms"], gpu.sms // 5),
    }  # fmt: skip
    link = replace(inner, name=wire, ranks=gpu.link_gpus, bandwidth=gpu.link)
    title = f"{'NVIDIA ' if gpu.capability[0] else ''}{gpu.driver} {gpu.memory / 1e9:.0f} GB"
    base = replace(base, name=title, levels=(link, *outer), capability=gpu.capability)
    return base.changed(**numbers)


def _row(path: Path, content: dict[str, Any]) -> Gpu:
    """Return the GPU of a small file."""
    wanted = {*Gpu._fields} - {"driver"}
    if content.keys() != wanted:
        odd = sorted(content.keys() ^ wanted)[0]
        fault = "is missing" if odd in wanted else "is unknown"
        raise DeviceFileError(
            f"{path}: {odd} {fault}; the keys are {', '.join(sorted(wanted))}, in the units of "
            "training/run/gpus.py"
        )
    bases = sorted(file.stem for file in FOLDER.glob("*.json"))
    if content["like"] not in bases:
        raise DeviceFileError(f"{path}: like is {content['like']!r}, not one of {', '.join(bases)}")
    pair = content["capability"]
    if not isinstance(pair, list) or [type(part) for part in pair] != [int, int]:
        raise DeviceFileError(f"{path}: capability is {pair!r}, not two whole numbers, as [8, 9]")
    if not all(isinstance(content[key], str) for key in ("name", "source")):
        raise DeviceFileError(f"{path}: name and source must be strings")
    for key in wanted - {"name", "like", "capability", "source"}:
        value, least = content[key], 0 if key == "float8" else 1e-9
        right = isinstance(value, int | float) and not isinstance(value, bool)
        if not right or not least <= value < 1e7:
            above = "above" if least else "from"
            raise DeviceFileError(f"{path}: {key} is {value!r}, not a number {above} 0, below 1e7")
    return gpu_of({**content, "driver": content["name"], "capability": tuple(pair)})


def _other(entry: dict[str, Any]) -> Any:
    """Return an entry's other value, as an entry of its own."""
    other = entry["other"]
    return {**other, "unit": entry["unit"]} if isinstance(other, dict) else other


def _level(path: Path, level: Any) -> Level:
    if not isinstance(level, dict) or type(level.get("ranks")) is not int or "name" not in level:
        raise DeviceFileError(f"{path}: each level must have a name and ranks, a whole number")
    values = {key: _number(path, key, level.get(key), unit) for key, unit in LEVEL.items()}
    return Level(
        str(level["name"]),
        level["ranks"],
        values["bandwidth"][0],
        values["step_seconds"],
        values["tree_seconds"],
    )


def _number(path: Path, key: str, entry: Any, unit: str) -> tuple[float, ...]:
    """Return an entry's value, or its values by PROTOCOLS."""
    if not isinstance(entry, dict) or entry.keys() - {"other"} != {"value", "unit", "source"}:
        raise DeviceFileError(f"{path}: {key} must be an object with only value, unit and source")
    if entry["unit"] != unit:
        raise DeviceFileError(f"{path}: the unit of {key} must be {unit}, not {entry['unit']}")
    if not isinstance(entry["source"], str) or len(entry["source"]) < 10:
        raise DeviceFileError(
            f"{path}: the source of {key} is {entry['source']!r}: it must say where the value is "
            "from, in 10 letters or more"
        )
    many = key in ("step_seconds", "tree_seconds")
    values = entry["value"] if many else [entry["value"]]
    if not isinstance(values, list) or len(values) != (len(PROTOCOLS) if many else 1):
        raise DeviceFileError(f"{path}: {key} must have a value for each of {', '.join(PROTOCOLS)}")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e18:
            raise DeviceFileError(f"{path}: {key} is {value!r}, not a number from 0 to 1e18")
    if unit.startswith("share") and values[0] > 1:
        raise DeviceFileError(f"{path}: {key} is {values[0]}, but a share must be at most 1")
    return tuple(float(value) for value in values)
