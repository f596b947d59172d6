# SPDX-License-Identifier: Apache-2.0
"""Work out what a rank holds from step to step, without ranks and without that memory.

That is: parameters by name and shape, their buckets, the bytes of weights, gradients and optimizer
state. estimate/buffers.py and estimate/activations.py work out what comes and goes in a
step, estimate/traffic.py what is sent.
"""

from collections.abc import Mapping
from functools import lru_cache
from math import prod

from estimate.few_layers import parameters_of
from estimate.model_profile import ModelProvider, ParameterProfile
from estimate.pipeline_stages import rank_stages
from mpu.grid import DATA, Grid
from mpu.optim.interface import full_matrix_groups, rules_of, state_bytes
from mpu.zero import bucket_layout
from mpu.zero.bucket_layout import BucketLayout, Sharing, sharing_of
from training.config import Config
from training.layer_options import accumulate_dtype
from training.update_rules import optimizer_groups

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
    return parameters_of(config, provider, stages, pp_rank)


def count(parameters: Shapes) -> int:
    """Return the number of elements in these parameters."""
    return sum(prod(shape) for shape in parameters.values())


def accumulate_bytes(config: Config) -> int:
    """Return the bytes of one element of a master, a moment or a sum of gradients."""
    return accumulate_dtype(config).itemsize


def gradient_bytes(config: Config) -> int:
    """Return the bytes of one element of a main gradient, a rank's sum over micro-batches."""
    return 2 if config.parallel.main_grads_dtype == "bf16" else accumulate_bytes(config)


def sharing(config: Config) -> dict[str, Sharing]:
    """Return which ranks share a bucket, by the axis that cuts its parameters, as the grid does."""
    p, ep = config.parallel, config.expert_model_parallel_size
    stage = p.world_size // p.pipeline_model_parallel_size
    sizes = {"tp": p.gradient_ranks, "ep": stage // ep if ep else 1}
    copies = p.num_distributed_optimizer_instances
    return {cut: sharing_of(cut, sizes[cut], max(1, sizes[cut] // copies), p.zero) for cut in DATA}


def places(grid: Grid) -> dict[str, int]:
    """Return a rank's place among those that share a bucket, by the axis that cuts it."""
    return {cut: grid.data(cut).shard.rank for cut in DATA}


def share(config: Config) -> str:
    """Return, in words, which share of its state a rank keeps."""
    shared = sharing(config)
    experts = f", of experts 1/{shared['ep'].shard}" if config.expert_model_parallel_size else ""
    return f"1/{shared['tp'].shard}{experts}"


def level(config: Config) -> int:
    """Return the highest ZeRO stage in effect: 0 where no ranks share a bucket."""
    return max(shared.zero_stage for shared in sharing(config).values())


def flats(
    config: Config, provider: ModelProvider, pp_rank: int = 0, frozen: bool = False
) -> list[BucketLayout]:
    """Return a pipeline rank's parameters laid out in buckets, as ParamAndGradBuffer.attach does.

    Without --ddp-bucket-size the rank with most parameters sets the size of all buckets. frozen:
    put frozen parameters into buckets of their own, as a run does; else they count as trained.
    """
    entries = [
        each.entry.as_frozen() if frozen and each.frozen else each.entry
        for each in parameters(config, provider, pp_rank).values()
    ]
    size = config.parallel.ddp_bucket_size or bucket_layout.automatic_size(
        largest(config, provider)
    )
    return bucket_layout.make_buckets(entries, size, sharing(config))


@lru_cache(maxsize=16)
def largest(config: Config, provider: ModelProvider) -> int:
    """Return the elements of the pipeline rank that has most parameters."""
    ranks = range(config.parallel.pipeline_model_parallel_size)
    of_ranks = [parameters(config, provider, rank).values() for rank in ranks]
    return max(sum(each.entry.numel for each in own) for own in of_ranks)


def state(
    config: Config, flats: list[BucketLayout], ranks: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return the bytes of parameters, gradients, masters and moments that a rank keeps.

    moments: the optimizer's own state, of whatever kinds. ranks: as bucket_layout.memory takes
    them. Host memory is included; masters there are separate from the weights whatever their dtype.
    """
    size, acc = config.run.dtype.itemsize, accumulate_bytes(config)
    groups = optimizer_groups(config)
    each = state_bytes(groups, accumulate_dtype(config))
    per_kind = bucket_layout.memory(
        flats,
        size,
        gradient_bytes(config),
        acc,
        state=each,
        ranks=ranks,
        separate=full_matrix_groups(groups),
    )
    if offloaded(config):
        per_kind["masters"] = sum(flat.own for flat in flats) * acc
    return per_kind


def state_names(config: Config) -> str:
    """Return the optimizer's kinds of state as words: "AdamW's two"."""
    words = {0: "none", 1: "one", 2: "two", 3: "three"}
    rules = rules_of(optimizer_groups(config))
    counts = [(rule.name, len(rule.kinds)) for rule in rules]
    return ", ".join(f"{name}'s {words.get(count, count)}" for name, count in counts)


def norm_bytes(flats: list[BucketLayout]) -> int:
    """Return the bytes by which the global norm finds each block of a rank's parameters: an index
    and whether it counts here (Optimizer._norm).
    """
    return sum(flat.length for flat in flats) // bucket_layout.BLOCK * NORM_BYTES


def offloaded(config: Config) -> bool:
    """Return whether optimizer state lies in another memory than the weights."""
    return config.parallel.optimizer_cpu_offload and config.parallel.device != "cpu"


def moved_state(
    config: Config, flats: list[BucketLayout], ranks: Mapping[str, int] | None = None
) -> int:
    """Return the bytes of masters and moments that --optimizer-state-offload moves each way."""
    if not config.parallel.optimizer_state_offload:
        return 0
    per_kind = state(config, flats, ranks)
    return per_kind["masters"] + per_kind["moments"]


def host_traffic(
    config: Config, flats: list[BucketLayout], ranks: Mapping[str, int] | None = None
) -> tuple[int, int]:
    """Return the bytes that an update sends to host memory, and those that it brings from there.

    ranks: as bucket_layout.memory takes them. They are the state, or with --optimizer-cpu-offload
    gradients down and weights up.
    """
    if config.parallel.device == "cpu":
        return 0, 0
    if offloaded(config):
        own = sum(flat.own for flat in flats)
        return own * accumulate_bytes(config), own * config.run.dtype.itemsize
    moved = moved_state(config, flats, ranks)
    return moved, moved


def host_bytes(config: Config, flats: list[BucketLayout]) -> int:
    """Return the bytes that the optimizer keeps in host memory.

    With --optimizer-cpu-offload they are a gradient, a master and the optimizer's state of the
    owned part, and, where weights are narrower, the weights to be copied to the device; with
    --optimizer-state-offload masters and state.
    """
    if not offloaded(config):
        return host_traffic(config, flats)[0]
    acc, size = accumulate_bytes(config), config.run.dtype.itemsize
    own = sum(flat.own for flat in flats)
    return state(config, flats)["moments"] + own * (2 * acc + (size if size < acc else 0))
