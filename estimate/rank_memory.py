# SPDX-License-Identifier: Apache-2.0
"""Work out what a rank holds from step to step, without ranks and without that memory.

That is: parameters by name and shape, their buckets, the bytes of weights, gradients and optimizer
state. estimate/buffers.py and estimate/activations.py work out what comes and goes in a
step, estimate/traffic.py what is sent.
"""

from math import prod

from estimate.model_profile import (
    ModelProvider,
    ParameterProfile,
    accumulate_dtype,
    rank_parameters,
)
from estimate.stages import rank_stages
from mpu.optim.interface import rules_of, state_bytes
from mpu.zero import layout
from mpu.zero.layout import BucketLayout
from training.config import Config
from training.optimizer import optimizer_groups

NORM_BYTES = 9  # of a block: int64 and bool
Shapes = dict[str, tuple[int, ...]]


def shapes(config: Config, provider: ModelProvider, pp_rank: int = 0) -> Shapes:
    """Return the local shapes of a pipeline rank's parameters, by name."""
    return {name: p.shape for name, p in parameters(config, provider, pp_rank).items()}


def parameters(
    config: Config, provider: ModelProvider, pp_rank: int = 0
) -> dict[str, ParameterProfile]:
    """Return the parameters of a pipeline rank by name."""
    stages = rank_stages(config, provider, pp_rank)
    return rank_parameters(config, provider, stages, pp_rank)


def count(parameters: Shapes) -> int:
    """Return the number of elements in these parameters."""
    return sum(prod(shape) for shape in parameters.values())


def accumulate_bytes(config: Config) -> int:
    """Return the bytes of one element of a master, a moment or a sum of gradients."""
    return accumulate_dtype(config).itemsize


def gradient_bytes(config: Config) -> int:
    """Return the bytes of one element of a main gradient, a rank's sum over micro-batches."""
    return 2 if config.parallel.main_grads_dtype == "bf16" else accumulate_bytes(config)


def level(config: Config) -> int:
    """Return the ZeRO stage in effect: 0 where a group of sharding ranks has one rank."""
    return config.parallel.zero if config.parallel.shard_size > 1 else 0


def flats(config: Config, provider: ModelProvider, pp_rank: int = 0) -> list[BucketLayout]:
    """Return a pipeline rank's parameters laid out in buckets, as ParamAndGradBuffer.attach does.

    Without --ddp-bucket-size the rank with most parameters sets the size of all buckets.
    """
    p = config.parallel
    held = [
        [each.entry for each in parameters(config, provider, rank).values()]
        for rank in range(p.pipeline_model_parallel_size)
    ]
    largest = max(sum(entry.numel for entry in entries) for entries in held)
    size = p.ddp_bucket_size or layout.automatic_size(largest)
    return layout.make_buckets(held[pp_rank], size, p.gradient_ranks, level(config))


def state(config: Config, flats: list[BucketLayout], rank: int | None = None) -> dict[str, int]:
    """Return the bytes of parameters, gradients, masters and moments that a rank keeps.

    moments: the optimizer's own state, of whatever kinds. rank: of those that share it; None: the
    one with most. Host memory is included; masters there are separate from the weights whatever
    their dtype.
    """
    size, p = config.run.dtype.itemsize, config.parallel
    acc = accumulate_bytes(config)
    shared = level(config) or min(p.zero, 1)  # a single rank still keeps owner's sums
    each = state_bytes(optimizer_groups(config), accumulate_dtype(config))
    kept = layout.memory(flats, shared, p.shard_size, size, gradient_bytes(config), acc, each, rank)
    if offloaded(config):
        kept["masters"] = _own(config, flats) * acc
    return kept


def _own(config: Config, flats: list[BucketLayout]) -> int:
    """Return the elements whose masters and state a rank keeps."""
    return sum(flat.length for flat in flats) // config.parallel.shard_size


def state_names(config: Config) -> str:
    """Return the optimizer's kinds of state as words: "AdamW's two"."""
    count = ("no state", "one", "two", "three", "four")
    rules = rules_of(optimizer_groups(config))
    return ", ".join(f"{rule.name}'s {count[len(rule.kinds)]}" for rule in rules)


def norm_bytes(flats: list[BucketLayout]) -> int:
    """Return the bytes by which the global norm finds each block of a rank's parameters: an index
    and whether it counts here (Optimizer._norm).
    """
    return sum(flat.length for flat in flats) // layout.BLOCK * NORM_BYTES


def offloaded(config: Config) -> bool:
    """Return whether optimizer state lies in another memory than the weights."""
    return config.parallel.optimizer_cpu_offload and config.parallel.device != "cpu"


def host_bytes(config: Config, flats: list[BucketLayout]) -> int:
    """Return the bytes that --optimizer-cpu-offload keeps in host memory.

    They are a gradient, a master and the optimizer's state of the owned part, and, where weights
    are narrower, the weights to be copied to the device.
    """
    if not offloaded(config):
        return 0
    acc, size = accumulate_bytes(config), config.run.dtype.itemsize
    moments = state(config, flats)["moments"]
    return moments + _own(config, flats) * (2 * acc + (size if size < acc else 0))
