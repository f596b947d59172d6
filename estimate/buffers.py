# SPDX-License-Identifier: Apache-2.0
"""Work out what a step allocates and frees on top of what a rank keeps, at ZeRO stages 2 and 3.

An unsharded gradient lives until its owner has the sum, a gathered weight while it is used. The
order in which a step uses the blocks gives both the gathers and how much is unsharded at once.

    stage 3    acquire(block i): free the others, gather block i and, a block ahead, block i + 1
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby, pairwise

from estimate import activations, rank_memory
from estimate.model_profile import ModelProvider
from estimate.rank_memory import accumulate_bytes, gradient_bytes, level, moved_state
from mpu.zero.bucket_layout import BucketLayout, block_of
from training.config import Config
from training.pipeline_schedule import micro_batch_counts

# bytes of cuBLAS's workspace for a thread's handle and a stream, from Hopper on; before it 8.1 MiB
# (pytorch aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize)
CUBLAS_WORKSPACE = 4096 * 8 * 1024


def transient(config: Config, provider: ModelProvider, pp_rank: int = 0) -> dict[str, int]:
    """Return the most bytes that a step allocates at one moment, by kind.

    whole gradients: at ZeRO stages 2 and 3 all buckets, as they leave after the last micro-batch.
    With --overlap-grad-reduce and one micro-batch a step, or with --zero-reduce-each-microbatch:
    the buckets that backward has begun and not ended, and the one being sent. Buckets summed over
    a second axis are unsharded from the first gradient to the last, and so are tied embeddings with
    both ends on this rank.
    gathered weights: at stage 3 the block in use, with --overlap-param-gather the next one too; in
    a pipeline all of a rank's stages.
    tied look-ups: at every stage, the look-ups' own gradient where both ends are on this rank.
    """
    flats = rank_memory.flats(config, provider, pp_rank)
    size, named = gradient_bytes(config), rank_memory.parameters(config, provider, pp_rank)
    lookups = sum(named[name].entry.numel for name in both_ends(config, provider, pp_rank))
    return {
        "whole gradients": _unsharded_gradients(config, provider, flats, pp_rank) * size,
        "gathered weights": _gathered(config, provider, flats),
        "tied look-ups": lookups * size,
    }


def sums(config: Config, flats: Sequence[BucketLayout]) -> int:
    """Return what the sums of gradients take on GPUs where all leave after backward: what travels
    in another dtype than its sum, what comes of it, and one owner's sum as it is made.

    A sum in the dtype that travels takes nothing (mpu/comm/collectives.py, reduce_scatter).
    """
    p, size = config.parallel, gradient_bytes(config)
    if p.device == "cpu" or p.overlap_grad_reduce:
        return 0
    wire = 2 if p.grad_reduce_in_bf16 else size
    came, made = 0, [0]
    for flat in flats:
        share, stage = flat.sharing.shard, flat.sharing.zero_stage
        if share > 1 and wire != (accumulate_bytes(config) if stage else size):
            came += flat.length * wire * (1 + (wire < size))
            made.append(flat.length // share * accumulate_bytes(config))
    return came + max(made)


def matmul_workspaces(config: Config) -> int:
    """Return the bytes of cuBLAS's workspaces: one for the host thread that runs forward, and one
    for autograd's.
    """
    return 0 if config.parallel.device == "cpu" else 2 * CUBLAS_WORKSPACE


def both_ends(config: Config, provider: ModelProvider, pp_rank: int = 0) -> list[str]:
    """Return the names of embeddings whose weight is also the output layer's, both on this rank."""
    named = rank_memory.parameters(config, provider, pp_rank)
    several = [name for name, param in named.items() if param.holders > 1]
    if not several:
        return []
    looked_up = activations.profile(config, provider, pp_rank).looked_up
    return [name for name in several if name in looked_up]


def moments(
    config: Config, provider: ModelProvider, peak: activations.ActivationPeak
) -> list[dict[str, int]]:
    """Return what lives at moments of a step without a pipeline, of the kinds that change in it.

    The moments are the head's backward, when all activations and the logits are there, those of the
    last two layers, of the first one, and of the embedding: whole gradients, gathered weights, tied
    look-ups, activations and logits are not all at their fullest at one of them. Between the
    layers all of these change evenly. Below ZeRO stage 2 only the look-ups come late: the moments
    are the step's fullest one without them, and the embedding's backward.
    """
    flats, layers = rank_memory.flats(config, provider), config.model.num_layers
    size, named = gradient_bytes(config), rank_memory.parameters(config, provider)
    lookups = sum(named[name].entry.numel for name in both_ends(config, provider)) * size
    # look-ups of one micro-batch live on in the next one's backward, unless sums go after each
    late = config.parallel.zero_reduce_each_microbatch or max(micro_batch_counts(config)) == 1
    sums, moves = level(config) >= 2, config.parallel.optimizer_state_offload
    if not (sums or moves) and not (lookups and late):
        return [{}]
    sharded = {
        name: (n, flat.rows or flat.length * config.run.dtype.itemsize)
        for n, flat in enumerate(flats) if flat.by_use for name, _, _ in flat.params
    }  # fmt: skip
    walk, found = _walk(config, provider, flats, 0), dict[str, dict[str, int]]()
    begin = next((at for at, (name, _) in enumerate(walk) if block_of(name)), len(walk))
    live_bytes = activations.profile(config, provider).live_bytes
    come = _fetched(config, flats, [name for name, _ in walk[-len(live_bytes) :]])
    for at, (name, numel) in enumerate(walk):
        if at >= len(
            live_bytes
        ):  # a sum has a place of its own before it is added to the last one's
            numel += numel // config.parallel.shard_size
        block = block_of(name)
        if block:
            number = int(block.rpartition(".")[2])
            where = {layers - 1: "last", layers - 2: "second", 0: "first"}.get(number, "")
        else:  # at the head of a micro-batch's list, or at its end
            head = at % len(live_bytes) < begin
            number, where = (layers - 1, "head") if head else (-1, "embedding")
        if not where or not (sums or moves or where == "embedding"):
            continue
        now = {
            "whole gradients": numel * size,
            "gathered weights": _together(config, sharded, [n for n, _ in walk[at:]]),
            "tied look-ups": lookups * (where == "embedding" or not late),
        }
        if moves:  # the last micro-batch's backward brings it
            last = at >= len(walk) - len(live_bytes)
            now["fetched state"] = come[at % len(live_bytes)] if last else 0
        now |= _parts(
            live_bytes[at % len(live_bytes)], peak, (number + 1) / layers, where == "head"
        )
        if sum(now.values()) >= sum(found.get(where, {}).values()):
            found[where] = now
    return [*([] if sums else [{"tied look-ups": 0}]), *found.values()]


def _fetched(config: Config, flats: list[BucketLayout], names: Sequence[str]) -> list[int]:
    """Return the bytes of masters and moments on the device while each gradient of a micro-batch
    is made: a bucket's come when its last gradient is there, or that of the bucket before it
    (mpu/optim/state_offload.py).
    """
    last = {name: at for at, name in enumerate(names)}
    come = [0] * (len(names) + 1)
    before = len(names)
    for flat in flats:
        ready = max((last.get(name, len(names)) for name, _, _ in flat.params), default=0)
        come[min(ready + 1, before + 1, len(names))] += moved_state(config, [flat])
        before = ready
    return [*accumulate(come)]


def _parts(
    live_bytes: int, peak: activations.ActivationPeak, share: float, head: bool
) -> dict[str, int]:
    """Divide the live bytes among kinds. share: of the layers whose B has not run."""
    parts = {"logits": min(peak.logits, live_bytes) if head else 0}
    parts["activations"] = min(int(peak.activations * share), live_bytes - parts["logits"])
    parts["offloaded"] = min(peak.under_way, live_bytes - sum(parts.values()))
    return parts | {"working memory": live_bytes - sum(parts.values())}


def _together(config: Config, sharded: Mapping[str, tuple[int, int]], names: Sequence[str]) -> int:
    """Return the bytes of gathered weights while the first of these names' gradients are made."""
    if level(config) < 3:
        return 0
    buckets = list(dict.fromkeys(sharded[name] for name in names if name in sharded))
    return sum(nbytes for _, nbytes in buckets[: 1 + config.parallel.overlap_param_gather])


def _unsharded_gradients(
    config: Config, provider: ModelProvider, flats: list[BucketLayout], pp_rank: int
) -> int:
    """Return the elements of unsharded gradients at the peak of a step."""
    if level(config) < 2:
        return 0
    return max(numel for _, numel in _walk(config, provider, flats, pp_rank))


def _walk(
    config: Config, provider: ModelProvider, flats: list[BucketLayout], pp_rank: int
) -> list[tuple[str, int]]:
    """Return the parameters in the order of their gradients, each with the elements of the
    unsharded gradients that live then.
    """
    p, count = config.parallel, max(micro_batch_counts(config))
    total = sum(map(_buffer_numel, flats))
    done = activations.profile(config, provider, pp_rank).gradients
    early = p.overlap_grad_reduce or p.zero_reduce_each_microbatch
    if not early or (count > 1 and not p.zero_reduce_each_microbatch):
        return [(name, total) for name in done] or [("", total)]
    each = p.zero_reduce_each_microbatch
    short = [flat for flat in flats if not flat.axes and (not each or _buffer_numel(flat))]
    bucket_of = {name: i for i, flat in enumerate(short) for name, _, _ in flat.params}
    # the last bucket of a micro-batch is still being sent while the next one's backward begins
    passes = 2 if p.zero_reduce_each_microbatch and count > 1 else 1
    order = [
        (name, n * len(short) + bucket_of[name] if name in bucket_of else -1)
        for n in range(passes) for name in done
    ]  # fmt: skip
    last = {bucket: at for at, (_, bucket) in enumerate(order) if bucket >= 0}
    for name in bucket_of.keys() - set(done):  # plain autograd: known at the end of the step
        for n in range(passes):
            last.pop(n * len(short) + bucket_of[name], None)
    in_use: set[int] = set()
    steps, following = list[tuple[str, int]](), 0
    second_axis = sum(_buffer_numel(flat) for flat in flats if flat.axes)
    for at, (name, bucket) in enumerate(order):
        in_use |= {bucket} if bucket >= 0 else set()
        steps.append(
            (name, second_axis + sum(_buffer_numel(short[i % len(short)]) for i in in_use))
        )
        while last.get(following, at + 1) <= at:  # a bucket leaves; its owner has the one before
            in_use.discard(following - 1 if p.overlap_grad_reduce else following)
            following += 1
    return steps or [("", second_axis)]


def _buffer_numel(flat: BucketLayout) -> int:
    """Return the elements of a bucket's unsharded gradients, if a step allocates them."""
    return flat.length if flat.sharing.zero_stage >= 2 else 0


def _gathered(config: Config, provider: ModelProvider, flats: list[BucketLayout]) -> int:
    """Return the bytes of gathered weights at the fullest moment of a step."""
    size = config.run.dtype.itemsize
    sharded = [flat.rows or flat.length * size for flat in flats if flat.by_use]
    if level(config) < 3:
        return 0
    if config.parallel.pipeline_model_parallel_size > 1:
        return sum(sharded)
    order = [sharded[i] for i in uses(config, provider, flats)]
    if config.parallel.overlap_param_gather:
        return max(map(sum, pairwise(order)), default=sum(order))
    return max(order)


def uses(config: Config, provider: ModelProvider, flats: list[BucketLayout]) -> list[int]:
    """Return the sharded buckets' numbers in the order in which one micro-batch uses them.

    Without a pipeline: forward, backward, and forward once more where layers are recomputed.
    """
    shared = [flat for flat in flats if flat.by_use]
    bucket_of = {name: i for i, flat in enumerate(shared) for name, _, _ in flat.params}
    used = activations.profile(config, provider).uses
    return [i for i, _ in groupby(bucket_of[name] for name in used if name in bucket_of)]


def gathers(
    config: Config, provider: ModelProvider, flats: list[BucketLayout], micro_batches: int
) -> list[int]:
    """Return the elements of every gather of weights in one step at ZeRO stage 3."""
    return [flat.length for flat in gathered(config, provider, flats, micro_batches)]


def gathered(
    config: Config, provider: ModelProvider, flats: list[BucketLayout], micro_batches: int
) -> list[BucketLayout]:
    """Return the bucket of every gather of weights in one step at ZeRO stage 3.

    The step is not the first: the order of uses is known from the step before.
    """
    shared = [flat for flat in flats if flat.by_use]
    if config.parallel.pipeline_model_parallel_size > 1:
        return shared
    order = [i for i, _ in groupby(uses(config, provider, flats) * micro_batches)]
    unsharded: set[int] = set()
    out: list[BucketLayout] = []
    for here, following in zip(order, [*order[1:], order[-1]], strict=True):
        wanted = {here, following} if config.parallel.overlap_param_gather else {here}
        out += [shared[i] for i in wanted - unsharded]
        unsharded = wanted
    return out
