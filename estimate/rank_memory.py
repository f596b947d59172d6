# SPDX-License-Identifier: Apache-2.0
"""A rank's parameters, and how the flags share them, before anything is built."""

from collections.abc import Mapping

from estimate.model_profile import ModelProvider, ParameterProfile, rank_parameters
from estimate.pipeline_stages import rank_stages
from mpu.grid import DATA
from mpu.zero import bucket_layout
from mpu.zero.bucket_layout import BucketLayout, Sharing, sharing_of
from training.config import Config


def parameters(
    config: Config, provider: ModelProvider, pp_rank: int = 0
) -> Mapping[str, ParameterProfile]:
    """Return the parameters of a pipeline rank by name."""
    return rank_parameters(config, provider, rank_stages(config, provider, pp_rank), pp_rank)


def sharing(config: Config) -> dict[str, Sharing]:
    """Return which ranks share a bucket, by the axis that cuts its parameters, as the grid does."""
    p, ep = config.parallel, config.expert_model_parallel_size
    stage = p.world_size // p.pipeline_model_parallel_size
    sizes = {"tp": p.gradient_ranks, "ep": stage // ep if ep else 1}
    copies = p.num_distributed_optimizer_instances
    return {cut: sharing_of(cut, sizes[cut], max(1, sizes[cut] // copies), p.zero) for cut in DATA}


def level(config: Config) -> int:
    """Return the highest ZeRO stage in effect: 0 where no ranks share a bucket."""
    return max(shared.zero_stage for shared in sharing(config).values())


def trained(config: Config, provider: ModelProvider, pp_rank: int = 0) -> list[BucketLayout]:
    """Return the buckets of what trains on a pipeline rank, as a run makes them.

    Without --ddp-bucket-size the rank with most parameters sets the size of all buckets.
    """
    ranks = range(config.parallel.pipeline_model_parallel_size)
    every = [parameters(config, provider, rank).values() for rank in ranks]
    largest = max(sum(each.entry.numel for each in own) for own in every)
    size = config.parallel.ddp_bucket_size or bucket_layout.automatic_size(largest)
    entries = [each.entry for each in every[pp_rank] if not each.frozen]
    return bucket_layout.make_buckets(entries, size, sharing(config))
