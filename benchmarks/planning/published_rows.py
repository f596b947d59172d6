# SPDX-License-Identifier: Apache-2.0
"""Published runs as inputs of the rehearsal's clock: sizes, layout, recipe and seconds of a step.

benchmarks/planning/published.py reads them. RECIPES describes each program once.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.planning.published import Row, read_table
from benchmarks.planning.written_record import Layout, Model, Passes, Recipe, StepClock
from forecast.device_file import Device, read_device
from forecast.planner.pipeline import SCHEDULES

BANDWIDTH = {"A100-SXM-40G": 1.555e12}  # NVIDIA A100 datasheet, SXM 40 GB
HOST_SECONDS = Path(__file__).parent.parent / "host_seconds.json"  # fitted by fit_device.py
UNKNOWN_HOST = 3e-4  # host seconds per layer of a program without a fit
TABLES = {  # name of the source and of its groups, recipe, dtype
    "ultrascale": ("playbook", "nanotron", "bfloat16"),
    "vtrain": ("vtrain", "megatron-deepspeed", "float16"),
}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}
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
    """A published run. group: runs of a group stay in the same fold.

    seconds: of a step, as published. network: bytes per second of a GPU's network card. filled: the
    batch's sequences as a share of the micro-batches'. memory_bandwidth: 0: the device file's.
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
    network: float
    filled: float = 1.0
    memory_bandwidth: float = 0.0

    @property
    def gpus(self) -> int:
        return self.layout.tp * self.layout.dp * self.layout.pp


@dataclass(frozen=True)
class Left:
    """A row that is not predicted, and the reason."""

    name: str
    why: str


def read_runs(folder: Path) -> tuple[list[Run], list[Left]]:
    """Return the runs of every CSV in a folder, and the rows left out."""
    runs: list[Run] = []
    left: list[Left] = []
    for path in sorted(folder.glob("*.csv")):
        table = read_table(path)
        found: dict[int, Run | Left] = {
            at: Left(f"{path.name}:{at + 2}", reason) for at, reason in table.reasons.items()
        }
        for at, row in zip(table.places, table.rows, strict=True):
            found[at] = _run(f"{path.name}:{at + 2}", row, table.lines[at])
        for _, each in sorted(found.items()):
            (runs if isinstance(each, Run) else left).append(each)  # type: ignore[arg-type]
    return runs, left


def _run(name: str, row: Row, line: dict[str, str]) -> Run | Left:
    """Return a row as a run, or as one left out."""
    r = row.record
    schedule, virtual = SCHEDULES[r["schedule"]], r["virtual"]
    if row.crashed:
        return Left(name, "crashed")
    if schedule == "zb-2p":
        return Left(name, "ZB-2p is no schedule of this repository")
    if virtual > 1 and r["micro_batches"] % r["pp"]:
        return Left(name, f"interleaved with {r['micro_batches']} micro-batches on {r['pp']} ranks")
    if row.source in TABLES:
        table, recipe, dtype = TABLES[row.source]
        source, group = row.source, f"{table} {row.group}"
    else:
        source, recipe = line["source"].split()[0], line["framework"]
        dtype = DTYPES[line["precision"]]
        group = f"{source} {row.model} {line['gpu']} {line['precision']}"
    model = Model(
        r["layers"], r["hidden"], r["heads"], r["kv_heads"], r["ffn"], r["vocab"], r["sequence"],
        bool(r["gated"]), bool(r["tied"]),
    )  # fmt: skip
    layout = Layout(
        r["tp"], r["dp"], r["pp"], r["micro_batch"], r["micro_batches"], int(r["zero"]), virtual,
        schedule, "full" if r["recompute"] else "none", bool(r["sequence_parallel"]), dtype,
    )  # fmt: skip
    return Run(
        source, name, group, row.profile.rpartition("_")[2], model, layout, RECIPES[recipe],
        tuple(r["cut"]), row.seconds, r["network"], row.filled,
        BANDWIDTH.get(line.get("gpu", ""), 0.0),
    )  # fmt: skip


def device_of(run: Run, device: Device) -> Device:
    """Return the device with the run's memory bandwidth and network."""
    if run.memory_bandwidth:
        device = device.changed(bandwidth=run.memory_bandwidth)
    outer = replace(device.levels[-1], bandwidth=run.network)
    return Device(device.name, device.numbers, (*device.levels[:-1], outer))


def predicted(run: Run, device: Device, host: dict[str, float]) -> float:
    """Return the predicted seconds of a run's step. host: seconds per layer, by framework."""
    recipe = replace(run.recipe, host_seconds=host.get(run.recipe.name, UNKNOWN_HOST))
    clock = StepClock(run.model, run.layout, recipe, device_of(run, device), run.cut)
    return sum(clock.step().values()) * run.filled


def mfu_of(run: Run) -> float:
    """Return the measured MFU: 6 FLOPs per weight and token, attention without a causal mask."""
    model = run.model
    weights = model.layers * model.layer_parameters + model.vocab * model.hidden
    flops = 6 * weights + 12 * model.layers * model.hidden * model.sequence
    layout, peak = run.layout, read_device(run.device).peak("bfloat16")
    batch = layout.dp * layout.micro_batch * layout.micro_batches * run.filled
    return batch * model.sequence * flops / (run.seconds * run.gpus * peak)
