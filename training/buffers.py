# SPDX-License-Identifier: Apache-2.0
"""Work out what a step allocates and frees on top of what a rank keeps, at ZeRO levels 2 and 3.

Whole gradients live until their sum is with its owner, gathered weights while they are used. The
order in which a step uses the blocks gives both the gathers and how much is whole at once.

    level 3    take(block i): free the others, gather block i and, a block ahead, block i + 1
"""

from itertools import groupby, pairwise

from mpu.zero.layout import BucketLayout
from training import pipeline
from training.config import Config
from training.estimate import gradient_bytes, level

EMBEDDING = "embedding.weight"


def transient(config: Config, flats: list[BucketLayout]) -> dict[str, int]:
    """Return the most bytes of each kind that a step allocates at one moment.

    whole gradients: at levels 2 and 3 those of all buckets where they leave together, after the
    last micro-batch; with --overlap-grad-reduce and one micro-batch a step, or with
    --zero-reduce-each-microbatch, those of one bucket and of the one on its way. Buckets that are
    summed over another axis too are whole from the first gradient to the last, and so are tied
    embeddings with both ends on this rank.
    gathered weights: at level 3 the block in use, and with --overlap-param-gather the next one; in
    a pipeline all of a rank's stages.
    tied look-ups: at every level such tied embeddings keep the look-ups' gradient apart.
    """
    tied, size = both_ends(flats), gradient_bytes(config)
    lookups = sum(n for name, _, n in tied.params if name == EMBEDDING) if tied else 0
    return {
        "whole gradients": _whole_gradients(config, flats) * size,
        "gathered weights": _gathered(config, flats) * config.run.dtype.itemsize,
        "tied look-ups": lookups * size,
    }


def both_ends(flats: list[BucketLayout]) -> BucketLayout | None:
    """Return the bucket of an embedding whose weight is the output layer's too, on this rank."""
    names = {name for flat in flats for name, _, _ in flat.params}
    if EMBEDDING not in names or "norm.weight" not in names or "head.weight" in names:
        return None
    return next(flat for flat in flats for name, _, _ in flat.params if name == EMBEDDING)


def _whole_gradients(config: Config, flats: list[BucketLayout]) -> int:
    """Count the elements of gradient buffers at the fullest moment of a step."""
    p, count = config.parallel, max(pipeline.micro_batch_counts(config))
    if level(config) < 2:
        return 0
    total = sum(flat.length for flat in flats)
    early = p.overlap_grad_reduce or p.zero_reduce_each_microbatch
    if not early or (count > 1 and not p.zero_reduce_each_microbatch):
        return total
    tied = both_ends(flats)
    long = sum(flat.length for flat in flats if flat.axes or flat is tied)
    short = [0 if flat is tied else flat.length for flat in flats if not flat.axes]
    if p.overlap_grad_reduce:
        short = [*map(sum, pairwise(short))] or short
    return long + max(short, default=0)


def _gathered(config: Config, flats: list[BucketLayout]) -> int:
    """Count the elements of whole weights at the fullest moment of a step."""
    sharded = [flat.length for flat in flats if not flat.axes]
    if level(config) < 3:
        return 0
    if config.parallel.pipeline_model_parallel_size > 1:
        return sum(sharded)
    order = [sharded[i] for i in uses(config, flats)]
    if config.parallel.overlap_param_gather:
        return max(map(sum, pairwise(order)), default=sum(order))
    return max(order)


def uses(config: Config, flats: list[BucketLayout]) -> list[int]:
    """List the shared buckets in the order in which one micro-batch uses them, without a pipeline.

    Forward from the embedding to the head, and back; a look-up needs no weight in backward. A
    recomputed group of layers runs forward once more before its backward.
    """
    p, shared = config.parallel, [flat for flat in flats if not flat.axes]
    at = {name: i for i, flat in enumerate(shared) for name, _, _ in flat.params}
    forward = list(range(len(shared) - 1, -1, -1))
    if both_ends(flats):
        forward.append(at[EMBEDDING])
    layers = {i for name, i in at.items() if name.startswith("layers.")}
    group = (p.recompute_num_layers or 1) if p.recompute_method == "uniform" else 1
    chunks: list[list[int]] = []
    for i in forward:
        before = chunks[-1] if chunks else []
        if i in layers and before and before[-1] in layers and len(before) < group:
            before.append(i)
        else:
            chunks.append([i])
    back = [i for chunk in reversed(chunks) for i in [*chunk, *reversed(chunk)]]
    if [name for name, _, _ in shared[forward[0]].params] == [EMBEDDING]:
        del back[-2:]
    return [i for i, _ in groupby(forward + back)]


def gathers(config: Config, flats: list[BucketLayout], micro_batches: int) -> list[int]:
    """List the elements of every gather of shared weights in one step of level 3.

    A step whose order of uses is known from the one before.
    """
    lengths = [flat.length for flat in flats if not flat.axes]
    if config.parallel.pipeline_model_parallel_size > 1:
        return lengths
    order = [i for i, _ in groupby(uses(config, flats) * micro_batches)]
    whole: set[int] = set()
    out = []
    for here, following in zip(order, [*order[1:], order[-1]], strict=True):
        wanted = {here, following} if config.parallel.overlap_param_gather else {here}
        out += [lengths[i] for i in wanted - whole]
        whole = wanted
    return out
