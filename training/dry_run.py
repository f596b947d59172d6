# SPDX-License-Identifier: Apache-2.0
"""Say what a run would do before it starts: layout, memory, work, traffic. For any WORLD_SIZE.

Everything is arithmetic on the Config; no process group, no device, no file is touched.
"""

from torch import nn

from training import batch_schedule, estimate, pipeline
from training.config import Config
from training.estimate import Shapes
from training.megatron_flags import DIFFERENCES

GPU_BYTES = 80e9  # of an H100 or A100


def report(config: Config, module: nn.Module | None = None) -> str:
    """Return the report of --dry-run.

    `module` is the model of one rank, built on the meta device: its own shapes are then counted
    instead of those worked out from the flags, as a fork's model may differ. In a pipeline each
    rank has its own share, worked out from the flags, and the report is of the fullest.
    """
    size = config.parallel.pipeline_model_parallel_size
    held = estimate.held(config)
    shapes = [
        estimate.shapes(config, stages=pipeline.rank_stages(config, rank)) for rank in range(size)
    ]
    if module is not None and size == 1:
        shapes = [{name: tuple(p.shape) for name, p in module.named_parameters()}]
    kinds = [
        estimate.state(config, s) | {"activations": h.activations, "logits": h.logits}
        for s, h in zip(shapes, held, strict=True)
    ]
    fullest = max(range(size), key=lambda rank: sum(kinds[rank].values()))
    parameters = shapes[fullest]
    rank = f"pipeline rank {fullest}, the fullest" if size > 1 else "one rank"
    sections = [
        ("Layout", _layout(config)),
        ("Pipeline", pipeline.lines(config)),
        ("Memory of each pipeline rank", _ranks(shapes, held, kinds)),
        (f"Parameters of {rank}", _parameters(config, parameters)),
        (f"Memory of {rank}", _memory(config, kinds[fullest], held[fullest])),
        ("Batch", _batch(config)),
        ("Work", _work(config)),
        (
            f"Traffic of one step{f', {rank}' if size > 1 else ''}",
            _traffic(config, shapes, fullest),
        ),
        ("Said of the flags", list(config.notes)),
        (
            "Differs from Megatron-LM",
            [f"{f}: {there}; here {here}" for f, there, here in DIFFERENCES],
        ),
    ]
    return "\n\n".join(
        "\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections if lines
    )


def _layout(config: Config) -> list[str]:
    p = config.parallel
    t, dp, pp = (
        p.tensor_model_parallel_size,
        p.data_parallel_size,
        p.pipeline_model_parallel_size,
    )
    sp = "on" if p.sequence_parallel else "off"
    lines = [
        f"TP {t} x CP 1 x DP {dp} x PP {pp} = {p.world_size} ranks; sequence parallelism {sp}",
        f"tensor-parallel group of rank 0: {_few(range(t))}",
        f"data-parallel group of rank 0: {_few(range(0, t * dp, t))}",
    ]
    if pp > 1:
        lines.append(f"pipeline group of rank 0: {_few(range(0, p.world_size, t * dp))}")
    return lines


def _few(ranks: range) -> str:
    names = [str(r) for r in ranks]
    return ", ".join(names if len(names) <= 9 else [*names[:4], "...", names[-1]])


def _parameters(config: Config, parameters: Shapes) -> list[str]:
    """One line a shape: the first layer stands for all that look like it."""
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
        f"{estimate.count(parameters):,} on a rank, {estimate.total_parameters(config):,} in all",
        f"vocabulary {m.vocab_size:,}, padded to {padded:,}; the padding is masked out of the loss",
    ]


def _ranks(
    shapes: list[Shapes], held: list[estimate.Held], kinds: list[dict[str, int]]
) -> list[str]:
    """One line a rank of a pipeline; of the activations, also what waits for B's and for W's."""
    if len(shapes) == 1:
        return []
    columns = ("rank", "parameters", "state", "activations", "for B", "for W", "logits", "total")
    rows = [columns]
    for rank, (parameters, h, kind) in enumerate(zip(shapes, held, kinds, strict=True)):
        state = sum(kind[k] for k in ("parameters", "gradients", "masters", "moments"))
        sizes = (state, h.activations, h.for_b, h.for_w, h.logits, sum(kind.values()))
        rows.append((str(rank), f"{estimate.count(parameters):,}", *map(_bytes, sizes)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.rjust, row, widths)) for row in rows]


def _memory(config: Config, kinds: dict[str, int], held: estimate.Held) -> list[str]:
    p, dtype = config.parallel, str(config.run.dtype).removeprefix("torch.")
    told = {
        "parameters": dtype,
        "gradients": "fp64" if dtype == "float64" else "fp32",
        "masters": "fp32" if kinds["masters"] else "none: the parameters are their own",
        "moments": "AdamW's two",
    }
    if p.use_distributed_optimizer:
        share = f"a share of 1/{p.data_parallel_size}"
        told["moments"] += f", {share}"
        if kinds["masters"]:
            told["masters"] += f", {share}"
    told |= {
        "activations": f"recomputed: {p.recompute_granularity or 'none'}; one micro-batch",
        "logits": "one micro-batch; their gradient takes the same memory",
    }
    if p.pipeline_model_parallel_size > 1:
        told["activations"] = (
            f"recomputed: {p.recompute_granularity or 'none'}; all that {p.schedule} has in flight"
        )
        told["logits"] = "as many micro-batches as wait; the gradient of one takes the same memory"
    total = sum(kinds.values())
    state = sum(kinds[k] for k in ("masters", "moments"))
    lines = [f"{kind:<12} {_bytes(value):>10}  {told[kind]}" for kind, value in kinds.items()]
    lines.append(f"{'total':<12} {_bytes(total):>10}  buffers of collectives and kernels on top")
    lines.append(
        "counted as in Korthikanti et al. 2022 (arXiv:2205.05198), for the operations of this Llama"
    )
    if total > GPU_BYTES:
        lines.append(f"does NOT fit a GPU of {_bytes(GPU_BYTES)}")
        if p.data_parallel_size > 1 and not p.use_distributed_optimizer:
            sharded = total - state + state // p.data_parallel_size
            lines[-1] += (
                f"; with --use-distributed-optimizer, over {p.data_parallel_size} data-parallel "
                f"ranks: {_bytes(sharded)}"
            )
    return lines


def _batch(config: Config) -> list[str]:
    b, s = config.batch, config.model.seq_length
    dp = config.parallel.data_parallel_size
    lines = []
    for first, size in batch_schedule.schedule(config):
        since = f"from sample {first:,}: " if b.step_batch_size_schedule else ""
        lines.append(
            f"{since}global batch {size:,} = {b.micro_batch_size} a micro-batch x "
            f"{size // (b.micro_batch_size * dp)} micro-batches x {dp} data-parallel ranks"
            f" = {size * s:,} tokens a step"
        )
    steps, samples = batch_schedule.total_iterations(config), batch_schedule.total_samples(config)
    lines.append(f"{steps:,} steps, {samples:,} samples, {samples * s:,} tokens in all")
    return lines


def _work(config: Config) -> list[str]:
    per_token = estimate.flops_per_token(config)
    tokens = batch_schedule.global_batch_size(config, 0) * config.model.seq_length
    ranks = config.parallel.world_size
    whole = per_token * batch_schedule.total_samples(config) * config.model.seq_length
    return [
        f"{per_token:.4g} FLOPs a token = 6 x weights in matmuls + 6 L s a d (causal attention)",
        f"{per_token * tokens:.4g} FLOPs a step, {per_token * tokens / ranks:.4g} a rank",
        f"{whole:.4g} FLOPs in all; at 400 TFLOP/s a rank {_days(whole / ranks / 4e14)}",
    ]


def _days(seconds: float) -> str:
    return f"{seconds / 86400:,.1f} days" if seconds > 86400 else f"{seconds / 3600:,.2f} hours"


def _traffic(config: Config, shapes: list[Shapes], rank: int) -> list[str]:
    lines = [
        f"{t.axis:<3} {t.verb:<15} {t.times:>7,} of {_bytes(t.bytes):>9}; a rank sends "
        f"{_bytes(t.sent)}"
        for t in estimate.traffic(config, shapes[rank], rank)
    ]
    return lines or ["none: one rank"]


def _bytes(value: float) -> str:
    """Write bytes in decimal units, as memory and networks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.4g} {unit}"
        value /= 1000
    return f"{value:.4g} TB"
