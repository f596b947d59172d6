# SPDX-License-Identifier: Apache-2.0
"""Read published runs as steps to predict: sizes, layout, the framework's recipe, measured seconds.

Three formats, told by their header: the Ultra-Scale Playbook's table, vTrain's, and the one with a
row of its own for each run of several sources. What a framework does is in RECIPES, once.
"""

import csv
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from tools.rehearsal.analytic_sizes import Layout, Model, Passes, Recipe
from tools.rehearsal.analytic_step import StepClock, even_cut
from tools.rehearsal.device_file import Device

PLAYBOOK = {  # README of the published data: layers, hidden, heads, ffn
    "1B": (16, 2048, 32, 8192), "3B": (28, 3072, 32, 8192),
    "8B": (32, 4096, 32, 14336), "80B": (80, 8192, 64, 28672),
}  # fmt: skip
PLAYBOOK_VOCABULARY, PLAYBOOK_SEQUENCE, PLAYBOOK_BATCH = 131072, 4096, 256
VTRAIN_VOCABULARY = 50304  # 50,257 of VIA-Research/vTrain src/config.py, padded to 128
GPT_VOCABULARY = 50304  # GPT-2's 50,257, padded; where a table names none
BANDWIDTH = {"A100-SXM-40G": 1.555e12}  # NVIDIA A100 datasheet, SXM 40 GB
DEFAULT_NETWORK = {"H100-SXM-80G": 400.0, "A100-SXM-80G": 200.0, "A100-SXM-40G": 200.0}  # Gb/s
SCHEDULES = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-1p": "zb-h1", "ZB-2p": "none"}
HOST_SECONDS = Path(__file__).with_name("host_seconds.json")  # fitted: fit_device.py
UNKNOWN_HOST = 3e-4  # seconds a layer of a framework that nothing was fitted on
PEAK = {"h100": 989.4e12, "a100": 312e12}  # bfloat16, dense
RECIPES = {
    # Read in huggingface/nanotron@2411b02: RMSNorm and rotary in Triton; SiLU, product, residual,
    # RoPE's copies and the sharded cross entropy op by op in fp32; a hook of every parameter adds
    # its bf16 gradient to the fp32 one; every message sends two tensors with their metadata first.
    "nanotron": Recipe(
        "nanotron", Passes(14, hidden=10, inner=10, ffn=6), Passes(22, hidden=16, inner=12, ffn=14),
        logit_bytes=(38.0, 22.0), logit_launches=14, accumulate_bytes=10.0, update_bytes=46.0,
        update_launches=6.0, overlap_gradients=False, overlap_tp=True, message_syncs=4,
    ),
    # Megatron-DeepSpeed with its fused LayerNorm, bias-GeLU, bias-dropout-add and masked softmax.
    "megatron-deepspeed": Recipe(
        "megatron-deepspeed", Passes(14, hidden=11, inner=4, ffn=2, scores=4.5),
        Passes(20, hidden=14, inner=4, ffn=3, scores=5.5), attention="unfused",
        logit_bytes=(30.0, 14.0), gradient_bytes=2, accumulate_bytes=6.0, update_bytes=38.0,
        overlap_gradients=False,
    ),
    # MPT in llm-foundry: LayerNorm in bf16, GELU and residual op by op, flash attention, FSDP with
    # mixed precision DEFAULT (weights gathered in bf16, gradients reduced in fp32).
    "llm-foundry/FSDP": Recipe(
        "llm-foundry/FSDP", Passes(12, hidden=10, inner=6, ffn=2),
        Passes(18, hidden=14, inner=6, ffn=3), logit_bytes=(10.0, 8.0), logit_launches=6,
        update_bytes=60.0, update_launches=0.0, float8_bytes=3.0,
    ),
    # NeMo with Transformer Engine: fused norms, SwiGLU and RoPE, cuDNN attention, weight gradients
    # added in the matmul, float8 casts.
    "nemo/megatron": Recipe(
        "nemo/megatron", Passes(8, hidden=8, inner=4, ffn=3), Passes(10, hidden=12, inner=4, ffn=5),
        attention="cudnn", logit_bytes=(16.0, 10.0), logit_launches=10, update_bytes=34.0,
        overlap_tp=True, float8_bytes=3.0,
    ),
    # Megatron with fused kernels and FlashAttention (sail-sg/zero-bubble-pipeline-parallelism).
    "megatron fork": Recipe(
        "megatron fork", Passes(10, hidden=11, inner=4, ffn=2),
        Passes(14, hidden=14, inner=4, ffn=3), logit_bytes=(22.0, 12.0), logit_launches=12,
        accumulate_bytes=0.0, update_bytes=34.0, overlap_gradients=False,
    ),
}  # fmt: skip


class Run(NamedTuple):
    """A published run. group: runs that a fold keeps together.

    seconds: of a step, as published. network: bytes a second of a GPU's network card, 0: unknown.
    filled: share of the micro-batches' sequences that the batch has. memory_bandwidth: 0 as the
    device file says.
    """

    source: str
    name: str
    group: str
    device: str
    model: Model
    layout: Layout
    recipe: Recipe
    cut: tuple[int, ...]
    seconds: float
    network: float = 0.0
    filled: float = 1.0
    memory_bandwidth: float = 0.0

    @property
    def gpus(self) -> int:
        return self.layout.tp * self.layout.dp * self.layout.pp


@dataclass(frozen=True)
class Left:
    """A row that is not predicted, and why."""

    name: str
    why: str


def read_runs(folder: Path) -> tuple[list[Run], list[Left]]:
    """Return the runs of every CSV of a folder, and the rows left out."""
    runs: list[Run] = []
    left: list[Left] = []
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        for number, row in enumerate(rows, 2):
            found = _reader(rows[0])(f"{path.name}:{number}", row)
            (runs if isinstance(found, Run) else left).append(found)  # type: ignore[arg-type]
    return runs, left


def _reader(header: dict[str, str]) -> Callable[[str, dict[str, str]], Run | Left]:
    if "tok_s_gpu" in header:
        return _playbook
    if "# GPUs" in header:
        return _vtrain
    if "flops_convention" in header:
        return _table
    raise ValueError(f"no known format has the columns {', '.join(header)}")


def playbook_cut(model: Model, pp: int) -> tuple[int, ...]:
    """Return nanotron's layers a stage: a block goes to the next rank once the sum so far exceeds
    the rank's share of the costs (src/nanotron/models/base.py); the head costs too."""
    layer = 4 * model.hidden**2 + 3 * model.hidden * model.ffn
    blocks = [0, *[layer] * model.layers, 0, model.vocab * model.hidden, 0]
    total, so_far, rank = sum(blocks), 0, 0
    cut = [0] * pp
    for cost in blocks:
        cut[rank] += cost == layer
        so_far += cost
        if so_far > total * (rank + 1) / pp and rank < pp - 1:
            rank += 1
    return tuple(cut)


def _playbook(name: str, row: dict[str, str]) -> Run | Left:
    if row["status"] != "ok":
        return Left(name, "crashed")
    layers, hidden, heads, ffn = PLAYBOOK[row["model"]]
    model = Model(layers, hidden, heads, heads, ffn, PLAYBOOK_VOCABULARY, PLAYBOOK_SEQUENCE, True)
    tp, dp, pp = int(row["tp"]), int(row["dp"]), int(row["pp"])
    layout = Layout(tp, dp, pp, int(row["mbs"]), int(row["grad_acc"]), int(row["zero"]))
    seconds = int(row["gbs"]) * PLAYBOOK_SEQUENCE / float(row["tok_s"])
    group = f"playbook {row['model']} {row['nodes']} nodes"
    return Run("ultrascale", name, group, "h100", model, layout, RECIPES["nanotron"],
               playbook_cut(model, pp), seconds)  # fmt: skip


def _vtrain(name: str, row: dict[str, str]) -> Run:
    values = [float(value) for value in row.values()]
    gpus, batch, micro, hidden, heads, layers, sequence, tp, dp, pp = (int(v) for v in values[:10])
    model = Model(
        layers, hidden, heads, heads, 4 * hidden, VTRAIN_VOCABULARY, sequence, False, True
    )
    layout = Layout(tp, dp, pp, micro, batch // (micro * dp), 0, recompute="full",
                    sequence_parallel=False, dtype="float16")  # fmt: skip
    group = f"vtrain {gpus} GPUs hidden {hidden} layers {layers}"
    return Run("vtrain", name, group, "a100", model, layout, RECIPES["megatron-deepspeed"],
               tuple(even_cut(layers, pp)), values[10] / 1e3)  # fmt: skip


def _table(name: str, row: dict[str, str]) -> Run | Left:
    def number(key: str, default: int = 1) -> int:
        return int(float(row[key])) if row[key] else default

    gpus, sequence, mbs = number("n_gpus"), number("seq"), number("mbs")
    recipe = RECIPES[row["framework"]]
    notes = row["notes"]
    tp, pp, dp = number("tp"), number("pp"), number("dp")
    accumulated = -(-number("gbs") // (mbs * dp))  # llm-foundry's last micro-batch may be smaller
    schedule, virtual = "1f1b", number("vpp")
    if "schedule=" in notes:
        schedule = SCHEDULES[notes.partition("schedule=")[2].partition(";")[0]]
        virtual = {"interleaved": number("layers") // pp}.get(schedule, 1)
    elif virtual > 1:
        schedule = "interleaved"
    if schedule == "none":
        return Left(name, "ZB-2p is no schedule of this repository")
    if virtual > 1 and accumulated % pp:
        return Left(name, f"interleaved with {accumulated} micro-batches on {pp} ranks")
    layers = number("layers")
    llama = row["family"] == "llama"
    model = Model(
        layers, number("hidden"), number("heads"), number("kv_heads"), number("ffn"),
        number("vocab", GPT_VOCABULARY), sequence, llama, not llama,
    )  # fmt: skip
    dtype = {"bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}[row["precision"]]
    layout = Layout(tp, dp, pp, mbs, accumulated, number("zero", 0), virtual, schedule,
                    row["recompute"] or "none", row["sp"] == "1", dtype)  # fmt: skip
    if row["step_time_s"]:
        seconds = float(row["step_time_s"])
    else:
        seconds = number("gbs") * sequence / (float(row["tokens_s_gpu"]) * gpus)
    network = float(row["net_gbps_per_gpu"] or DEFAULT_NETWORK[row["gpu"]]) * 1e9 / 8
    device = "h100" if row["gpu"].startswith("H100") else "a100"
    group = f"{row['source'].split()[0]} {row['model']} {row['gpu']} {row['precision']}"
    cut = even_cut(layers, pp * virtual)
    if virtual == 1 and pp > 1 and layers % pp:  # the zero-bubble models: ends one layer shorter
        cut = even_cut(layers + 2, pp)
        cut[0], cut[-1] = cut[0] - 1, cut[-1] - 1
    filled = number("gbs") / (mbs * dp * accumulated)
    return Run(row["source"].split()[0], name, group, device, model, layout, recipe, tuple(cut),
               seconds, network, filled,
               BANDWIDTH.get(row["gpu"], 0.0))  # fmt: skip


def device_of(run: Run, device: Device) -> Device:
    """Return the device with the memory and the network that the run had."""
    if run.memory_bandwidth:
        device = device.changed(bandwidth=run.memory_bandwidth)
    if not run.network:
        return device
    outer = replace(device.levels[-1], bandwidth=run.network)
    return Device(device.name, device.numbers, (*device.levels[:-1], outer))


def predicted(run: Run, device: Device, host: dict[str, float]) -> float:
    """Return the predicted seconds of a run's step; host: seconds a layer of each framework."""
    recipe = replace(run.recipe, host_seconds=host.get(run.recipe.name, UNKNOWN_HOST))
    clock = StepClock(run.model, run.layout, recipe, device_of(run, device), run.cut)
    return clock.step().seconds * run.filled


def mfu_of(run: Run) -> float:
    """Return the measured MFU: 6 FLOPs a weight and token, attention counted whole."""
    model = run.model
    weights = model.layers * model.layer_parameters + model.vocab * model.hidden
    flops = 6 * weights + 12 * model.layers * model.hidden * model.sequence
    layout = run.layout
    batch = layout.dp * layout.micro_batch * layout.micro_batches * run.filled
    return batch * model.sequence * flops / (run.seconds * run.gpus * PEAK[run.device])
