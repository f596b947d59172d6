# SPDX-License-Identifier: Apache-2.0
"""Read published runs from CSV: three formats, told by their header, and what each row left out.

The formats are those of the Ultra-Scale Playbook's table, of vTrain's data, and of a table with a
row for each run of several sources. Other rows of the same columns are read as well: other models,
more GPUs, values left out where the others tell them, runs that crashed.
"""

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.planner.runs import SCHEDULES as ORDER
from tools.planner.runs import even_cut

PLAYBOOK = {  # layers, hidden, heads, ffn: confirmed by the table's own FLOPs to 1 %
    "1B": (16, 2048, 32, 8192), "3B": (28, 3072, 32, 8192),
    "8B": (32, 4096, 32, 14336), "80B": (80, 8192, 64, 28672),
}  # fmt: skip
LLAMA = {  # other sizes by name: the Llama papers
    "7B": (32, 4096, 32, 11008), "13B": (40, 5120, 40, 13824), "33B": (60, 6656, 52, 17920),
    "65B": (80, 8192, 64, 22016), "70B": (80, 8192, 64, 28672), "405B": (126, 16384, 128, 53248),
}  # fmt: skip
PLAYBOOK_NODE, PLAYBOOK_VOCABULARY, PLAYBOOK_SEQUENCE = 8, 131072, 4096
GPT_VOCABULARY = 50304  # GPT-2's 50,257, padded: vTrain's, and where a table names none
GIB = 2.0**30
FRAMEWORKS = {"llm-foundry/FSDP": "fsdp", "nemo/megatron": "nemo", "megatron fork": "megatron"}
SCHEDULES = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-1p": "zb-h1", "ZB-2p": "zb-2p"}
NETWORK = {"h100": 400.0, "h200": 400.0, "a100": 200.0, "b200": 400.0}  # Gb/s a GPU, unless said
MEMORY = {"h100": 80.0, "h200": 141.0, "a100": 80.0, "b200": 180.0}  # GB, unless the row says


class RowError(ValueError):
    """A row that cannot be read: the text names the file, the line, the column and the value."""


@dataclass(frozen=True)
class Row:
    """A published run.

    line: of the file. profile: the fitted constants that its framework and device have.
    group: runs that a fold keeps together. record: Runs' fields. seconds: measured, of a step, or
    NaN. memory: measured, GiB, or NaN. crashed: as published. limit: GiB of a GPU. filled: share of
    the micro-batches' sequences that the batch has. source: which table.
    """

    line: int
    source: str
    profile: str
    model: str
    group: str
    record: dict[str, Any]
    seconds: float
    memory: float
    crashed: bool
    limit: float
    filled: float


@dataclass(frozen=True)
class Line:
    """A line of a CSV, asked for by column."""

    file: str
    number: int
    values: dict[str, str]

    def wrong(self, column: str, rule: str) -> RowError:
        value = self.values.get(column)
        return RowError(f"{self.file}, line {self.number}, {column}: {value!r} {rule}")

    def text(self, column: str) -> str:
        value = (self.values.get(column) or "").strip()
        return "" if value.lower() in ("nan", "none", "-", "na", "n/a") else value

    def number_of(self, column: str, default: float = math.nan) -> float:
        """Return a column's number, or the default where it is empty. Raises RowError."""
        value = self.text(column)
        if not value:
            return default
        try:
            number = float(value)
        except ValueError:
            raise self.wrong(column, "is no number") from None
        if not math.isfinite(number) or number < 0:
            raise self.wrong(column, "must be a finite number of at least 0")
        return number

    def count(self, column: str, default: float = math.nan) -> int:
        """Return a column's whole number of at least 1. Raises RowError, also where it is empty."""
        number = self.number_of(column, default)
        if math.isnan(number):
            raise self.wrong(column, "is needed, and the other columns do not tell it")
        if number != int(number) or number < 1:
            raise self.wrong(column, "must be a whole number of at least 1")
        return int(number)


@dataclass(frozen=True)
class Table:
    """A CSV as it was read: its columns, its lines as they stood, and the runs they are."""

    columns: list[str]
    lines: list[dict[str, str]]
    rows: list[Row]


def read_table(path: Path) -> Table:
    """Return a CSV's runs. Raises RowError where the header is unknown or a row cannot be read."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restval="")
            lines = list(reader)
            columns = list(reader.fieldnames or [])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RowError(f"{path}: cannot be read as a CSV: {error}") from None
    read = _format(path, columns)
    rows = []
    for number, values in enumerate(lines, 2):
        if None in values:
            raise RowError(f"{path.name}, line {number}: has more values than the header columns")
        rows.append(read(Line(path.name, number, values)))
    return Table(columns, lines, rows)


def _format(path: Path, columns: Sequence[str]) -> Callable[[Line], Row]:
    have = set(columns)
    for needed, reader in (
        ({"model", "nodes", "tp", "pp", "mbs", "zero"}, _playbook),
        ({"# GPUs", "hidden size", "# layers", "tensor parallelism"}, _vtrain),
        ({"framework", "gpu", "n_gpus", "layers", "hidden", "seq"}, _several),
    ):
        if needed <= have:
            return reader
    raise RowError(
        f"{path}: the header is none of the three known ones; it has the columns "
        f"{', '.join(map(str, columns)) or '(none)'}"
    )


def playbook_cut(
    layers: int, hidden: int, ffn: int, vocab: int, pp: int
) -> tuple[list[int], int, bool]:
    """Return nanotron's layers a stage, the stage with the output layer, and whether one is idle.

    A block goes to the next rank once the cost so far exceeds the rank's share; the head costs too
    (nanotron, src/nanotron/models/base.py). The blocks: embedding, layers, norm, head, cast, loss.
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


def _sizes(line: Line) -> tuple[int, int, int, int]:
    name = line.text("model").upper()
    sizes = {**LLAMA, **PLAYBOOK}.get(name)
    if sizes is None:
        known = ", ".join([*PLAYBOOK, *LLAMA])
        raise line.wrong("model", f"is no model of known sizes; known are {known}")
    return sizes


def _playbook(line: Line) -> Row:
    layers, hidden, heads, ffn = _sizes(line)
    tp, pp = line.count("tp"), line.count("pp")
    nodes = line.number_of("nodes")
    dp = line.count("dp", nodes * PLAYBOOK_NODE / (tp * pp))
    mbs = line.count("mbs")
    batch = line.number_of("gbs")
    accumulated = line.count("grad_acc", batch / (mbs * dp))
    cut, head, idle = playbook_cut(layers, hidden, ffn, PLAYBOOK_VOCABULARY, pp)
    tokens = dp * mbs * accumulated * PLAYBOOK_SEQUENCE
    rate = line.number_of("tok_s_gpu") * tp * pp * dp
    rate = line.number_of("tok_s", rate)
    status = line.text("status").lower()
    model = line.text("model").upper()
    gpus = tp * pp * dp
    record: dict[str, Any] = {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": heads, "ffn": ffn,
        "vocab": PLAYBOOK_VOCABULARY, "sequence": PLAYBOOK_SEQUENCE, "gated": 1, "tied": 0,
        "causal": 1, "tp": tp, "cp": 1, "dp": dp, "pp": pp, "virtual": 1, "micro_batch": mbs,
        "micro_batches": accumulated, "zero": line.number_of("zero", 0), "recompute": 0,
        "sequence_parallel": 1, "float8": 0, "schedule": 0, "node": PLAYBOOK_NODE,
        "network": NETWORK["h100"] / 8 * 1e9, "head": head, "idle": idle,
        "cut": cut,
    }  # fmt: skip
    return Row(
        line=line.number,
        source="ultrascale",
        profile="nanotron_h100",
        model=model,
        group=f"{model} {math.ceil(gpus / PLAYBOOK_NODE)} nodes",
        record=record,
        seconds=tokens / rate if rate else math.nan,
        memory=line.number_of("mem_gb"),
        crashed="crash" in status or "oom" in status or "fail" in status,
        limit=80e9 / GIB,
        filled=1.0,
    )


def _vtrain(line: Line) -> Row:
    tp = line.count("tensor parallelism")
    pp = line.count("pipeline parallelism")
    gpus = line.number_of("# GPUs")
    dp = line.count("data parallelism", gpus / (tp * pp))
    gpus = tp * dp * pp
    hidden, layers = line.count("hidden size"), line.count("# layers")
    heads = line.count("attention heads", max(1, hidden // 128))
    micro = line.count("micro batch")
    batch = line.count("global batch")
    record: dict[str, Any] = {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": heads, "ffn": 4 * hidden,
        "vocab": GPT_VOCABULARY, "sequence": line.count("sequence length", 2048), "gated": 0,
        "tied": 1, "causal": 0, "tp": tp, "cp": 1, "dp": dp, "pp": pp, "virtual": 1,
        "micro_batch": micro, "micro_batches": max(1, math.ceil(batch / (micro * dp))), "zero": 0,
        "recompute": 1, "sequence_parallel": 0, "float8": 0, "schedule": 0, "node": 8,
        "network": NETWORK["a100"] / 8 * 1e9, "head": pp - 1, "idle": layers < pp,
        "cut": even_cut(layers, pp),
    }  # fmt: skip
    return Row(
        line=line.number,
        source="vtrain",
        profile="megatron-deepspeed_a100",
        model=f"{hidden}x{layers}",
        group=f"{gpus} GPUs hidden {hidden} layers {layers}",
        record=record,
        seconds=line.number_of("iteration time (ms)") / 1e3,
        memory=math.nan,
        crashed=False,
        limit=80e9 / GIB,
        filled=1.0,
    )


def _device(line: Line) -> str:
    name = line.text("gpu").lower()
    for known in ("h100", "h200", "a100", "b200"):
        if known in name:
            return known
    if "b300" in name:
        return "b200"
    raise line.wrong("gpu", "is no known device; known are A100, H100, H200, B200, GB200")


def _several(line: Line) -> Row:
    device, layers, hidden = _device(line), line.count("layers"), line.count("hidden")
    framework = FRAMEWORKS.get(line.text("framework"), "megatron")
    if "fsdp" in line.text("framework").lower():
        framework = "fsdp"
    llama = "llama" in (line.text("family") + line.text("model")).lower()
    gpus, (tp, pp, cp) = line.count("n_gpus"), (line.count(key, 1) for key in ("tp", "pp", "cp"))
    heads = line.count("heads", max(1, hidden // 128))
    ffn = line.count("ffn", 256 * math.ceil(hidden * 8 / 3 / 256) if llama else 4 * hidden)
    dp = line.count("dp", gpus / (tp * pp * cp))
    mbs = line.count("mbs", 1)
    batch = line.count("gbs")
    accumulated = max(1, math.ceil(batch / (mbs * dp)))
    named = line.text("notes").partition("schedule=")[2].partition(";")[0].strip()
    virtual = line.count("vpp", 1)
    schedule = SCHEDULES.get(named, "interleaved" if virtual > 1 else "1f1b")
    if schedule == "interleaved" and virtual == 1:
        virtual = max(1, layers // pp)
    if virtual * pp > layers:
        virtual = max(1, layers // pp)
    cut = even_cut(layers, pp * virtual)
    if named and virtual == 1 and pp > 1 and layers % pp:  # those models' ends are a layer shorter
        cut = even_cut(layers + 2, pp)
        cut[0], cut[-1] = cut[0] - 1, cut[-1] - 1
    precision = line.text("precision").lower()
    sequence = line.count("seq")
    record: dict[str, Any] = {
        "layers": layers, "hidden": hidden, "heads": heads,
        "kv_heads": line.count("kv_heads", heads), "ffn": ffn,
        "vocab": line.count("vocab", GPT_VOCABULARY), "sequence": sequence,
        "gated": llama or "mixtral" in line.text("model").lower(),
        "tied": not llama, "causal": 1, "tp": tp, "cp": cp, "dp": dp, "pp": pp, "virtual": virtual,
        "micro_batch": mbs, "micro_batches": accumulated,
        "zero": line.number_of("zero", 3 if framework == "fsdp" else 1),
        "recompute": line.text("recompute").lower() == "full",
        "sequence_parallel": line.text("sp") != "0" and tp > 1,
        "float8": precision.startswith("fp8"), "schedule": ORDER.index(schedule), "node": 8,
        "network": line.number_of("net_gbps_per_gpu", NETWORK[device]) / 8 * 1e9,
        "head": pp * virtual - 1, "idle": layers < pp, "cut": cut,
    }  # fmt: skip
    rate = line.number_of("tokens_s_gpu") * gpus
    seconds = line.number_of("step_time_s", batch * sequence / rate if rate else math.nan)
    return Row(
        line=line.number,
        source=framework,
        profile=f"{framework}_{device}",
        model=line.text("model"),
        group=line.text("model"),
        record=record,
        seconds=seconds,
        memory=line.number_of("mem_gib"),
        crashed=False,
        limit=line.number_of("gpu_mem_gb", MEMORY[device]) * 1e9 / GIB,
        filled=batch / (mbs * dp * accumulated),
    )
