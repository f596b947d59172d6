# SPDX-License-Identifier: Apache-2.0
"""Work out what a step allocates and frees on top of what a rank keeps, at ZeRO levels 2 and 3.

Whole gradients live until their sum is with its owner, gathered weights while they are used. The
order in which a step uses the blocks gives both the gathers and how much is whole at once.

    level 3    take(block i): free the others, gather block i and, a block ahead, block i + 1
"""

from itertools import groupby, pairwise

from mpu.zero.layout import BucketLayout
from training.config import Config
from training.plan import activations, pipeline, rank_memory
from training.plan.model_profile import ModelProvider
from training.plan.rank_memory import gradient_bytes, level


def transient(config: Config, provider: ModelProvider, pp_rank: int = 0) -> dict[str, int]:
    """Return the most bytes of each kind that a step allocates at one moment.

    whole gradients: at levels 2 and 3 those of all buckets where they leave together, after the
    last micro-batch; with --overlap-grad-reduce and one micro-batch a step, or with
    --zero-reduce-each-microbatch, those that backward has begun and not ended, and the one on its
    way. Buckets that are summed over another axis too are whole from the first gradient to the
    last, and so are tied embeddings with both ends on this rank.
    gathered weights: at level 3 the block in use, and with --overlap-param-gather the next one; in
    a pipeline all of a rank's stages.
    tied look-ups: at every level such tied embeddings keep the look-ups' gradient apart.
    """
    flats = rank_memory.flats(config, provider, pp_rank)
    size, named = gradient_bytes(config), rank_memory.parameters(config, provider, pp_rank)
    lookups = sum(named[name].entry.numel for name in both_ends(config, provider, pp_rank))
    return {
        "whole gradients": _whole_gradients(config, provider, flats, pp_rank) * size,
        "gathered weights": _gathered(config, provider, flats) * config.run.dtype.itemsize,
        "tied look-ups": lookups * size,
    }


def both_ends(config: Config, provider: ModelProvider, pp_rank: int = 0) -> list[str]:
    """Name the parameters of which rows are looked up and which another layer has a use for too, on
    this rank: an embedding whose weight is also the output layer's."""
    named = rank_memory.parameters(config, provider, pp_rank)
    several = [name for name, param in named.items() if param.holders > 1]
    if not several:
        return []
    looked_up = activations.profile(config, provider, pp_rank).looked_up
    return [name for name in several if name in looked_up]


def _whole_gradients(
    config: Config, provider: ModelProvider, flats: list[BucketLayout], pp_rank: int
) -> int:
    """Count the elements of gradient buffers at the fullest moment of a step."""
    p, count = config.parallel, max(pipeline.micro_batch_counts(config))
    if level(config) < 2:
        return 0
    total = sum(flat.length for flat in flats)
    early = p.overlap_grad_reduce or p.zero_reduce_each_microbatch
    if not early or (count > 1 and not p.zero_reduce_each_microbatch):
        return total
    short = [flat for flat in flats if not flat.axes]
    bucket_of = {name: i for i, flat in enumerate(short) for name, _, _ in flat.params}
    done = activations.profile(config, provider, pp_rank).gradients
    order = [bucket_of[name] for name in done if name in bucket_of]
    last = {bucket: at for at, bucket in enumerate(order)}
    for name in bucket_of.keys() - set(done):  # plain autograd: known at the end of the step
        last.pop(bucket_of[name], None)
    live: set[int] = set()
    fullest = following = 0
    for at, bucket in enumerate(order):
        live.add(bucket)
        fullest = max(fullest, sum(short[i].length for i in live))
        while last.get(following, at + 1) <= at:  # it leaves, and the one before is with its owner
            live.discard(following - 1 if p.overlap_grad_reduce else following)
            following += 1
    return fullest + sum(flat.length for flat in flats if flat.axes)


def _gathered(config: Config, provider: ModelProvider, flats: list[BucketLayout]) -> int:
    """Count the elements of whole weights at the fullest moment of a step."""
    sharded = [flat.length for flat in flats if not flat.axes]
    if level(config) < 3:
        return 0
    if config.parallel.pipeline_model_parallel_size > 1:
        return sum(sharded)
    order = [sharded[i] for i in uses(config, provider, flats)]
    if config.parallel.overlap_param_gather:
        return max(map(sum, pairwise(order)), default=sum(order))
    return max(order)


def uses(config: Config, provider: ModelProvider, flats: list[BucketLayout]) -> list[int]:
    """List the shared buckets in the order in which one micro-batch uses them, without a pipeline:
    forward, back, and forward once more where layers are run again."""
    shared = [flat for flat in flats if not flat.axes]
    bucket_of = {name: i for i, flat in enumerate(shared) for name, _, _ in flat.params}
    used = activations.profile(config, provider).uses
    return [i for i, _ in groupby(bucket_of[name] for name in used if name in bucket_of)]


def gathers(
    config: Config, provider: ModelProvider, flats: list[BucketLayout], micro_batches: int
) -> list[int]:
    """List the elements of every gather of shared weights in one step of level 3.

    A step whose order of uses is known from the one before.
    """
    lengths = [flat.length for flat in flats if not flat.axes]
    if config.parallel.pipeline_model_parallel_size > 1:
        return lengths
    order = [i for i, _ in groupby(uses(config, provider, flats) * micro_batches)]
    gathered: set[int] = set()
    out = []
    for here, following in zip(order, [*order[1:], order[-1]], strict=True):
        wanted = {here, following} if config.parallel.overlap_param_gather else {here}
        out += [lengths[i] for i in wanted - gathered]
        gathered = wanted
    return out
