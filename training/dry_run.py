# SPDX-License-Identifier: Apache-2.0
"""Say what a run would do before it starts: layout, memory, work, traffic. For any WORLD_SIZE.

Everything is arithmetic on the Config; no process group, no device, no file is touched.
"""

from torch import nn

from training import batch_schedule, estimate
from training.config import Config
from training.estimate import Shapes
from training.megatron_flags import DIFFERENCES

GPU_BYTES = 80e9  # of an H100 or A100


def report(config: Config, module: nn.Module | None = None) -> str:
    """Return the report of --dry-run.

    `module` is the model of one rank, built on the meta device: its own shapes are then counted
    instead of those worked out from the flags, as a fork's model may differ.
    """
    if module is None:
        parameters = estimate.shapes(config)
    else:
        parameters = {name: tuple(p.shape) for name, p in module.named_parameters()}
    sections = [
        ("Layout", _layout(config)),
        ("Parameters of one rank", _parameters(config, parameters)),
        ("Memory of one rank", _memory(config, parameters)),
        ("Batch", _batch(config)),
        ("Work", _work(config)),
        ("Traffic of one step", _traffic(config, parameters)),
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
    t, dp = p.tensor_model_parallel_size, p.data_parallel_size
    sp = "on" if p.sequence_parallel else "off"
    return [
        f"TP {t} x CP 1 x DP {dp} x PP 1 = {p.world_size} ranks; sequence parallelism {sp}",
        f"tensor-parallel group of rank 0: {_few(range(t))}",
        f"data-parallel group of rank 0: {_few(range(0, p.world_size, t))}",
    ]


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


def _memory(config: Config, parameters: Shapes) -> list[str]:
    kinds = estimate.memory(config, parameters)
    p, dtype = config.parallel, str(config.run.dtype).removeprefix("torch.")
    told = {
        "parameters": dtype,
        "gradients": "fp64" if dtype == "float64" else "fp32",
        "masters": "fp32" if kinds["masters"] else "none: the parameters are their own",
        "moments": "AdamW's two",
        "activations": f"recomputed: {p.recompute_granularity or 'none'}; one micro-batch",
        "logits": "one micro-batch; their gradient takes the same memory",
    }
    total = sum(kinds.values())
    state = sum(kinds[k] for k in ("masters", "moments"))
    lines = [f"{kind:<12} {_bytes(value):>10}  {told[kind]}" for kind, value in kinds.items()]
    lines.append(f"{'total':<12} {_bytes(total):>10}  buffers of collectives and kernels on top")
    lines.append(
        "counted as in Korthikanti et al. 2022 (arXiv:2205.05198), for the operations of this Llama"
    )
    if total > GPU_BYTES:
        sharded = total - state + state // p.data_parallel_size
        lines.append(
            f"does NOT fit a GPU of {_bytes(GPU_BYTES)}; with masters and moments sharded over the "
            f"{p.data_parallel_size} data-parallel ranks (not in this version): {_bytes(sharded)}"
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


def _traffic(config: Config, parameters: Shapes) -> list[str]:
    lines = [
        f"{t.axis:<3} {t.verb:<15} {t.times:>7,} of {_bytes(t.bytes):>9}; a rank sends "
        f"{_bytes(t.sent)}"
        for t in estimate.traffic(config, parameters)
    ]
    return lines or ["none: one rank"]


def _bytes(value: float) -> str:
    """Write bytes in decimal units, as memory and networks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.4g} {unit}"
        value /= 1000
    return f"{value:.4g} TB"
