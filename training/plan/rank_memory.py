# SPDX-License-Identifier: Apache-2.0
"""Work out what a rank holds from step to step: no ranks, no memory.

Parameters by name and shape, the buckets they lie in, the bytes of weights, gradients and optimizer
state. What comes and goes in a step is in training/plan/buffers.py and
training/plan/activations.py, what is sent in training/plan/traffic.py.
"""

from math import prod

from mpu.zero import layout
from mpu.zero.layout import BucketLayout
from training.config import Config
from training.plan import pipeline
from training.plan.model_profile import (
    ModelProvider,
    ParameterProfile,
    accumulate_dtype,
    rank_parameters,
)

Shapes = dict[str, tuple[int, ...]]


def shapes(config: Config, provider: ModelProvider, pp_rank: int = 0) -> Shapes:
    """Return the shapes of what a pipeline rank holds of its parameters, by name."""
    return {name: p.shape for name, p in parameters(config, provider, pp_rank).items()}


def parameters(
    config: Config, provider: ModelProvider, pp_rank: int = 0
) -> dict[str, ParameterProfile]:
    """Return the parameters of a pipeline rank by name."""
    stages = pipeline.rank_stages(config, provider, pp_rank)
    return rank_parameters(config, provider, stages, pp_rank)


def count(parameters: Shapes) -> int:
    """Count the numbers in these parameters."""
    return sum(prod(shape) for shape in parameters.values())


def accumulate_bytes(config: Config) -> int:
    """Return the bytes of a gradient, master or moment."""
    return accumulate_dtype(config).itemsize


def gradient_bytes(config: Config) -> int:
    """Return the bytes of a main gradient, where a rank adds up its micro-batches."""
    return 2 if config.parallel.main_grads_dtype == "bf16" else accumulate_bytes(config)


def level(config: Config) -> int:
    """Return the ZeRO level in effect: a rank that shares with no one keeps everything."""
    return config.parallel.zero if config.parallel.shard_size > 1 else 0


def flats(config: Config, provider: ModelProvider, pp_rank: int = 0) -> list[BucketLayout]:
    """Lay the parameters of a pipeline rank out in buckets, as ParamAndGradBuffer.attach does.

    Without --ddp-bucket-size the rank with most parameters sets the size for all.
    """
    p = config.parallel
    held = [
        [each.entry for each in parameters(config, provider, rank).values()]
        for rank in range(p.pipeline_model_parallel_size)
    ]
    largest = max(sum(entry.numel for entry in entries) for entries in held)
    size = p.ddp_bucket_size or layout.automatic_size(largest)
    by_block = level(config) == 3
    return layout.make_buckets(held[pp_rank], size, p.data_parallel_size, by_block=by_block)


def state(config: Config, flats: list[BucketLayout]) -> dict[str, int]:
    """Return the bytes of parameters, gradients, masters and moments that a rank keeps, wherever
    these lie: masters in host memory are apart from the weights, whatever the dtype of these."""
    size, p = config.run.dtype.itemsize, config.parallel
    acc = accumulate_bytes(config)
    shared = level(config) or min(p.zero, 1)  # alone, an owner's sums are of all
    kept = layout.memory(flats, shared, p.shard_size, size, gradient_bytes(config), acc)
    if offloaded(config):
        kept["masters"] = kept["moments"] // 2
    return kept


def offloaded(config: Config) -> bool:
    """True where optimizer state lies in another memory than the weights."""
    return config.parallel.optimizer_cpu_offload and config.parallel.device != "cpu"


def host_bytes(config: Config, flats: list[BucketLayout]) -> int:
    """Return the bytes in host memory of what --optimizer-cpu-offload keeps there.

    Of the owned part a gradient, a master and two moments, and where weights are narrower the
    weights that go up.
    """
    if not offloaded(config):
        return 0
    acc, size, p = accumulate_bytes(config), config.run.dtype.itemsize, config.parallel
    own = sum(flat.length for flat in flats) // p.shard_size
    return own * (4 * acc + (size if size < acc else 0))
