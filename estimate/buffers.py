# SPDX-License-Identifier: Apache-2.0
"""Work out what a step allocates and frees on top of what a rank keeps, at ZeRO stages 2 and 3.

An unsharded gradient lives until its owner has the sum, a gathered weight while it is used. The
order in which a step uses the blocks gives both the gathers and how much is unsharded at once.

    stage 3    acquire(block i): free the others, gather block i and, a block ahead, block i + 1
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from estimate import activations, rank_memory
from estimate.model_profile import ModelProvider
from estimate.rank_memory import accumulate_bytes, gradient_bytes, level, moved_state
from estimate.rank_profile import RankProfile
from mpu.pipeline.schedules import SPLIT, Action
from mpu.zero.bucket_layout import BucketLayout, block_of
from training.config import Config
from training.pipeline_schedule import micro_batch_counts, schedule_of

# bytes of cuBLAS's workspace for a thread's handle and a stream, from Hopper on; before it 8.1 MiB
# (pytorch aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize)
CUBLAS_WORKSPACE = 4096 * 8 * 1024
SUMS, UPDATE = "sums of gradients", "update"  # what follows a step's last action


class Moment(NamedTuple):
    """A moment of a step that may be the fullest of an action, or of SUMS or UPDATE.

    kinds: bytes by kind of memory.
    """

    action: Action | str
    kinds: dict[str, int]

    @property
    def total(self) -> int:
        """Return the bytes of all kinds."""
        return sum(self.kinds.values())


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


def after_backward(
    config: Config, provider: ModelProvider, pp_rank: int, lookups: int
) -> list[dict[str, int]]:
    """Return what sums of gradients take on GPUs when backward is over, of the kinds that change.

    sums of gradients: what travels in another dtype than its sum, what comes of it, and one owner's
    sum as it is made; a sum in the dtype that travels takes nothing (mpu/comm/collectives.py,
    reduce_scatter). A bucket's sum is made when the next bucket leaves, and where the optimizer has
    several instances a part of it is kept until all have left. lookups: bytes of tied look-ups,
    until their bucket leaves. whole gradients: all buckets, or with --overlap-grad-reduce the last
    one. gathered weights: the block that was used last (ParamAndGradBuffer.finish_grad_sync).
    """
    flats = rank_memory.flats(config, provider, pp_rank)
    size, p = gradient_bytes(config), config.parallel
    if p.device == "cpu" or not any(any(_of_sum(config, flat)) for flat in flats):
        return []
    early = p.overlap_grad_reduce and not _each(config)
    if _each(config):
        flats = [flat for flat in flats if flat.axes or not _buffer_numel(flat)]
    late = [flat for flat in flats[:-1] if flat.axes] + [*flats[-1:]] if early else flats
    tied = {*both_ends(config, provider, pp_rank)} if lookups else set()
    whole, left, used = sum(map(_buffer_numel, late)) * size, 0, 0
    # by whether the tied look-ups wait: sums and whole gradients when they take most
    waits, waiting = {True: (0, 0), False: (0, 0)}, bool(tied)
    for sent in _sums(config, flats):
        waiting = waiting and not tied & {name for name, _, _ in sent.flat.params}
        if sent.flat in late:  # the bucket before it is freed when this one has left
            after = sent.held + sent.made, whole - left
            waits[waiting] = max(waits[waiting], (sent.starts, whole), after, key=sum)
            whole, left = whole - left, _buffer_numel(sent.flat) * size
    alone = sum(map(sum, (_of_sum(config, flat) for flat in flats[-1:])))  # the others are over
    waits[False] = max(waits[False], (alone, whole), key=sum)
    if level(config) >= 3 and p.pipeline_model_parallel_size == 1:
        order = uses(config, provider, flats)
        shared = [flat for flat in flats if flat.by_use]
        last = shared[order[-1]] if order else None
        used = (last.rows or last.length * config.run.dtype.itemsize) if last else 0
    return [
        {"sums of gradients": most, "tied look-ups": lookups * now, "whole gradients": there,
         "gathered weights": used}
        for now, (most, there) in waits.items() if most
    ]  # fmt: skip


def _of_sum(config: Config, flat: BucketLayout) -> tuple[int, int, int]:
    """Return what the sum of a bucket takes on GPUs, in bytes: what travels and comes, the owner's
    sum, and what is kept of it where the optimizer has several instances.
    """
    p, size, acc = config.parallel, gradient_bytes(config), accumulate_bytes(config)
    share, stage = flat.sharing.shard, flat.sharing.zero_stage
    copies = p.num_distributed_optimizer_instances
    wire = 2 if p.grad_reduce_in_bf16 else size
    own = flat.length // share * acc
    kept = own // copies if copies > 1 else 0
    if share == 1 or wire == (acc if stage else size):
        return 0, 0, kept
    return flat.length * wire * (1 + (wire < size)), own, kept


class _Sum(NamedTuple):
    """A bucket that leaves. starts: bytes of sums as it does, that of the bucket before it among
    them. held: when that one's is over. made: its own sum, which comes on top when it is made.
    """

    flat: BucketLayout
    starts: int
    held: int
    made: int


def _sums(
    config: Config, flats: Sequence[BucketLayout], earlier: BucketLayout | None = None
) -> Iterator[_Sum]:
    """Yield the buckets as they leave, one after another, each when the one before it is made.

    earlier: what left last in the micro-batch before, and is made when the first one leaves.
    """
    kept, piece, before = 0, 0, sum(_of_sum(config, earlier)[:2]) if earlier else 0
    for flat in flats:
        came, made, part = _of_sum(config, flat)
        starts, kept = kept + before + came, kept + piece
        yield _Sum(flat, starts, kept + came, made)
        before, piece = came + made, part


def _each(config: Config) -> bool:
    """Return whether gradients are summed after each micro-batch, where ranks share any."""
    return config.parallel.zero_reduce_each_microbatch and level(config) >= 2


def _travels(config: Config, flats: Sequence[BucketLayout]) -> bool:
    """Return whether sums of gradients take memory of their own while backward goes on."""
    return _early(config) and any(any(_of_sum(config, flat)) for flat in flats)


def _early(config: Config) -> bool:
    """Return whether buckets leave while backward goes on, on GPUs."""
    p = config.parallel
    return (p.overlap_grad_reduce or _each(config)) and p.device != "cpu"


class _Now(NamedTuple):
    """What is there of buckets: elements of whole gradients, bytes of their sums, of tied look-ups,
    and of weights that are gathered no more.
    """

    whole: int
    sums: int
    lookups: int
    freed: int


def _leaving(
    config: Config, flats: Sequence[BucketLayout], names: Sequence[str], tied: Mapping[str, int]
) -> list[tuple[_Now, _Now]]:
    """Return what is there while each gradient of the last micro-batch is made, and the most as
    buckets leave when it is ready; last what is there after all of them.

    With --overlap-grad-reduce a bucket leaves when its last gradient is there and the bucket before
    it has left; that one's sum is made then. Else, with --zero-reduce-each-microbatch, it is made
    at once. tied: the bytes of each look-up that waits for its bucket to leave. A bucket's weights
    are gathered until its last gradient is there.
    """
    p, size = config.parallel, config.run.dtype.itemsize
    whole, at = sum(map(_buffer_numel, flats)), {name: k for k, name in enumerate(names)}
    never, each, lookups = len(names), _each(config), sum(tied.values())

    def ready_at(flat: BucketLayout) -> int:
        return max(at.get(name, never) for name, _, _ in flat.params)

    def gathered_bytes(flat: BucketLayout) -> int:
        return (flat.rows or flat.length * size) if flat.by_use else 0

    if not _early(config):
        ends = [(ready_at(flat), gathered_bytes(flat)) for flat in flats if flat.by_use]
        freed_at = [sum(n for end, n in ends if end < k) for k in range(len(names) + 1)]
        return [(now, now) for now in (_Now(whole, 0, lookups, n) for n in freed_at)]
    waiting = [flat for flat in flats if not flat.axes and (not each or _buffer_numel(flat))]
    found, now, left, freed = list[tuple[_Now, _Now]](), 0, 0, 0
    earlier = None
    if each and p.overlap_grad_reduce and max(micro_batch_counts(config)) > 1 and waiting:
        earlier = waiting[-1]
        now, left = _of_sum(config, earlier)[0], _buffer_numel(earlier)
    sums = [*_sums(config, waiting, earlier)]
    if not p.overlap_grad_reduce:  # each alone, one after another
        sums = [sent for flat in waiting for sent in _sums(config, [flat])]
    ready, following = [*map(ready_at, waiting)], 0
    for k in range(len(names)):
        had = most = _Now(whole, now, lookups, freed)
        while following < len(sums) and ready[following] <= k:
            flat, starts, now, made = sums[following]
            lookups -= sum(tied.get(name, 0) for name, _, _ in flat.params)
            whole, left, freed = whole - left, _buffer_numel(flat), freed + gathered_bytes(flat)
            if not p.overlap_grad_reduce:
                starts, now, left = now + made, 0, 0
            leaves = had._replace(sums=starts, lookups=lookups)
            most = max(most, leaves, key=lambda there: there.sums + there.lookups)
            following += 1
        found.append((had, most))
    last = _Now(whole, now, lookups, freed)
    return [*found, (last, last)]


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
    config: Config,
    provider: ModelProvider,
    peak: activations.ActivationPeak,
    ranks: Mapping[str, int] | None = None,
) -> list[Moment]:
    """Return what lives at moments of a step without a pipeline, of the kinds that change in it.

    ranks: as bucket_layout.memory takes them.

    Those of a backward are the head's, when all activations and the logits are there, those of the
    last two layers, of the first one, and of the embedding: whole gradients, gathered weights, tied
    look-ups, activations and logits are not all at their fullest at one of them. Between the
    layers all of these change evenly. Below ZeRO stage 2 only the look-ups come late: the moments
    are each action's fullest one without them, and the embedding's backward. The first backward and
    the last one have their own moments, those between them are alike; where gradients are summed
    after each, all but the last are.
    """
    flats, layers = rank_memory.flats(config, provider), config.model.num_layers
    size, named = gradient_bytes(config), rank_memory.parameters(config, provider)
    tied = {name: named[name].entry.numel * size for name in both_ends(config, provider)}
    lookups = sum(tied.values())
    # look-ups of one micro-batch live on in the next one's backward, unless sums go after each
    late = _each(config) or max(micro_batch_counts(config)) == 1
    sums, moves = level(config) >= 2, config.parallel.optimizer_state_offload
    travels, each = _travels(config, flats), _each(config)
    if not (sums or moves or travels) and not (lookups and late):
        return [_of_action(each) for each in peak.actions]
    sharded = {
        name: (n, flat.rows or flat.length * config.run.dtype.itemsize)
        for n, flat in enumerate(flats) if flat.by_use for name, _, _ in flat.params
    }  # fmt: skip
    walk, found = _walk(config, provider, flats, 0), dict[tuple[int, str], dict[str, int]]()
    backwards = [each.action for each in peak.actions if each.action.kind == "B"]
    if not each and len(backwards) > 1:
        walk = _walk(config, provider, flats, 0, first=True) + walk * (len(backwards) - 1)
    begin = next((at for at, step in enumerate(walk) if block_of(step.name)), len(walk))
    living = activations.profile(config, provider).live_bytes
    names = [step.name for step in walk[-len(living) :]]
    come, leaving = _fetched(config, flats, names, ranks), _leaving(config, flats, names, tied)
    in_use = [step.name for step in walk]  # an embedding's backward takes no weight
    while in_use and not block_of(in_use[-1]):
        in_use.pop()
    while in_use and in_use[-1] not in sharded:
        in_use.pop()
    for at, step in enumerate(walk):
        block = block_of(step.name)
        if block:
            number = int(block.rpartition(".")[2])
            where = {layers - 1: "last", layers - 2: "second", 0: "first"}.get(number, "")
            where = where or block * (moves or travels)
        else:  # at the head of a micro-batch's list, or at its end
            head = at % len(living) < begin
            number, where = (layers - 1, "head") if head else (-1, "embedding")
        if not where or not (sums or moves or travels or where == "embedding"):
            continue
        now = {
            "gathered weights": _together(config, sharded, in_use[at:] or in_use[-1:]),
            "tied look-ups": lookups * (where == "embedding" or not (late or at < len(living))),
        }
        k, live = at - len(walk) + len(living), living[at % len(living)]
        for leaves, lives, unsharded, made in (
            (False, live.most, step.before, step.made),
            (True, live.ready, step.whole, step.leave),
        ):
            whole = unsharded * size + made * accumulate_bytes(config)
            one = now | _parts(lives, peak, (number + 1) / layers, where == "head")
            one |= {"whole gradients": whole}
            if k >= 0 and moves:  # the last micro-batch's backward brings it
                one |= {"fetched state": come[k + leaves]}
            moments = [one]
            if travels and (each or k >= 0):
                there = leaving[at % len(living)][leaves]
                waits = min(there.lookups, now["tied look-ups"])
                sent = {"sums of gradients": there.sums, "tied look-ups": waits}
                whole = whole if each else there.whole * size
                moments = [one] * (not each) + [one | sent | {"whole gradients": whole}]
            key = at // len(living), where
            for one in moments:
                if sum(one.values()) >= sum(found.get(key, {}).values()):
                    found[key] = one
    actions = [_of_action(each, {"tied look-ups": 0}) for each in peak.actions]
    if sums:  # else a forward has no more than its activations
        first = {"whole gradients": 0, "tied look-ups": 0}
        first |= {"gathered weights": _together(config, sharded, in_use)}
        later = {"whole gradients": walk[-len(living)].before * size}
        later |= {"tied look-ups": lookups * (not late)}
        actions = [
            _of_action(each, first | later if each.action.micro_batch else first)
            for each in peak.actions if each.action.kind == "F"
        ]  # fmt: skip
    before = len(backwards) - len(walk) // len(living)  # backwards like the first one in the walk
    return actions + [
        Moment(action, one)
        for i, action in enumerate(backwards)
        for (number, _), one in found.items() if number == max(0, i - before)
    ]  # fmt: skip


def _of_action(peak: activations.ActionPeak, more: Mapping[str, int] | None = None) -> Moment:
    """Return an action's fullest moment, with more kinds that change."""
    own = {"activations": peak.activations, "logits": peak.logits}
    own |= {"working memory": peak.working, "offloaded": peak.under_way}
    return Moment(peak.action, own | dict(more or {}))


def pipeline_moments(
    config: Config,
    provider: ModelProvider,
    pp_rank: int,
    peak: activations.ActivationPeak,
    ranks: Mapping[str, int] | None = None,
) -> list[Moment]:
    """Return what lives on a pipeline rank, of the kinds that change, at the fullest moments of the
    last gradients and of the actions after these: their sums travel, masters and moments come, the
    output layer's deferred one is allocated, weights are gathered no more. None where nothing of
    this takes memory.

    ranks: as bucket_layout.memory takes them. A chunk's last gradients are made when other
    micro-batches of the rank may still wait for theirs (ActivationPeak.ends).
    """
    flats = rank_memory.flats(config, provider, pp_rank)
    late = deferred(config, provider, pp_rank)
    changes = moved_state(config, flats, ranks) or _travels(config, flats) or late
    if not changes and (level(config) < 2 or config.parallel.schedule in SPLIT):
        return []  # else pipeline_peaks leaves out the last gradients
    gathered = _gathered(config, provider, flats)
    found = _with_live_bytes(config, provider, pp_rank)
    named, names = rank_memory.parameters(config, provider, pp_rank), found.gradients
    size = gradient_bytes(config)
    tied = {name: named[name].entry.numel * size for name in both_ends(config, provider, pp_rank)}
    come, leaving = _fetched(config, flats, names, ranks), _leaving(config, flats, names, tied)
    fullest = dict[Action, Moment]()

    def note(action: Action, lives: int, up: int, now: _Now, unopened: int = 0) -> None:
        kept = min(lives, peak.activations)
        own = {"logits": 0, "offloaded": 0, "activations": kept, "working memory": lives - kept}
        own |= {"whole gradients": (now.whole - unopened) * size, "fetched state": up}
        own |= {"gathered weights": max(0, gathered - now.freed)}
        moment = Moment(action, own | {"sums of gradients": now.sums, "tied look-ups": now.lookups})
        if action not in fullest or moment.total > fullest[action].total:
            fullest[action] = moment

    for end, beside, following, after in peak.ends:
        chunk = end.chunk
        wait = sum(stage.for_b + stage.logits for stage in found.stages[:chunk])
        own = [k for k, name in enumerate(names) if named[name].entry.chunk == chunk]
        for k in own:
            most, ready = (beside + lives - wait for lives in found.live_bytes[k])
            note(end, most, come[k], leaving[k][0], late)
            note(end, ready, come[k + 1], leaving[k][1], late)
        if own:  # of what is deferred the output layer's gradient is the last one
            k = own[-1] + (not config.parallel.defer_embedding_wgrad_compute)
            note(following, after, come[k], leaving[k][1])
    return [*fullest.values()]


def pipeline_peaks(
    config: Config, provider: ModelProvider, pp_rank: int, peak: activations.ActivationPeak
) -> list[Moment]:
    """Return what lives on a pipeline rank, of the kinds that change, at the fullest moments of its
    actions before its last gradients. Unsharded gradients of a chunk come with its first B; those
    of a deferred output layer later (`pipeline_moments`).
    """
    if level(config) < 2:
        return [_of_action(each) for each in peak.actions]
    flats = rank_memory.flats(config, provider, pp_rank)
    named, size = rank_memory.parameters(config, provider, pp_rank), gradient_bytes(config)
    chunk_of = {flat: named[flat.params[0][0]].entry.chunk for flat in flats}

    def open_in(chunks: activations.Chunks, names: Sequence[str] = ()) -> int:
        """Return the bytes of the chunks' buckets, and of those that have one of the names."""
        return size * sum(
            _buffer_numel(flat) for flat in flats if not flat.late
            and (bool(chunks) if flat.axes else chunk_of[flat] in chunks)
            | any(name in names for name, _, _ in flat.params)
        )  # fmt: skip

    begun = {each.begun for each in peak.actions}
    opened = {chunks: {"whole gradients": open_in(chunks)} for chunks in begun}
    found = [_of_action(each, opened[each.begun]) for each in peak.actions if not each.apart]
    measured = _with_live_bytes(config, provider, pp_rank)
    for begin, others, chunks in peak.begins:
        chunk = begin.chunk
        wait = sum(stage.for_b + stage.logits for stage in measured.stages[:chunk])
        names = [n for n in measured.gradients if named[n].entry.chunk == chunk]
        lives = dict(zip(measured.gradients, measured.live_bytes, strict=True))
        now = {"logits": 0, "offloaded": 0, "working memory": 0}
        for k, name in enumerate(names):  # a gradient's bucket is allocated when it is written
            for end, live in enumerate(lives[name]):
                whole = open_in(chunks, names[: k + end])
                own = {"activations": others + live - wait, "whole gradients": whole}
                found.append(Moment(begin, now | own))
    return found


def _with_live_bytes(config: Config, provider: ModelProvider, pp_rank: int) -> RankProfile:
    """Return a pipeline rank's profile with live_bytes."""
    found = activations.profile(config, provider, pp_rank)
    return found if found.live_bytes else activations.whole_profile(config, provider, pp_rank)


def deferred(config: Config, provider: ModelProvider, pp_rank: int) -> int:
    """Return the elements of unsharded gradients that are allocated when all else of a rank's
    backward is over: of the output layer, where every micro-batch defers its weight gradient.
    """
    count = max(micro_batch_counts(config))
    if level(config) < 2 or schedule_of(config, count).deferred < count:
        return 0
    flats = rank_memory.flats(config, provider, pp_rank)
    return sum(_buffer_numel(flat) for flat in flats if flat.late)


def _fetched(
    config: Config,
    flats: list[BucketLayout],
    names: Sequence[str],
    ranks: Mapping[str, int] | None,
) -> list[int]:
    """Return the bytes of masters and moments on the device while each gradient of a micro-batch
    is made: a bucket's come when its last gradient is there, or that of the bucket before it
    (mpu/optim/state_offload.py).
    """
    last = {name: at for at, name in enumerate(names)}
    come = [0] * (len(names) + 1)
    before = len(names)
    for flat in flats:
        ready = max((last.get(name, len(names)) for name, _, _ in flat.params), default=0)
        come[min(ready + 1, before + 1, len(names))] += moved_state(config, [flat], ranks)
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
    return max(step.whole for step in _walk(config, provider, flats, pp_rank))


class _Step(NamedTuple):
    """A parameter's gradient: the elements of unsharded gradients that live while it is made, and
    when it is written, which allocates its bucket; and of the sums that are made beside those of an
    earlier micro-batch, to which they are added (mpu/zero/reduce.py, sum_over_data): while it is
    made, and as buckets leave then.
    """

    name: str
    before: int
    whole: int
    made: int = 0
    leave: int = 0


def _walk(
    config: Config,
    provider: ModelProvider,
    flats: list[BucketLayout],
    pp_rank: int,
    first: bool = False,
) -> list[_Step]:
    """Return the parameters in the order of their gradients, and what lives of these then.

    Of a step's last micro-batch, where gradients are summed after each of its last two. first: of
    the first one of several, after which no bucket leaves.
    """
    p, count = config.parallel, max(micro_batch_counts(config))
    total = sum(map(_buffer_numel, flats))
    done = activations.profile(config, provider, pp_rank).gradients
    each = _each(config)
    if count > 1 and not each and not first:
        return [_Step(name, total, total) for name in done] or [_Step("", total, total)]
    short = [flat for flat in flats if not flat.axes and (not each or _buffer_numel(flat))]
    bucket_of = {name: i for i, flat in enumerate(short) for name, _, _ in flat.params}
    # the last bucket of a micro-batch is still being sent while the next one's backward begins
    passes = 2 if each and count > 1 else 1
    order = [
        (name, n * len(short) + bucket_of[name] if name in bucket_of else -1)
        for n in range(passes) for name in done
    ]  # fmt: skip
    last = {bucket: at for at, (_, bucket) in enumerate(order) if bucket >= 0}
    unknown = bucket_of.keys() - set(done)  # plain autograd: known at the end of the step
    for name in unknown:
        for n in range(passes):
            last.pop(n * len(short) + bucket_of[name], None)
    in_use: set[int] = set()
    if first or not (p.overlap_grad_reduce or each):  # none leaves before backward is over
        last, in_use = {}, {bucket_of[name] for name in unknown}
    steps, following, under_way = list[_Step](), 0, 0
    second_axis = sum(_buffer_numel(flat) for flat in flats if flat.axes)

    def unsharded() -> int:
        return second_axis + sum(_buffer_numel(short[i % len(short)]) for i in in_use)

    for at, (name, bucket) in enumerate(order):
        before = unsharded()
        in_use |= {bucket} if bucket >= 0 else set()
        whole, had = unsharded(), under_way
        most = had
        while last.get(following, at + 1) <= at:  # a bucket leaves; its owner has the one before
            flat = short[following % len(short)]
            earlier = following >= len(short) or (count > 2 and following == len(short) - 1)
            made = flat.length // flat.sharing.shard if earlier and passes > 1 else 0
            most = max(most, under_way + made)
            under_way = made if p.overlap_grad_reduce else 0
            in_use.discard(following - 1 if p.overlap_grad_reduce else following)
            following += 1
        steps.append(_Step(name, before, whole, had, most))
    return steps or [_Step("", total, total)]


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
