# SPDX-License-Identifier: Apache-2.0
"""Report whether a run fits a GPU and, if not, which single flag would make it fit."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from forecast.device_file import Device, DeviceFileError, read_device
from training.flags import parallel_rules, rules
from training.settings.config import Config, UsageError

OVERHEAD, POOL = 1.5e9, 0.94  # bytes of context and libraries; share of a GPU that a pool can use


def available(gpu_bytes: float) -> float:
    """Return the bytes of a GPU's memory that are available to a run."""
    return gpu_bytes * POOL - OVERHEAD


def gpu_of(config: Config) -> Device:
    """Return the GPU of --rehearse-device. Raises UsageError if it is unknown."""
    name = config.rehearse.rehearse_device
    try:
        return read_device(name)
    except (DeviceFileError, OSError) as error:
        raise UsageError(f"--rehearse-device {error}") from None


def fit_lines(
    config: Config,
    total: float,
    peak: Callable[[Config], float],
    in_units: Callable[[float], str],
) -> list[str]:
    """Return the lines of the report: that the run fits, or how much memory each measure saves.

    total: bytes of the fullest rank; peak: computes them for another config; in_units: formats
    bytes.
    """
    if config.parallel.device == "cpu":
        return []
    device = gpu_of(config)
    limit = available(device["memory"])
    gpu = f"{in_units(device['memory'])} ({in_units(limit)} available)"
    which_gpu = f"this is {device.name}; --rehearse-device chooses another GPU"
    if total <= limit:
        return [f"fits a GPU of {gpu}, with {in_units(limit - total)} to spare", which_gpu]
    rows = []
    for name, other in measures(config):
        try:
            rules.check(other)
        except UsageError:
            continue  # incompatible with this run's other flags
        if (size := peak(other)) < total:
            rows.append((size, name, f"saves {in_units(total - size)}"))
    if not rows:
        return [f"does NOT fit a GPU of {gpu}, and no single flag saves memory", which_gpu]
    enough = [size for size, _, _ in rows if size <= limit]
    which = f"{'each' if enough else 'none'} of these flags is enough by itself"
    lines = [f"does NOT fit a GPU of {gpu}: {in_units(total - limit)} too much; {which}:"]
    width = max(len(name) for _, name, _ in rows)
    for size, name, saves in rows:
        verdict = f"fits, {in_units(size)}" if size <= limit else f"{in_units(size)}, too much"
        lines.append(f"  {name:<{width}}  {saves}: {verdict}")
    if enough and len(enough) < len(rows):
        lines[0] = lines[0].replace("each of these flags is enough", "each flag")
    lines.append(which_gpu)
    if config.parallel.gradient_ranks == 1:
        lines.append("  with one data-parallel rank --zero-stage shards nothing")
    return lines


def measures(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield (flags, the config with them) for each memory-saving option that is not in use."""
    p, b, g = config.parallel, config.batch, config.gpu
    over = f" (over {p.gradient_ranks} {parallel_rules.sharers(config)})"
    for stage in range(p.zero + 1, 4) if p.gradient_ranks > 1 else ():
        yield f"--zero-stage {stage}{over}", replace(config, parallel=replace(p, zero_stage=stage))
    if p.recompute_granularity is None:
        less = replace(p, recompute_granularity="selective")
        yield "--recompute-granularity selective", replace(config, parallel=less)
    if p.recompute_granularity != "full":
        less = replace(p, recompute_granularity="full", recompute_method="uniform",
                       recompute_num_layers=1)  # fmt: skip
        yield "--recompute-granularity full", replace(config, parallel=less)
    if config.float8.fp8_format and not config.float8.no_fp8_weight_cache and p.zero < 3:
        less8 = replace(config.float8, no_fp8_weight_cache=True)
        yield "--no-fp8-weight-cache", replace(config, float8=less8)
    if not p.fused_linear_cross_entropy:
        less = replace(p, fused_linear_cross_entropy=True)
        yield "--fused-linear-cross-entropy", replace(config, parallel=less)
    if not p.optimizer_cpu_offload and not p.optimizer_state_offload:
        less = replace(p, optimizer_state_offload=True)
        yield "--optimizer-state-offload", replace(config, parallel=less)
    if not p.optimizer_cpu_offload:
        less = replace(p, optimizer_cpu_offload=True, optimizer_state_offload=False)
        yield "--optimizer-cpu-offload", replace(config, parallel=less)
    if not g.cpu_offload_activations:
        more = replace(g, cpu_offload_activations=True)
        yield "--cpu-offload-activations", replace(config, gpu=more)
    if b.micro_batch_size > 1:
        yield "--micro-batch-size 1", replace(config, batch=replace(b, micro_batch_size=1))
