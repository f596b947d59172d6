# SPDX-License-Identifier: Apache-2.0
"""Report what a run would do before it starts: layout, memory, work, traffic.

It works for any WORLD_SIZE: the program's own step is recorded on tensors without memory
(forecast/recording.py), without process groups or devices. Without --vocab-size the size is read
from the tokenizer's file, if it exists here.
"""

import os
from collections.abc import Mapping, Sequence
from math import prod
from types import ModuleType
from typing import Any

from forecast.fit import fit_lines
from forecast.moments import Moment
from forecast.obeyed_flags import check_attention, check_flags
from forecast.recording import (
    ACTIVATIONS,
    GATHERED,
    HOST,
    LOGITS,
    MESSAGES,
    OTHER_STATE,
    STATE,
    UNSHARDED,
    WEIGHT_ROWS,
    WORKING,
    Recording,
    recordings_of,
)
from forecast.traffic import SMALL, Traffic, rows
from mpu.optim.interface import rules_of
from training.data.tokenizer import tokenizer_for
from training.flags.megatron import vocabulary
from training.run import context_parallel, matrices, pipeline_stages
from training.run.model_profile import grid_of, model_profile, whole_model
from training.run.text import aligned, in_units
from training.settings import batch_size, param_groups
from training.settings.arguments import ParallelConfig
from training.settings.config import Config
from training.settings.layer_options import accumulate_dtype
from training.settings.stages import tokens_at
from training.settings.update_rules import optimizer_groups

NO_VOCABULARY = (
    "parameters, memory, FLOPs and traffic: they depend on the vocabulary size, and there is no "
    "tokenizer file; give --vocab-size"
)
REHEARSAL = (
    "--rehearse instead of --dry-run runs the steps of a rank on a simulated device: launches, "
    "peak memory, predicted time, and mistakes by file and line"
)
WORKSPACES = "workspaces"
# bytes of cuBLAS's workspace for each thread's handle and stream since Hopper; before it 8.1 MiB
# (pytorch aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize)
CUBLAS_WORKSPACE = 4096 * 8 * 1024
GPU_OVERHEAD = "CUDA, NCCL and allocator overhead come"
Shapes = Mapping[str, tuple[int, ...]]
BUCKETS = ("grad sum", "update", "gather", "exchange")  # purposes with transfers of many sizes


def report(config: Config, script: ModuleType) -> str:
    """Return the report of --dry-run. In a pipeline it details the rank that needs the most memory.

    script: pretrain_llama.py, or a fork of it.
    """
    config = with_vocabulary(config)
    sections = [("Layout", _layout(config))]
    if config.model.vocab_size is None:
        sections += [("Batch", _batch(config)), ("Not known", [NO_VOCABULARY])]
    else:
        sections += _of_the_model(config, script)
    sections += [
        ("Rehearsal", [REHEARSAL]),
        ("Notes on the flags", list(config.notes)),
        ("Differs from Megatron-LM", _differences(config)),
    ]
    return "\n\n".join(
        "\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections if lines
    )


def with_vocabulary(config: Config) -> Config:
    """Return the config with the vocabulary's size, if it is given or its tokenizer is here."""
    model = config.data.tokenizer_model
    if config.model.vocab_size is None and model and os.path.exists(model):
        return config.with_vocab(tokenizer_for(config).vocab_size)
    return config


def _differences(config: Config) -> list[str]:
    """Return the differences from Megatron-LM of the given flags, and the number of others."""
    known = vocabulary().differences
    lines = [f"{d.title}: {d.there}; here {d.here}" for d in known if d.touches(config.given)]
    rest = len(known) - len(lines)
    return [*lines, f"{rest} more, for flags that you did not set: docs/flags.md"]


def _of_the_model(config: Config, script: ModuleType) -> list[tuple[str, list[str]]]:
    """Return the sections that depend on the model's shapes."""
    size, provider = config.parallel.pipeline_model_parallel_size, script.model_provider
    check_attention(config, provider)
    check_flags(config, provider)
    found = recordings_of(config, script)
    kinds = [memory(config, each) for each in found]
    fullest = max(range(size), key=lambda rank: sum(kinds[rank].values()))
    rank = f"pipeline rank {fullest}, the fullest" if size > 1 else "one rank"
    of_rank = found[fullest]
    optimizers = [(each.run.grid, each.run.optimizer) for each in found]
    return [
        ("Pipeline", pipeline_stages.lines(config, provider)),
        ("Memory of each pipeline rank", _ranks(found, kinds)),
        (f"Parameters of {rank}", _parameters(config, provider, shapes(of_rank))),
        (f"Memory of {rank}", _memory(config, script, found, kinds, fullest)),
        ("Parameter groups", _groups(config, provider)),
        ("Optimizer", matrices.lines(config, provider, optimizers)),
        ("Batch", _batch(config)),
        ("Work", _work(config, model_profile(config, provider).flops)),
        (
            f"Traffic of one step{f', {rank}' if size > 1 else ''}",
            [*_traffic(rows(of_rank)), *_host_traffic(config, of_rank)],
        ),
    ]


def shapes(recording: Recording) -> Shapes:
    """Return the local shapes of a rank's parameters, by name."""
    return {name: tuple(p.shape) for name, p in recording.run.model.named_parameters()}


def _groups(config: Config, provider: Any) -> list[str]:
    """Return lines on which parameters train, and with which factors."""
    return param_groups.lines(dict(whole_model(config, provider).named_parameters()))


def memory_of_ranks(config: Config, script: ModuleType) -> list[dict[str, int]]:
    """Return the bytes of each kind at the fullest moment of each rank of a pipeline."""
    return [memory(config, each) for each in recordings_of(config, script)]


def memory(config: Config, recording: Recording) -> dict[str, int]:
    """Return the bytes of each kind on a rank's device at its fullest moment."""
    return fullest(config, recording).kinds


def fullest(config: Config, recording: Recording) -> Moment:
    """Return the moment of a rank's step with the most memory, workspaces included."""
    return _with_workspaces(config, recording.fullest())


def step_memory(config: Config, recording: Recording) -> list[Moment]:
    """Return the fullest moment of each action of a step in order, workspaces included."""
    return [_with_workspaces(config, moment) for moment in recording.moments()]


def _with_workspaces(config: Config, moment: Moment) -> Moment:
    return moment._replace(kinds=moment.kinds | {WORKSPACES: matmul_workspaces(config)})


def matmul_workspaces(config: Config) -> int:
    """Return the bytes of cuBLAS's workspaces: one each for the forward and the autograd thread."""
    return 0 if config.parallel.device == "cpu" else 2 * CUBLAS_WORKSPACE


def at_start(config: Config, recording: Recording) -> int:
    """Return the peak bytes of the warm-up, in which a pipeline rank on a GPU runs each chunk once
    before the first message; 0 if there is none.
    """
    return recording.warm_up and recording.warm_up + matmul_workspaces(config)


def _layout(config: Config) -> list[str]:
    p = config.parallel
    t, cp, dp = p.tensor_model_parallel_size, p.context_parallel_size, p.data_parallel_size
    pp = p.pipeline_model_parallel_size
    sp = "on" if p.sequence_parallel else "off"
    if p.sequence_parallel:
        sp += f", overlap {p.tp_comm_overlap}"
        sp += ", measured at start-up" if p.tp_comm_overlap == "auto" else ""
    grid = grid_of(config, 0)
    lines = [
        f"TP {t} x CP {cp} x DP {dp} x PP {pp} = {p.world_size} ranks; sequence parallelism {sp}",
        f"tensor-parallel group of rank 0: {_few(grid.tp.ranks)}",
        f"data-parallel group of rank 0: {_few(grid.dp.ranks)}",
    ]
    if p.rank_order != ParallelConfig.rank_order:
        lines.insert(1, f"rank numbers go along the axes {p.rank_order}, the first one fastest")
    if cp > 1:
        lines.insert(-1, f"context-parallel group of rank 0: {_few(grid.cp.ranks)}")
        lines += context_parallel.lines(config)
    if pp > 1:
        lines.append(f"pipeline group of rank 0: {_few(grid.pp.ranks)}")
    return lines


def _few(ranks: Sequence[int]) -> str:
    names = [str(r) for r in ranks]
    return ", ".join(names if len(names) <= 9 else [*names[:4], "...", names[-1]])


def _parameters(config: Config, provider: Any, parameters: Shapes) -> list[str]:
    """Return a line for each name and shape, with a count for repeated layers, and the totals."""
    lines: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, shape in parameters.items():
        parts = name.split(".")
        key = (".".join("*" if part.isdigit() else part for part in parts), shape)
        lines[key] = lines.get(key, 0) + 1
    out = [
        f"{name:<34} {str(list(shape)):<18}" + (f" x {times}" if times > 1 else "")
        for (name, shape), times in lines.items()
    ]
    m = config.model
    padded = m.padded_vocab_size(config.parallel.tensor_model_parallel_size)
    return [
        *(line.rstrip() for line in out),
        f"{count(parameters):,} on a rank, {model_profile(config, provider).parameters:,} in all",
        f"vocabulary {m.vocab_size:,}, padded to {padded:,}; the padding is masked out of the loss",
    ]


def count(parameters: Shapes) -> int:
    """Return the number of elements in these parameters."""
    return sum(map(prod, parameters.values()))


def _ranks(found: Sequence[Recording], kinds: Sequence[Mapping[str, int]]) -> list[str]:
    """Return a line for each rank of a pipeline; the column "buffers" has all other kinds."""
    if len(found) == 1:
        return []
    columns = ("parameters", "state", "buffers", ACTIVATIONS, LOGITS, "total")
    rows: list[tuple[str, ...]] = [("rank", *columns)]
    for rank, (recording, kind) in enumerate(zip(found, kinds, strict=True)):
        state, total = sum(kind[k] for k in STATE), sum(kind.values())
        rest = total - state - kind[ACTIVATIONS] - kind[LOGITS]
        sizes = (state, rest, kind[ACTIVATIONS], kind[LOGITS], total)
        rows.append((str(rank), f"{count(shapes(recording)):,}", *map(in_units, sizes)))
    return aligned(rows)


def _memory(
    config: Config,
    script: ModuleType,
    found: Sequence[Recording],
    kinds: Sequence[Mapping[str, int]],
    rank: int,
) -> list[str]:
    """Return a line for each kind of memory, the total, and advice if it does not fit a GPU."""
    p, recording, own = config.parallel, found[rank], kinds[rank]
    dtype, again = str(config.run.dtype).removeprefix("torch."), p.recompute_granularity or "none"
    shared = recording.run.sink.weight_buckets
    level = max(bucket.layout.sharing.zero_stage for bucket in shared)
    acc = "fp64" if dtype == "float64" else "fp32"
    apart = accumulate_dtype(config) != config.run.dtype  # masters are not the weights themselves
    remarks = {
        "parameters": dtype,
        "gradients": "bf16" if p.main_grads_dtype == "bf16" and level < 2 else acc,
        "masters": "fp32" if apart else "none: the parameters are updated themselves",
        "moments": _state_names(config),
        OTHER_STATE: "index of the gradient norm, RoPE tables, a micro-batch",
        UNSHARDED: "during a part of a step, until they are summed",
        GATHERED: "during a part of a step",
        WEIGHT_ROWS: "w and w^T, quantized once a step (not kept with --no-fp8-weight-cache)",
        ACTIVATIONS: f"recomputed: {again}; one micro-batch",
        LOGITS: "one micro-batch; their gradient takes the same memory",
        MESSAGES: "between stages: in flight, or the inputs that a stage keeps",
        WORKING: "one action's gathered inputs, partial sums and gradients",
        WORKSPACES: "of cuBLAS, on Hopper or later; less on older GPUs",
    }
    away = (p.optimizer_cpu_offload and p.device != "cpu") or p.optimizer_state_offload
    if away:
        remarks["moments"] += ", in host memory"
        remarks["masters"] += ", in host memory" * (apart or p.optimizer_cpu_offload)
    since = {"moments": 1, "masters": 1, "gradients": 2, "parameters": 3}
    share = _share(recording)
    for kind, first in since.items():
        if level >= first and (kind != "masters" or apart):
            remarks[kind] += f", a share of {share}"
    if level == 1 and p.main_grads_dtype == "bf16":
        remarks["gradients"] += f", and fp32 sums of a share of {share}"
    if p.pipeline_model_parallel_size > 1:
        remarks[ACTIVATIONS] = f"recomputed: {again}; all that {p.schedule} has in flight"
        remarks[LOGITS] = "all waiting micro-batches; the gradient of one takes the same memory"
        remarks[GATHERED] = "all stages of the rank, from a step's first use to its last"
    total, start = sum(own.values()), max(at_start(config, each) for each in found)
    always = (*STATE, ACTIVATIONS, LOGITS)
    lines = [
        f"{kind:<19} {in_units(value):>10}  {remarks[kind]}"
        for kind, value in own.items() if value or kind in always
    ]  # fmt: skip
    more = "what Python and torch need comes" if p.device == "cpu" else GPU_OVERHEAD
    lines.append(f"{'total':<19} {in_units(total):>10}  {more} on top")
    if start:
        lines.append(
            f"{'at the start':<19} {in_units(start):>10}  of the rank with the highest peak in the "
            "warm-up: before the first message each chunk runs once, on weights of zeros"
        )
    if host := recording.most(HOST):
        what = ["activations"] * config.gpu.cpu_offload_activations
        what += ["masters, moments and staging buffers"] * p.optimizer_cpu_offload
        what += ["masters and moments"] * p.optimizer_state_offload
        lines.append(f"{HOST:<19} {in_units(host):>10}  {', '.join(what)}; pinned")

    def peak(other: Config) -> int:
        """Return the bytes of the rank that needs the most memory."""
        of_ranks = recordings_of(other, script)
        totals = (sum(memory(other, each).values()) for each in of_ranks)
        return max(*totals, *(at_start(other, each) for each in of_ranks))

    return lines + fit_lines(config, max(total, start), peak, in_units)


def _state_names(config: Config) -> str:
    """Return the optimizer's kinds of state as words: "AdamW's two"."""
    words = {0: "none", 1: "one", 2: "two", 3: "three"}
    counts = [(rule.name, len(rule.kinds)) for rule in rules_of(optimizer_groups(config))]
    return ", ".join(f"{name}'s {words.get(count, count)}" for name, count in counts)


def _share(recording: Recording) -> str:
    """Return the share of its state that a rank keeps, as text: "1/8"."""
    shares = {b.layout.sharing.cut: b.layout.sharing.shard for b in recording.run.sink.buckets}
    experts = f", of experts 1/{shares['ep']}" if "ep" in shares else ""
    return f"1/{shares.get('tp', 1)}{experts}"


def _batch(config: Config) -> list[str]:
    b, s = config.batch, config.model.seq_length
    dp = config.parallel.data_parallel_size
    lines = []
    for first, size in batch_size.schedule(config):
        since = f"from sample {first:,}: " if b.step_batch_size_schedule else ""
        lines.append(
            f"{since}global batch {size:,} = micro-batch {b.micro_batch_size} x "
            f"{size // (b.micro_batch_size * dp)} micro-batches x {dp} data-parallel ranks"
            f" = {size * s:,} tokens a step"
        )
    steps, samples = batch_size.total_iterations(config), batch_size.total_samples(config)
    tokens = tokens_at(config, samples)
    lines.append(f"{steps:,} steps, {samples:,} samples, {tokens:,} tokens in all")
    if len({stage.length for stage in config.stages}) > 1:
        lines.append(f"all other numbers are of the stages with the longest rows, {s:,} tokens")
    return lines


def _work(config: Config, per_token: float) -> list[str]:
    tokens = batch_size.global_batch_size(config, 0) * config.model.seq_length
    ranks = config.parallel.world_size
    total = per_token * tokens_at(config, batch_size.total_samples(config))
    return [
        f"{per_token:.4g} FLOPs a token = 6 x weights in matmuls + 3 L s a (d_qk + d_v) of causal "
        "attention",
        f"{per_token * tokens:.4g} FLOPs a step, {per_token * tokens / ranks:.4g} a rank",
        f"{total:.4g} FLOPs in all; at 400 TFLOP/s a rank {_days(total / ranks / 4e14)}",
    ]


def _days(seconds: float) -> str:
    return f"{seconds / 86400:,.1f} days" if seconds > 86400 else f"{seconds / 3600:,.2f} hours"


def _traffic(rows: list[Traffic]) -> list[str]:
    """Return a line for each axis, verb and size. Buckets of a purpose share a line, as do all
    small sums.
    """
    groups: dict[tuple[str, str, object], list[Traffic]] = {}
    for row in rows:
        if row.verb != "receive":
            kind = row.purpose if row.purpose in BUCKETS else row.bytes
            key = (row.axis, row.verb, kind) if row.purpose not in SMALL else ("", "", SMALL)
            groups.setdefault(key, []).append(row)
    found = []
    for (axis, verb, _), same in groups.items():
        times, sent = sum(row.times for row in same), sum(row.sent for row in same)
        sizes = {row.bytes for row in same}
        size = sizes.pop() if len(sizes) == 1 else sum(row.times * row.bytes for row in same)
        line = f"{axis:<9} {verb.replace('_', '-'):<14} {times:>7,} of {in_units(size):>9}"
        line += " in all" * bool(sizes)
        if not axis:
            line = f"{', '.join(SMALL):<24} {times:>7,}"
        found.append((sent, f"{line}; a rank sends {in_units(sent)}"))
    lines = [line for _, line in sorted(found, key=lambda part: -part[0])]
    return lines or ["none: one rank"]


def _host_traffic(config: Config, recording: Recording) -> list[str]:
    """Return the line on copies between the device and its host in a step, if there are any."""
    down, up = recording.copied()
    if not down + up:
        return []
    p, what = config.parallel, []
    what += ["gradients down, weights up"] * p.optimizer_cpu_offload
    what += ["masters and moments"] * p.optimizer_state_offload
    what += ["activations"] * config.gpu.cpu_offload_activations
    sent = f"a rank sends {in_units(down)} down and {in_units(up)} up"
    return [f"{'PCIe':<9} {'copies':<14} {'; '.join(what)}; {sent}"]
