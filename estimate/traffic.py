# SPDX-License-Identifier: Apache-2.0
"""Work out what one rank sends in a step: each collective and message, its bytes, and by whom.

This is the one list of a step's traffic: the dry run, `make explain`, the planner's bytes over each
link, the rehearsal and fork-check read it. It is exact: tests hold it to what a trace counts.

    model's     measured: the model runs a micro-batch on meta tensors (estimate/rank_profile.py),
                so that a collective of a fork, whatever its axis, is in the list
    messages    from the pipeline's stages
    gradients, weights, scales, norms    from the layout of the buckets, as mpu/zero sends them
    sums of losses, the agreement        a few numbers

Bytes are those of the best algorithm (sent_bytes in mpu/comm/transport.py). Left out is what is not
in every step: checks of replicas, evaluation, saves, start-up.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from estimate import activations, buffers, matrices, rank_memory
from estimate.model_profile import ModelProvider, grid_of
from estimate.pipeline_stages import rank_stages
from estimate.rank_profile import RankProfile
from mpu.grid import Grid
from mpu.zero.bucket_layout import BLOCK, BucketLayout
from training import batch_size
from training.config import Config
from training.data.loss_mask import is_masked
from training.pipeline_schedule import own_stages, schedule_of

SMALL = ("norm", "loss sum", "agreement")  # purposes that send a few numbers
Totals = dict[tuple[str, str], tuple[int, int]]  # (axis, verb) -> collectives, bytes sent


@dataclass(frozen=True)
class Traffic:
    """Collectives or messages of one kind in a step.

    axis: as the grid names it. verb: as a trace names it. who, purpose: as in the label of the call
    (mpu/comm/transport.py): the layer, "*" for its number, the bucket or the message; "forward",
    "backward", "wgrad", "message", "grad sum", "gather", "update", "float8 scales", "amaxes",
    "counts", "exchange", "max logits" or one of SMALL. times: how many. bytes: of each whole
    tensor, about where they differ. sent: bytes that leave this rank, all times together, exactly.
    size: ranks of the axis. peer: of a message, the other rank's place on pp.
    """

    axis: str
    verb: str
    who: str
    purpose: str
    times: int
    bytes: int
    sent: int
    size: int
    peer: int = -1


def sent_of(verb: str, total: int, size: int) -> int:
    """Return the bytes that one rank sends in a collective of a full tensor of so many bytes."""
    if verb == "receive":
        return 0
    if verb == "all_gather":
        return total // size * (size - 1)
    if verb == "all_reduce":
        return 2 * total * (size - 1) // size
    return total * (size - 1) // size if verb in ("reduce_scatter", "all_to_all") else total


def totals(rows: Iterable[Traffic]) -> Totals:
    """Return collectives and bytes sent, by axis and verb."""
    found: Totals = {}
    for row in rows:
        times, sent = found.get((row.axis, row.verb), (0, 0))
        found[row.axis, row.verb] = times + row.times, sent + row.sent
    return found


def traffic(
    config: Config, provider: ModelProvider, pp_rank: int = 0, grid: Grid | None = None
) -> list[Traffic]:
    """Return what a rank sends in a step that is not the first one.

    grid: the rank's; None: the first one's at pp_rank. Others there send as much, but as owners of
    matrices.
    """
    grid = grid or grid_of(config, pp_rank)
    found = activations.profile(config, provider, pp_rank)
    rows = [
        *_model(config, grid, found),
        *_messages(config, grid, found, pp_rank),
        *_extra(config, grid, rank_memory.flats(config, provider, pp_rank)),
        *_amaxes(grid, found),
        *_loads(config, grid, found),
        *_max_logits(config, provider, grid, pp_rank),
        *_data(config, provider, grid, pp_rank),
        *_norms(config, provider, grid, pp_rank),
        *_ends(config, grid, found),
    ]
    return [row for row in rows if row.size > 1 and row.times]


def _row(
    grid: Grid, axis: str, verb: str, label: tuple[str, str], nbytes: int, times: int = 1
) -> Traffic:
    """Return a row of equal collectives. label: who, purpose. nbytes: of each full tensor."""
    size, (who, purpose) = getattr(grid, axis).size, label
    sent = times * sent_of(verb, nbytes, size)
    return Traffic(
        axis, verb, who, purpose, times=times, bytes=nbytes, sent=sent, size=size
    )


def _model(config: Config, grid: Grid, found: RankProfile) -> Iterator[Traffic]:
    """Yield the model's own collectives: each micro-batch repeats them.

    Where only some micro-batches defer the output layer's weight gradient, only these have its W.
    """
    schedule = schedule_of(config, batch_size.micro_batches(config, 0))
    times = dict.fromkeys("FB", schedule.micro_batches)
    times["W"] = schedule.micro_batches if schedule.split else schedule.deferred
    every = Counter(each for stage in found.stages for each in stage.collectives)
    for each, count in every.items():
        n, size = count * times[each.phase], getattr(grid, each.axis).size
        yield Traffic(
            each.axis, each.verb, each.who, each.purpose,
            times=n, bytes=each.bytes, sent=n * each.sent, size=size,
        )  # fmt: skip


def _messages(
    config: Config, grid: Grid, found: RankProfile, pp_rank: int
) -> Iterator[Traffic]:
    """Yield the outputs of stages, to the next one's rank, and the gradients, to the one before."""
    steps = batch_size.micro_batches(config, 0)
    holder = {s: r for r in range(grid.pp.size) for s in own_stages(config, r)}
    for stage in own_stages(config, pp_rank):
        for step, what, other in ((1, "activation", "gradient"), (-1, "gradient", "activation")):
            peer = holder.get(stage + step, pp_rank)
            if peer == pp_rank:
                continue
            nbytes = found.stages[0].message
            ways = (("send", what, pp_rank < peer), ("receive", other, peer < pp_rank))
            for verb, name, up in ways:
                axis, sent = "pp" if up else "pp_back", steps * nbytes * (verb == "send")
                yield Traffic(
                    axis, verb, name, "message",
                    times=steps, bytes=nbytes, sent=sent, size=grid.pp.size, peer=peer,
                )  # fmt: skip


def _extra(config: Config, grid: Grid, flats: Sequence[BucketLayout]) -> Iterator[Traffic]:
    """Yield the sums of gradients over extra axes, whole buckets at a time: norms under sequence
    parallelism over tp, tied embeddings over embd (mpu/comm/collectives.py, all_reduce_in_order).
    """
    item = rank_memory.gradient_bytes(config)
    for n, flat in enumerate(flats):
        for name in flat.axes:
            yield from _sum(config, grid, name, (f"bucket {n}", "grad sum"), flat.length * item)


def _sum(
    config: Config, grid: Grid, axis: str, label: tuple[str, str], nbytes: int, item: int = 0
) -> Iterator[Traffic]:
    """Yield an all-reduce: on a CPU a reduce-scatter, which adds in rank order, and a gather.

    nbytes: of a bucket's gradients, or of numbers of `item` bytes. It is padded to a multiple of
    the ranks.
    """
    size, item = getattr(grid, axis).size, item or rank_memory.gradient_bytes(config)
    if config.parallel.device != "cpu":
        yield _row(grid, axis, "all_reduce", label, nbytes)
        return
    padded = -(-nbytes // (size * item)) * size * item
    for verb in ("reduce_scatter", "all_gather"):
        yield _row(grid, axis, verb, label, padded)


def _amaxes(grid: Grid, found: RankProfile) -> Iterator[Traffic]:
    """Yield the maxima of delayed scales, on which ranks of tp and of dp_cp agree once a step."""
    for axis in ("tp", "dp_cp") if found.amaxes else ():
        yield _row(grid, axis, "all_reduce", ("float8", "amaxes"), found.amaxes)


def _loads(config: Config, grid: Grid, found: RankProfile) -> Iterator[Traffic]:
    """Yield the sum of the tokens of experts over the stage, once a step."""
    sp = ("tp",) * config.parallel.sequence_parallel
    for axis in (*sp, "dp_cp") if found.loads else ():
        yield from _sum(config, grid, axis, ("experts", "counts"), found.loads, item=8)


def _max_logits(
    config: Config, provider: ModelProvider, grid: Grid, pp_rank: int
) -> Iterator[Traffic]:
    """Yield the largest attention logits, of each head, and with QK-clip of each shared group."""
    clips, label = config.optimizer.qk_clip, ("core_attention", "max logits")
    if not clips and not config.log.log_max_attention_logit:
        return
    layers = sum(len(stage.layers) for stage in rank_stages(config, provider, pp_rank))
    heads = config.model.num_attention_heads // config.parallel.tensor_model_parallel_size
    item = rank_memory.accumulate_bytes(config)
    for axis, count in (("dp_cp", heads), ("tp_kv", 1))[: 2 if clips else 1]:
        if layers:
            yield _row(grid, axis, "all_reduce", label, layers * count * item)


def _data(
    config: Config, provider: ModelProvider, grid: Grid, pp_rank: int
) -> Iterator[Traffic]:
    """Yield what a rank sends over the ranks that share its buckets (mpu/zero/reduce.py).

    Gradients are summed once a step or, with --zero-reduce-each-microbatch, once a micro-batch.
    Updated weights are gathered once a step; at stage 3 blocks are gathered when a micro-batch uses
    them, in a pipeline once a step.
    """
    p, steps = config.parallel, batch_size.micro_batches(config, 0)
    acc, main = rank_memory.accumulate_bytes(config), rank_memory.gradient_bytes(config)
    wire = 2 if p.grad_reduce_in_bf16 else main
    weight, several = config.run.dtype.itemsize, p.num_distributed_optimizer_instances > 1
    flats = rank_memory.flats(config, provider, pp_rank)
    for n, flat in enumerate(flats):
        sharing, who = flat.sharing, f"bucket {n}"
        shard = f"{sharing.data}_shard" if several else sharing.data
        each = p.zero_reduce_each_microbatch and sharing.zero_stage > 1
        times = steps if each and not flat.axes else 1
        stage, own = sharing.zero_stage, flat.length // sharing.shard
        item = acc if stage else main  # of a sum: at stage 0 it lies where the gradient does
        if not stage and not several and p.device != "cpu" and wire == main:
            yield _row(grid, shard, "all_reduce", (who, "grad sum"), flat.length * main)
            continue
        # NCCL sums in no other dtype than it sends, so the parts are exchanged and added after
        verb = "all_to_all" if p.device != "cpu" and wire != item else "reduce_scatter"
        yield _row(grid, shard, verb, (who, "grad sum"), flat.length * wire, times)
        if several:
            for verb in ("reduce_scatter", "all_gather"):
                yield _row(grid, f"{sharing.data}_replicate", verb, (who, "grad sum"), own * item)
        if not stage:
            yield _row(grid, shard, "all_gather", (who, "grad sum"), flat.length * item)
        elif not flat.by_use:
            purpose = "gather" if flat.scales else "update"
            yield _row(grid, shard, "all_gather", (who, purpose), flat.wire(weight))
    used = buffers.gathered(config, provider, flats, steps) if rank_memory.level(config) > 2 else []
    numbers = {flat: n for n, flat in enumerate(flats)}
    for flat, times in Counter(used).items():
        shard = f"{flat.sharing.data}_shard" if several else flat.sharing.data
        who = f"bucket {numbers[flat]}"
        yield _row(grid, shard, "all_gather", (who, "gather"), flat.wire(weight), times)
    yield from _scales(config, provider, grid, flats, pp_rank)
    yield from _exchanges(config, provider, grid, pp_rank)


def _scales(
    config: Config, provider: ModelProvider, grid: Grid, flats: Sequence[BucketLayout], pp_rank: int
) -> Iterator[Traffic]:
    """Yield the scales of weights that travel in float8 (mpu/zero/float8_gather.py)."""
    named = rank_memory.parameters(config, provider, pp_rank)
    several = config.parallel.num_distributed_optimizer_instances > 1
    for sharing in dict.fromkeys(flat.sharing for flat in flats if flat.scales):
        same_group = [flat for flat in flats if flat.scales and flat.sharing == sharing]
        shard = f"{sharing.data}_shard" if several else sharing.data
        entries = [named[name].entry for flat in same_group for name, _, _ in flat.params]
        for axis, count in (
            (shard, sum(entry.scales for entry in entries)),
            (sharing.cut, sum(entry.scales for entry in entries if entry.agreed)),
        ):
            if count:
                yield _row(grid, axis, "all_reduce", ("optimizer", "float8 scales"), count)


def _exchanges(
    config: Config, provider: ModelProvider, grid: Grid, pp_rank: int
) -> Iterator[Traffic]:
    """Yield what an optimizer of full matrices sends to owners, and back: uneven all-to-alls."""
    for found in matrices.exchanges(config, provider, pp_rank, grid):
        size = getattr(grid, found.axis).size
        yield Traffic(
            found.axis, "all_to_all", f"bucket {found.bucket}", "exchange",
            times=1, bytes=found.bytes, sent=found.sent, size=size,
        )  # fmt: skip


def _norms(
    config: Config, provider: ModelProvider, grid: Grid, pp_rank: int
) -> Iterator[Traffic]:
    """Yield the squares of the global norm, in fp64 (mpu/zero/norm.py): of blocks, of a rank's
    parameters, of the whole model's. --log-params-norm takes that of the parameters too.
    """
    times = 1 + config.log.log_params_norm
    flats = rank_memory.flats(config, provider, pp_rank)
    several = config.parallel.num_distributed_optimizer_instances > 1
    named = [rank_memory.parameters(config, provider, rank) for rank in range(grid.pp.size)]
    counted = [{name: p.entry.cut for name, p in own.items() if p.first} for own in named]
    for sharing in dict.fromkeys(flat.sharing for flat in flats):
        blocks = sum(flat.length for flat in flats if flat.sharing == sharing) // BLOCK
        if sharing.zero_stage:
            shard = f"{sharing.data}_shard" if several else sharing.data
            yield _row(grid, shard, "all_gather", ("blocks", "norm"), 8 * blocks, times)
        own = sum(cut == sharing.cut for cut in counted[pp_rank].values())
        total = 8 * own * getattr(grid, sharing.cut).size
        yield _row(grid, sharing.cut, "all_gather", ("parameters", "norm"), total, times)
    every = len(set().union(*counted))
    yield _row(grid, "pp", "all_gather", ("the model", "norm"), 8 * every * grid.pp.size, times)


def _ends(config: Config, grid: Grid, found: RankProfile) -> Iterator[Traffic]:
    """Yield the sums of losses, tokens and auxiliary losses, and the flags on which ranks agree."""
    for axis in found.auxiliary:
        nbytes = 8 * getattr(grid, axis).size
        yield _row(grid, axis, "all_gather", ("auxiliary_loss", "loss sum"), nbytes)
    if is_masked(config):
        nbytes = 8 * grid.dp_cp.size
        yield _row(grid, "dp_cp", "all_gather", ("token count", "loss sum"), nbytes)
    for axis in ("dp_cp", "pp"):
        total = 3 * 8 * getattr(grid, axis).size
        yield _row(grid, axis, "all_gather", ("losses", "loss sum"), total)
    flags = 3 + (config.fault.on_spike is not None)
    yield _row(grid, "world", "all_reduce", ("go on?", "agreement"), 4 * flags)
