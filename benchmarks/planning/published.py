# SPDX-License-Identifier: Apache-2.0
"""Read published runs from CSV: three formats, recognised by their header.

The formats are those of the Ultra-Scale Playbook's table, of vTrain's data, and of a table of runs
from several sources. Rows may leave out values that follow from other columns or a model's name.
"""

import csv
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.planning.foreign_runs import even_cut
from forecast.device_file import read_device
from forecast.planner.pipeline import SCHEDULES as ORDER
from mpu.layers.float8.cuda import lacks
from training.files.untrusted import read_plain

LARGEST = 1 << 28  # most bytes of a CSV
PLAYBOOK = {  # layers, hidden, heads, ffn: the table's own FLOPs confirm them to 1 %
    "1B": (16, 2048, 32, 8192), "3B": (28, 3072, 32, 8192),
    "8B": (32, 4096, 32, 14336), "80B": (80, 8192, 64, 28672),
}  # fmt: skip
LLAMA = {  # other sizes by name: the Llama papers
    "7B": (32, 4096, 32, 11008), "13B": (40, 5120, 40, 13824), "33B": (60, 6656, 52, 17920),
    "65B": (80, 8192, 64, 22016), "70B": (80, 8192, 64, 28672), "405B": (126, 16384, 128, 53248),
}  # fmt: skip
PLAYBOOK_UNTIED = 10_000  # ffn size from which nanotron's scaling script unties the output layer
PLAYBOOK_NODE, PLAYBOOK_VOCABULARY, PLAYBOOK_SEQUENCE = 8, 131072, 4096
GPT_VOCABULARY = 50304  # GPT-2's 50,257, padded: vTrain's, and the default of other tables
GIB = 2.0**30
MOST = 1 << 30  # largest count
DEEPEST = 4096  # most stages of a pipeline
NAMED = {  # layers, hidden, heads, kv heads, ffn, vocabulary: for rows with only a model's name
    "llama3-8b": (32, 4096, 32, 8, 14336, 128256), "llama3-70b": (80, 8192, 64, 8, 28672, 128256),
    "llama3-405b": (126, 16384, 128, 8, 53248, 128256),
    "llama2-7b": (32, 4096, 32, 32, 11008, 32000), "llama2-13b": (40, 5120, 40, 40, 13824, 32000),
    "llama2-70b": (80, 8192, 64, 8, 28672, 32000),
    "gpt3-175b": (96, 12288, 96, 96, 49152, 51200),
}  # fmt: skip
SCHEDULES = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-1p": "zb-h1", "ZB-2p": "zb-2p"}
NETWORK = {"h100": 400.0, "h200": 400.0, "a100": 200.0, "b200": 400.0}  # default Gb/s per GPU
DEVICES = {  # name of a GPU in a row: device file, GPUs joined by NVLink, GB of memory
    "gb300": ("b200", 72, 288.0), "gb200": ("b200", 72, 186.0), "b300": ("b200", 8, 288.0),
    "b200": ("b200", 8, 180.0), "gh200": ("h200", 1, 96.0), "h200": ("h200", 8, 141.0),
    "h100": ("h100", 8, 80.0), "h800": ("h100", 8, 80.0), "a100": ("a100", 8, 80.0),
    "a800": ("a100", 8, 80.0),
}  # fmt: skip

HALF = r"(amp)?(bf16|bfloat16|fp16|float16|half|16)(mixed|amp|true)?"
FLOAT8 = (
    r"(amp|te)?(mx)?(fp8|float8)(cs|ds|mx|delayed|currentscaling|tensorwise|rowwise|hybrid|e4m3)?"
)
TITAN_AGAIN = 0.4  # torchtitan's default: every second matmul of a layer is recomputed


class RowError(ValueError):
    """A row cannot be read. The message names the file, the line, the column and the value."""


@dataclass(frozen=True)
class Line:
    """A line of a CSV, with its values by column."""

    file: str
    number: int
    values: dict[str, str]

    def wrong(self, column: str, rule: str) -> RowError:
        """Return the error for a column, with its value and the rule."""
        value = self.values.get(column)
        return RowError(f"{self.file}, line {self.number}, {column}: {value!r} {rule}")

    def text(self, column: str) -> str:
        value = (self.values.get(column) or "").strip()
        return "" if value.lower() in ("nan", "none", "-", "na", "n/a") else value

    def number_of(self, column: str, default: float = math.nan) -> float:
        """Return a column's number, or the default if it is empty. Raises RowError."""
        value = self.text(column)
        if not value:
            return default
        try:
            number = float(value)
        except ValueError:
            raise self.wrong(column, "must be a number") from None
        if not math.isfinite(number) or number < 0:
            raise self.wrong(column, "must be a finite number of at least 0")
        return number

    def measured(self, column: str, default: float = math.nan) -> float:
        """Return a measured number; NaN if it is wrong, as no prediction needs it."""
        try:
            return self.number_of(column, default)
        except RowError:
            return math.nan

    def deep(self, column: str, default: float = math.nan) -> int:
        """Return a number of pipeline ranks. Raises RowError, also for more than DEEPEST."""
        stages = self.count(column, default)
        if stages > DEEPEST:
            raise self.wrong(column, f"must be at most {DEEPEST:,}")
        return stages

    def count(self, column: str, default: float = math.nan) -> int:
        """Return a column's whole number of at least 1. Raises RowError, also if it is missing."""
        number = self.number_of(column, default)
        if math.isnan(number):
            raise self.wrong(column, "must be given, as it does not follow from other columns")
        if number != int(number) or number < 1:
            raise self.wrong(column, "must be a whole number of at least 1")
        if number > MOST:
            raise self.wrong(column, f"must be at most {MOST:,}")
        return int(number)


@dataclass(frozen=True)
class Row:
    """A published run.

    source: the table. profile: the framework and device whose constants predict it. group: runs of
    a group stay in the same fold. record: the fields of Runs. limit: GiB of a GPU. filled: the
    batch's sequences as a share of the micro-batches'. Measured: seconds of a step and GiB of
    memory (NaN: unknown), crashed.
    """

    source: str
    profile: str
    model: str
    group: str
    record: dict[str, Any]
    seconds: float
    limit: float
    filled: float = 1.0
    memory: float = math.nan
    crashed: bool = False


@dataclass(frozen=True)
class Table:
    """The content of a CSV: its columns, its lines, and the runs described by these.

    places: line of each run, from 0. reasons: why other lines are not runs, by line.
    """

    columns: list[str]
    lines: list[dict[str, str]]
    rows: list[Row]
    places: list[int]
    reasons: dict[int, str]


def read_table(path: Path) -> Table:
    """Return a CSV's runs. Raises RowError if the file or its header cannot be read."""
    try:
        text = read_plain(path, LARGEST).decode("utf-8-sig")
        reader = csv.DictReader(io.StringIO(text, newline=""), restval="")
        lines = list(reader)
        columns = list(reader.fieldnames or [])
    except (OSError, ValueError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise RowError(f"{path}: cannot be read as a CSV: {why}") from None
    read = _format(path, columns)
    table = Table(columns, lines, [], [], {})
    for at, values in enumerate(lines):
        try:
            if None in values:
                raise RowError(
                    f"{path.name}, line {at + 2}: has more values than the header columns"
                )
            own = {_plain(column): value for column, value in values.items()}
            row = read(Line(path.name, at + 2, own))
        except RowError as error:
            table.reasons[at] = str(error)
            continue
        table.rows.append(row)
        table.places.append(at)
    return table


def _plain(column: str) -> str:
    """Return a column's name as the readers use it: lower case, single blanks."""
    return " ".join(column.lower().split())


def _format(path: Path, columns: Sequence[str]) -> Callable[[Line], Row]:
    have = {_plain(column) for column in columns}
    for needed, reader in (
        ({"framework", "gpu", "n_gpus", "seq"}, _several),
        ({"model", "tp", "pp", "mbs"}, _playbook),
        ({"hidden size", "# layers", "tensor parallelism", "pipeline parallelism"}, _vtrain),
    ):
        if needed <= have:
            return reader
    raise RowError(
        f"{path}: the header must be one of the three known ones; it has the columns "
        f"{', '.join(map(str, columns)) or '(none)'}"
    )


def playbook_cut(
    layers: int, hidden: int, ffn: int, vocab: int, pp: int
) -> tuple[list[int], int, bool]:
    """Return nanotron's layers per stage, the stage of the output layer, and whether one is idle.

    Blocks go to the next rank once the total cost exceeds the rank's share; the head has a cost,
    too (nanotron, src/nanotron/models/base.py). Blocks: embedding, layers, norm, head, cast, loss.
    """
    layer = 4 * hidden**2 + 3 * hidden * ffn
    blocks = [0, *[layer] * layers, 0, vocab * hidden, 0, 0]
    total, so_far, rank, home = sum(blocks), 0, 0, 0
    cut, last = [0] * pp, 0
    for number, cost in enumerate(blocks):
        last = rank
        cut[rank] += 0 < number <= layers
        if number == layers + 2:
            home = rank
        so_far += cost
        if so_far > total * (rank + 1) / pp and rank < pp - 1:
            rank += 1
    return cut, home, last < pp - 1


def _record(
    *, layers: int, heads: int, tp: int, pp: int, cut: list[int], **more: Any
) -> dict[str, Any]:
    """Return the fields of Runs: the given ones, and defaults that most tables leave out."""
    plain = {
        "kv_heads": heads, "cp": 1, "virtual": 1, "causal": 1, "recompute": 0, "float8": 0,
        "schedule": 0, "head": len(cut) - 1, "idle": layers < pp,
    }  # fmt: skip
    return {**plain, "layers": layers, "heads": heads, "tp": tp, "pp": pp, "cut": cut, **more}


def _sizes(line: Line) -> tuple[int, int, int, int]:
    name = line.text("model").upper()
    sizes = {**LLAMA, **PLAYBOOK}.get(name)
    if sizes is None:
        known = ", ".join([*PLAYBOOK, *LLAMA])
        raise line.wrong("model", f"must be one of {known}")
    return sizes


def _playbook(line: Line) -> Row:
    layers, hidden, heads, ffn = _sizes(line)
    tp, pp = line.count("tp"), line.deep("pp")
    nodes = line.number_of("nodes")
    dp = line.count("dp", nodes * PLAYBOOK_NODE / (tp * pp))
    mbs = line.count("mbs")
    batch = line.number_of("gbs")
    accumulated = line.count("grad_acc", batch / (mbs * dp))
    cut, head, idle = playbook_cut(layers, hidden, ffn, PLAYBOOK_VOCABULARY, pp)
    tokens = dp * mbs * accumulated * PLAYBOOK_SEQUENCE
    rate = line.measured("tok_s_gpu") * tp * pp * dp
    rate = line.measured("tok_s", rate)
    status = line.text("status").lower()
    model = line.text("model").upper()
    gpus = tp * pp * dp
    record = _record(
        layers=layers, hidden=hidden, heads=heads, ffn=ffn, vocab=PLAYBOOK_VOCABULARY,
        sequence=PLAYBOOK_SEQUENCE, gated=1, tied=ffn < PLAYBOOK_UNTIED, tp=tp, dp=dp, pp=pp,
        micro_batch=mbs, micro_batches=accumulated, zero=line.number_of("zero", 0),
        sequence_parallel=1, node=PLAYBOOK_NODE, network=NETWORK["h100"] / 8 * 1e9, head=head,
        idle=idle, cut=cut,
    )  # fmt: skip
    return Row(
        source="ultrascale",
        profile="nanotron_h100",
        model=model,
        group=f"{model} {math.ceil(gpus / PLAYBOOK_NODE)} nodes",
        record=record,
        seconds=tokens / rate if rate else math.nan,
        memory=line.measured("mem_gb"),
        crashed="crash" in status or "oom" in status or "fail" in status,
        limit=80e9 / GIB,
    )


def _vtrain(line: Line) -> Row:
    tp = line.count("tensor parallelism")
    pp = line.deep("pipeline parallelism")
    gpus = line.number_of("# gpus")
    dp = line.count("data parallelism", gpus / (tp * pp))
    gpus = tp * dp * pp
    hidden, layers = line.count("hidden size"), line.count("# layers")
    heads = line.count("attention heads", max(1, hidden // 128))
    micro = line.count("micro batch")
    batch = line.count("global batch")
    record = _record(
        layers=layers, hidden=hidden, heads=heads, ffn=4 * hidden, vocab=GPT_VOCABULARY,
        sequence=line.count("sequence length", 2048), gated=0, tied=1, causal=0, tp=tp, dp=dp,
        pp=pp, micro_batch=micro, micro_batches=max(1, math.ceil(batch / (micro * dp))), zero=0,
        recompute=1, sequence_parallel=0, node=8, network=NETWORK["a100"] / 8 * 1e9,
        cut=even_cut(layers, pp),
    )  # fmt: skip
    return Row(
        source="vtrain",
        profile="megatron-deepspeed_a100",
        model=f"{hidden}x{layers}",
        group=f"{gpus} GPUs hidden {hidden} layers {layers}",
        record=record,
        seconds=line.measured("iteration time (ms)") / 1e3,
        limit=80e9 / GIB,
    )


def _float8(line: Line, device: str) -> bool:
    """Return whether a row's matmuls are in float8. Raises RowError if their rate is unknown."""
    name = re.sub(r"[^a-z0-9]", "", line.text("precision").lower())
    if not name or re.fullmatch(HALF, name):
        return False
    recipe = re.fullmatch(FLOAT8, name)
    if not recipe:
        raise line.wrong(
            "precision",
            "must be bf16, fp16, mxfp8, or fp8 with cs, ds, delayed, tensorwise or rowwise "
            "scales: no other rate is known",
        )
    found = read_device(device)
    scaling = "mxfp8" if "mx" in name else "tensorwise"
    if lacks(scaling, found.capability, found.name):
        raise line.wrong("precision", f"is not available on {found.name}")
    return True


def _recompute(line: Line, framework: str) -> tuple[float, bool]:
    """Return the recomputed share of a layer's forward, and whether only attention is."""
    name = line.text("recompute").lower()
    if framework == "titan" and (not name or name.startswith("selective")):
        return TITAN_AGAIN, False
    if name in ("", "0", "no", "off", "false"):
        return 0.0, False
    if name in ("1", "full", "yes", "true"):
        return 1.0, False
    if name.startswith("selective"):
        return 0.0, True
    raise line.wrong("recompute", "must be full, selective or none")


def _device(line: Line) -> tuple[str, int, float]:
    """Return a row's device file, its GPUs joined by NVLink, and GB. Raises RowError."""
    name = line.text("gpu").lower()
    word = re.search(rf"(?:^|[^a-z0-9]|x)({'|'.join(DEVICES)})(?![0-9])", name)
    if word and not re.search(r"pcie|nvl(?!72)", name):  # these have other clocks and links
        return DEVICES[word[1]]
    known = ", ".join(key.upper() for key in DEVICES)
    raise line.wrong("gpu", f"must be one of {known}, not a PCIe or NVL card")


def _framework(line: Line, device: str) -> str:
    """Return the framework of FRAMEWORKS that is closest to a row's."""
    name = line.text("framework").lower()
    if "titan" in name:
        return "titan"
    if "fsdp" in name:
        return "fsdp"
    if name == "megatron fork":  # tables of zero-bubble schedules
        return "megatron"
    if device == "a100" and "nemo" not in name:
        return "megatron-deepspeed"
    return "nemo"


def _named(line: Line) -> tuple[int, ...] | None:
    """Return the sizes of a model by its name, or None if it is unknown."""
    name = re.sub(r"[^a-z0-9]+", "", line.text("model").lower()).replace("llama31", "llama3")
    for known, sizes in NAMED.items():
        if known.replace("-", "") in name:
            return sizes
    return None


def _several(line: Line) -> Row:
    device, node, memory = _device(line)
    framework = _framework(line, device)
    known = _named(line) or (math.nan,) * 6
    layers, hidden = line.count("layers", known[0]), line.count("hidden", known[1])
    name = (line.text("family") + line.text("model")).lower()
    llama, tied = "llama" in name, not re.search("llama|mixtral|nemotron", name)
    gpus, tp, cp = line.count("n_gpus"), line.count("tp", 1), line.count("cp", 1)
    pp = line.deep("pp", 1)
    same = known[:2] == (layers, hidden)
    heads = line.count("heads", known[2] if same else max(1, hidden // 128))
    wide = 256 * math.ceil(hidden * 8 / 3 / 256) if llama else 4 * hidden
    ffn = line.count("ffn", known[4] if same else wide)
    dp = line.count("dp", gpus / (tp * pp * cp))
    mbs = line.count("mbs", 1)
    batch = line.count("gbs")
    accumulated = max(1, math.ceil(batch / (mbs * dp)))
    named = line.text("notes").partition("schedule=")[2].partition(";")[0].strip()
    virtual = line.count("vpp", 1)
    schedule = SCHEDULES.get(named, "interleaved" if virtual > 1 else "1f1b")
    if schedule == "interleaved" and virtual == 1:
        virtual = max(1, layers // pp)
    virtual = min(virtual, max(1, layers // pp))
    cut = even_cut(layers, pp * virtual)
    if named and virtual == 1 and pp > 1 and layers % pp:  # their end stages have a layer less
        cut = even_cut(layers + 2, pp)
        cut[0], cut[-1] = cut[0] - 1, cut[-1] - 1
    float8 = _float8(line, device)
    again, core_again = _recompute(line, framework)
    sequence = line.count("seq")
    record = _record(
        layers=layers, hidden=hidden, heads=heads,
        kv_heads=line.count("kv_heads", known[3] if same else heads), ffn=ffn,
        vocab=line.count("vocab", known[5] if same else GPT_VOCABULARY), sequence=sequence,
        gated=llama or "mixtral" in line.text("model").lower(), tied=tied, tp=tp, cp=cp, dp=dp,
        pp=pp, virtual=virtual, micro_batch=mbs, micro_batches=accumulated,
        zero=line.number_of("zero", 3 if framework in ("fsdp", "titan") else 1),
        recompute=again, core_again=core_again,
        sequence_parallel=line.text("sp") != "0" and tp > 1, float8=float8,
        schedule=ORDER.index(schedule), node=node, overlap=framework == "nemo" and tp > 1,
        network=line.number_of("net_gbps_per_gpu", NETWORK[device]) / 8 * 1e9, cut=cut,
    )  # fmt: skip
    rate = line.measured("tokens_s_gpu") * gpus
    seconds = line.measured("step_time_s", batch * sequence / rate if rate else math.nan)
    return Row(
        source=framework,
        profile=f"{framework}_{device}",
        model=line.text("model"),
        group=line.text("model"),
        record=record,
        seconds=seconds,
        memory=line.measured("mem_gib"),
        limit=line.number_of("gpu_mem_gb", memory) * 1e9 / GIB,
        filled=batch / (mbs * dp * accumulated),
    )
