# SPDX-License-Identifier: Apache-2.0
"""Report what a run would do before it starts: layout, memory, work, traffic.

It works for any WORLD_SIZE: the model is built and run on meta tensors, and no process group and no
device is touched. The tokenizer's file is read where --vocab-size is left out and the file is here.
"""

import os
from collections.abc import Sequence

from estimate import (
    activations,
    buffers,
    context_parallel,
    matrices,
    pipeline_stages,
    rank_memory,
    traffic,
)
from estimate.activations import ActivationPeak
from estimate.buffers import SUMS, UPDATE, Moment
from estimate.fit import fit_lines
from estimate.model_profile import ModelProvider, grid_of, model_profile, whole_model
from estimate.obeyed_flags import check_flags
from estimate.rank_memory import Shapes
from estimate.traffic import SMALL, Traffic
from mpu.grid import Grid
from mpu.pipeline.schedules import Action
from training import batch_size, param_groups
from training.arguments import ParallelConfig
from training.config import Config
from training.data.tokenizer import tokenizer_for
from training.flags.megatron import DIFFERENCES
from training.layer_options import main_grads_dtype
from training.stages import tokens_at

NO_VOCABULARY = (
    "parameters, memory, FLOPs and traffic: they depend on the vocabulary, and no file of a "
    "tokenizer is here; give --vocab-size"
)
REHEARSAL = (
    "--rehearse in place of --dry-run runs a rank's steps on a device without memory: each launch "
    "and each byte, the peak of memory, the predicted time, and mistakes by file and line"
)
STATE = ("parameters", "gradients", "masters", "moments")  # persistent from step to step
NOTHING = Moment("", {})
PERSISTENT = (*STATE, "norm's index", "workspaces")  # on the device
GPU_OVERHEAD = "CUDA, NCCL and allocator overhead come"


def report(config: Config, provider: ModelProvider) -> str:
    """Return the report of --dry-run. In a pipeline it details the rank that needs most memory."""
    config = with_vocabulary(config)
    sections = [("Layout", _layout(config))]
    if config.model.vocab_size is None:
        sections += [("Batch", _batch(config)), ("Not known", [NO_VOCABULARY])]
    else:
        check_flags(config, provider)
        matrices.check(config, provider)
        sections += _of_the_model(config, provider)
    sections += [
        ("Rehearsal", [REHEARSAL]),
        ("Notes on the flags", list(config.notes)),
        ("Differs from Megatron-LM", _differences(config)),
    ]
    return "\n\n".join(
        "\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections if lines
    )


def with_vocabulary(config: Config) -> Config:
    """Return a config with the vocabulary's size, where it is given or its tokenizer is here."""
    model = config.data.tokenizer_model
    if config.model.vocab_size is None and model and os.path.exists(model):
        return config.with_vocab(tokenizer_for(config).vocab_size)
    return config


def _differences(config: Config) -> list[str]:
    """Return the differences that the given flags touch, and how many others there are."""
    lines = [f"{d.title}: {d.there}; here {d.here}" for d in DIFFERENCES if d.touches(config.given)]
    rest = len(DIFFERENCES) - len(lines)
    return [*lines, f"{rest} more of flags that are not given: docs/flags.md"]


def _of_the_model(config: Config, provider: ModelProvider) -> list[tuple[str, list[str]]]:
    """Return the sections that depend on the model's shapes."""
    size = config.parallel.pipeline_model_parallel_size
    shapes = [rank_memory.shapes(config, provider, rank) for rank in range(size)]
    peaks = activations.peaks(config, provider)
    kinds = [memory(config, provider, rank, peaks[rank]) for rank in range(size)]
    fullest = max(range(size), key=lambda rank: sum(kinds[rank].values()))
    start = max(at_start(config, provider, rank, own) for rank, own in enumerate(kinds))
    rank = f"pipeline rank {fullest}, the fullest" if size > 1 else "one rank"
    return [
        ("Pipeline", pipeline_stages.lines(config, provider)),
        ("Memory of each pipeline rank", _ranks(shapes, peaks, kinds)),
        (f"Parameters of {rank}", _parameters(config, provider, shapes[fullest])),
        (f"Memory of {rank}", _memory(config, provider, peaks, kinds[fullest], fullest, start)),
        ("Parameter groups", _groups(config, provider)),
        ("Optimizer", matrices.lines(config, provider)),
        ("Batch", _batch(config)),
        ("Work", _work(config, model_profile(config, provider).flops)),
        (
            f"Traffic of one step{f', {rank}' if size > 1 else ''}",
            [
                *_traffic(traffic.traffic(config, provider, fullest)),
                *_host_traffic(config, provider, fullest),
            ],
        ),
    ]


def _groups(config: Config, provider: ModelProvider) -> list[str]:
    """Return what trains and with which factors, and what is not counted of what is frozen."""
    params = dict(whole_model(config, provider).named_parameters())
    lines = param_groups.lines(params)
    if all(param.requires_grad for param in params.values()):
        return lines
    return [
        *lines,
        "what is frozen has no gradients, masters and moments above; all other memory, work, "
        "traffic and time here are those of a run that trains it too: the run takes less",
    ]


def memory(
    config: Config,
    provider: ModelProvider,
    pp_rank: int,
    peak: ActivationPeak,
    grid: Grid | None = None,
) -> dict[str, int]:
    """Return the bytes of each kind on the device of a pipeline rank, in the report's order.

    grid: the rank's; None: of the rank there that needs most, as owners of matrices differ.
    """
    return fullest(step_memory(config, provider, pp_rank, peak, grid)).kinds


def fullest(step: Sequence[Moment]) -> Moment:
    """Return the moment of a step that needs most, of which the report has the bytes."""
    return max(step, key=lambda moment: moment.total)


def step_memory(
    config: Config,
    provider: ModelProvider,
    pp_rank: int,
    peak: ActivationPeak,
    grid: Grid | None = None,
) -> list[Moment]:
    """Return the bytes of each kind on the device at the fullest moment of each action of a step,
    in the actions' order, and in the sums and the update that follow.

    pp_rank, peak, grid: as `memory` takes them, whose answer is the fullest of these.
    """
    fullest = dict[Action | str, Moment]()
    for moment in _moments(config, provider, pp_rank, peak, grid):
        if moment.total > fullest.get(moment.action, NOTHING).total:
            fullest[moment.action] = moment
    order = [*(each.action for each in peak.actions), SUMS, UPDATE]
    return [fullest[action] for action in order if action in fullest]


def _moments(
    config: Config,
    provider: ModelProvider,
    pp_rank: int,
    peak: ActivationPeak,
    grid: Grid | None,
) -> list[Moment]:
    """Return the moments of a step that may be the fullest of an action, of the sums, or of the
    update.
    """
    flats = rank_memory.flats(config, provider, pp_rank)
    ranks = None if grid is None else rank_memory.places(grid)
    kept = rank_memory.flats(config, provider, pp_rank, frozen=True)
    kinds = rank_memory.state(config, kept, ranks)
    kinds |= {"norm's index": rank_memory.norm_bytes(flats)}
    kinds |= buffers.transient(config, provider, pp_rank)
    if rank_memory.offloaded(config):
        kinds |= {"masters": 0, "moments": 0}
    activation_kinds = {"activations": peak.activations, "logits": peak.logits}
    kinds |= activation_kinds | {"working memory": peak.working}
    kinds |= {"workspaces": buffers.matmul_workspaces(config)}
    if config.gpu.cpu_offload_activations:
        kinds["offloaded"] = peak.under_way
    moved = rank_memory.moved_state(config, flats, ranks)
    if moved:  # on a CPU its second place is in the same memory
        kinds |= {"masters": 0, "moments": 0} if config.parallel.device != "cpu" else {}
        kinds["fetched state"] = 0
    if config.parallel.pipeline_model_parallel_size == 1:
        own = buffers.moments(config, provider, peak, ranks)
    else:
        own = buffers.pipeline_peaks(config, provider, pp_rank, peak)
        own += buffers.pipeline_moments(config, provider, pp_rank, peak, ranks)
    found = [Moment(action, kinds | now) for action, now in own]
    moving = 0  # an offloaded update has its matrices in host memory
    if not rank_memory.offloaded(config):
        moving = matrices.memory(config, provider, pp_rank, grid)
    released = dict.fromkeys(kinds.keys() - {*STATE, "norm's index", "workspaces"}, 0)
    in_update = {"matrices": moving, "fetched state": moved} if moving or moved else {}
    found.append(Moment(UPDATE, kinds | released | in_update))
    released = dict.fromkeys({*kinds} & {*activation_kinds, "working memory", "offloaded"}, 0)
    up = {"fetched state": moved} if moved else {}
    summed = buffers.after_backward(config, provider, pp_rank, kinds["tied look-ups"])
    return found + [Moment(SUMS, kinds | released | up | now) for now in summed]


def at_start(config: Config, provider: ModelProvider, pp_rank: int, kinds: dict[str, int]) -> int:
    """Return the bytes of a pipeline rank on a GPU before the first message; else 0.

    They are what persists of `kinds`, and `scratch`.
    """
    if config.parallel.pipeline_model_parallel_size == 1 or config.parallel.device == "cpu":
        return 0
    return sum(kinds.get(kind, 0) for kind in PERSISTENT) + scratch(config, provider, pp_rank)


def scratch(config: Config, provider: ModelProvider, pp_rank: int) -> int:
    """Return the bytes with which training/run/warm_up.py runs each chunk of a rank: a micro-batch
    of one chunk, or two that overlap, and weights and gradients as large as the largest.
    """
    parameters = rank_memory.parameters(config, provider, pp_rank).values()
    each = config.run.dtype.itemsize + main_grads_dtype(config).itemsize
    chunks = activations.profile(config, provider, pp_rank).stages
    micro_batch = max(max(c.in_f, c.in_b, c.for_w + c.in_w) + c.under_way for c in chunks)
    if config.parallel.overlap_moe_expert_parallel_comm:
        pairs = zip(chunks, (chunks[-1], *chunks), strict=False)  # a forward, the backward before
        micro_batch = max(micro_batch, *(activations.in_turns(f, b) for f, b in pairs))
    return each * max(param.entry.numel for param in parameters) + micro_batch


BUCKETS = ("grad sum", "update", "gather", "exchange")  # purposes whose transfers have many sizes


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
        lines.insert(1, f"ranks count along the axes in the order {p.rank_order}, fastest first")
    if cp > 1:
        lines.insert(-1, f"context-parallel group of rank 0: {_few(grid.cp.ranks)}")
        lines += context_parallel.lines(config)
    if pp > 1:
        lines.append(f"pipeline group of rank 0: {_few(grid.pp.ranks)}")
    return lines


def _few(ranks: Sequence[int]) -> str:
    names = [str(r) for r in ranks]
    return ", ".join(names if len(names) <= 9 else [*names[:4], "...", names[-1]])


def _parameters(config: Config, provider: ModelProvider, parameters: Shapes) -> list[str]:
    """Return one line a name and shape, a count where layers share it, and the totals."""
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
        f"{rank_memory.count(parameters):,} on a rank, "
        f"{model_profile(config, provider).parameters:,} in all",
        f"vocabulary {m.vocab_size:,}, padded to {padded:,}; the padding is masked out of the loss",
    ]


def _ranks(
    shapes: list[Shapes], peaks: list[ActivationPeak], kinds: list[dict[str, int]]
) -> list[str]:
    """Return a line for each rank of a pipeline; "for B", "for W": activations stored for those."""
    if len(shapes) == 1:
        return []
    columns = ("parameters", "state", "buffers", "activations", "for B", "for W", "logits", "total")
    rows: list[tuple[str, ...]] = [("rank", *columns)]
    for rank, (parameters, h, kind) in enumerate(zip(shapes, peaks, kinds, strict=True)):
        state = sum(kind[k] for k in STATE)
        rest = sum(kind.values()) - state - h.activations - h.logits
        sizes = (state, rest, h.activations, h.for_b, h.for_w, h.logits, sum(kind.values()))
        rows.append((str(rank), f"{rank_memory.count(parameters):,}", *map(in_units, sizes)))
    return aligned(rows)


def _memory(
    config: Config,
    provider: ModelProvider,
    peaks: list[ActivationPeak],
    kinds: dict[str, int],
    rank: int,
    start: int,
) -> list[str]:
    """Return one line a kind of memory, the total, and advice where it does not fit a GPU.

    start: the most bytes of any rank before its first step.
    """
    p, dtype = config.parallel, str(config.run.dtype).removeprefix("torch.")
    acc = "fp64" if dtype == "float64" else "fp32"
    remarks = {
        "parameters": dtype,
        "gradients": "bf16" if p.main_grads_dtype == "bf16" else acc,
        "masters": "fp32"
        if rank_memory.accumulate_bytes(config) > config.run.dtype.itemsize
        else "",
        "moments": rank_memory.state_names(config),
        "norm's index": "where each block of a parameter lies among all ranks' parts",
        "whole gradients": "during a part of a step, until they are summed",
        "gathered weights": "during a part of a step",
        "tied look-ups": "gradient of a tied embedding's look-ups, until it is added to the rest",
        "activations": f"recomputed: {p.recompute_granularity or 'none'}; one micro-batch",
        "logits": "one micro-batch; their gradient takes the same memory",
        "offloaded": "activations being copied to or from host memory: two units",
        "working memory": "one operation's gathered inputs, partial sums and weight gradient",
        "fetched state": "masters and moments that are on the device at that moment",
        "workspaces": "cuBLAS's, on Hopper or later; less before",
        "sums of gradients": "narrow gradients sent to their owners, and one owner's sum",
        "matrices": "in the update: sent to their owners, and their updates sent back",
    }
    remarks["masters"] = remarks["masters"] or "none: the parameters take their place"
    flats = rank_memory.flats(config, provider, rank)
    if rank_memory.offloaded(config):
        remarks |= {"masters": "in host memory", "moments": "in host memory"}
    elif rank_memory.host_bytes(config, flats):
        remarks["moments"] += ", in host memory"
        remarks["masters"] += ", in host memory" * bool(remarks["masters"] == "fp32")
    for kind in shared_kinds(config):
        remarks[kind] += f", a share of {rank_memory.share(config)}"
    if rank_memory.level(config) == 1 and p.main_grads_dtype == "bf16":
        remarks["gradients"] += f", and fp32 sums of a share of {rank_memory.share(config)}"
    if rank_memory.level(config) >= 2:
        remarks["gradients"] = remarks["gradients"].replace("bf16", "fp32")
    if p.pipeline_model_parallel_size > 1:
        remarks["activations"] = (
            f"recomputed: {p.recompute_granularity or 'none'}; all that {p.schedule} has in flight"
        )
        remarks["logits"] = "all waiting micro-batches; the gradient of one takes the same memory"
        remarks["gathered weights"] = "all stages of the rank, from a step's first use to its last"
    total = sum(kinds.values())
    lines = [
        f"{kind:<16} {in_units(value):>10}  {remarks[kind]}"
        for kind, value in kinds.items()
        if value or kind in STATE or kind in ("activations", "logits")
    ]
    more = "what Python and torch need comes" if p.device == "cpu" else GPU_OVERHEAD
    lines.append(f"{'total':<16} {in_units(total):>10}  {more} on top")
    if start:
        lines.append(
            f"{'at the start':<16} {in_units(start):>10}  of the rank that needs most then: before "
            "the first message each chunk runs once, on weights of zeros"
        )
    host, what = rank_memory.host_bytes(config, flats), "masters and moments, pinned"
    if rank_memory.offloaded(config):
        host += matrices.memory(config, provider, rank)
        what = "masters, moments and staging buffers"
    if host:
        lines.append(f"{'in host memory':<16} {in_units(host):>10}  {what}")
    if offloaded := peaks[rank].in_host:
        lines.append(
            f"{'in host memory':<16} {in_units(offloaded):>10}  offloaded activations, pinned"
        )
    lines.append(
        "counted as in Korthikanti et al. 2022 (arXiv:2205.05198), for the operations of this model"
    )

    def peak(other: Config, same: bool) -> int:
        """Return the bytes of the rank that needs most; it takes seconds to trace activations."""
        of_ranks = peaks if same else activations.peaks(other, provider)
        found = [memory(other, provider, r, own) for r, own in enumerate(of_ranks)]
        starts = (at_start(other, provider, r, kinds) for r, kinds in enumerate(found))
        return max(*starts, *(sum(kinds.values()) for kinds in found))

    return lines + fit_lines(config, max(total, start), peak, in_units)


def shared_kinds(config: Config) -> list[str]:
    """Return the kinds of memory that the ZeRO stage shards; no masters where there are none."""
    zero, acc = rank_memory.level(config), rank_memory.accumulate_bytes(config)
    since = {"moments": 1, "masters": 1, "gradients": 2, "parameters": 3}
    own = [] if acc > config.run.dtype.itemsize else ["masters"]
    return [kind for kind, first in since.items() if zero >= first and kind not in own]


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
        lines.append(f"all else on this page is of the stages on rows of {s:,}, the longest")
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
    """Return a line for each axis, verb and size; buckets are one line, and so are small sums."""
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


def _host_traffic(config: Config, provider: ModelProvider, rank: int) -> list[str]:
    """Return the line of what the optimizer sends between the device and its host, if anything."""
    down, up = rank_memory.host_traffic(config, rank_memory.flats(config, provider, rank))
    if not down:
        return []
    what = "gradients down, weights up" if rank_memory.offloaded(config) else "masters and moments"
    sent = f"a rank sends {in_units(down)} down and {in_units(up)} up"
    return [f"{'PCIe':<9} {'copies':<14} {what}; {sent}"]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of a table with their columns aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.rjust, row, widths)) for row in rows]


def in_units(value: float) -> str:
    """Return bytes as text in decimal units, as memory and networks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.4g} {unit}"
        value /= 1000
    return f"{value:.4g} TB"
