# SPDX-License-Identifier: Apache-2.0
"""What a step must write: every gradient by every micro-batch, every master, moment and weight.

gradients    of each parameter: all of it, in each micro-batch; the first one overwrites what the
             step before left, the others add; each depends on the loss, or on what a stage received
update       of each part that a rank owns: master and moments from its gradients; then its weights,
             from the masters; then the gather of the weights
norm         what scales the update depends on the gradients of all buckets
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mpu.gradients import GradientSink
from mpu.layers.embedding import VocabParallelEmbedding, _Lookup
from mpu.layers.fused import RMSNorm, _RMSNorm
from mpu.layers.linear import _ParallelLinear
from mpu.module_tracker import FORWARD
from mpu.optim.interface import rules_of
from mpu.optim.matrix_exchange import MatrixUpdater
from mpu.optim.optimizer import Optimizer
from mpu.zero.norm import _Part
from mpu.zero.param_and_grad_buffer import ParamAndGradBuffer
from tools.rehearsal.events import Action, HostUse, Launch, Transfer
from tools.rehearsal.order import Finding
from tools.rehearsal.places import STATE, beginning, end_of
from tools.rehearsal.record import span
from tools.rehearsal.traffic_rules import BACKWARD, is_own_llama
from training.update_rules import optimizer_groups

if TYPE_CHECKING:
    from tools.rehearsal.run import Rehearsed

OVERWRITES = ("aten::copy_", "aten::zero_", "aten::fill_")
SMALL = 1 << 16  # bytes of the numbers from which the norm is made
SCALAR = 64  # bytes of a number that scales an update, or skips it
ZEROES = ("aten::zero_", "aten::fill_")
# what they make has a tensor's shape, and nothing of its values
SHAPED = (
    "ones_like", "zeros_like", "full_like", "empty_like", "new_zeros", "new_full", "new_ones",
)  # fmt: skip
GIVERS: dict[type, Callable[..., Any]] = {  # what gives the gradient of a layer's weight
    _ParallelLinear: _ParallelLinear.wgrad,
    VocabParallelEmbedding: _Lookup.backward,
    RMSNorm: _RMSNorm.backward,
}
SUMMING = ("reduce_scatter", "all_to_all", "all_reduce")  # by one of them gradients travel
SUMMED = "mpu/zero/bucket.py"
MICRO_BATCH = re.compile(  # of an F overlapping a B that of the B: only it writes gradients
    r"(?:.* overlapping )?(?:(?:F|B|BW|W) chunk \d+|the output layer's deferred W of) "
    r"micro-batch (\d+)"
)
Span = tuple[int, int]


class Write(NamedTuple):
    """An event that writes bytes [low, high) of a storage. adds: it reads them, too."""

    low: int
    high: int
    at: int  # the event's index
    adds: bool
    micro_batch: int  # -1: in none


class Writes:
    """Who writes and who reads the storages of the last step."""

    def __init__(self, seen: "Rehearsed") -> None:
        self.recorder, self.events = seen.recorder, seen.recorder.events
        self.of: dict[int, list[Write]] = defaultdict(list)
        self.read: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # low, high, index
        self.began = {-1: seen.first}
        now = -1
        for index in range(seen.first, len(self.events)):
            event = self.events[index]
            if type(event) is Action:
                matched = MICRO_BATCH.match(event.words)
                now = int(matched[1]) if matched else -1
            elif isinstance(event, (Launch, Transfer, HostUse)):
                reads, writes = uses(event)
                for number, low, high in reads:
                    self.read[number].append((low, high, index))
                for number, low, high in writes:
                    overwrites = type(event) is Launch and event.op in OVERWRITES
                    adds = not overwrites and any(
                        n == number and a < high and low < b for n, a, b in reads
                    )
                    self.of[number].append(Write(low, high, index, adds, now))

    def number(self, x: Tensor) -> int:
        """Return the number of a tensor's storage, or -1."""
        return self.recorder.live.get(id(x.untyped_storage()), (-1,))[0]

    def to(self, number: int, at: Span) -> list[Write]:
        """Return who writes into bytes of a storage."""
        return [w for w in self.of.get(number, ()) if w.low < at[1] and at[0] < w.high]

    def chain(self, index: int) -> tuple[str, ...]:
        """Return the lines that led to an event."""
        event: Any = self.events[index]
        return (event.where.place, *self.recorder.chains.get(index, ()))


def uses(event: Any) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """Return (storage, low, high) of what an event reads, and of what it writes."""
    every = [*event.read, *event.written]
    spans = event.spans or ((0, 1 << 62),) * len(every)
    found = [(n, *at) for n, at in zip(every, spans, strict=True)]
    return found[: len(event.read)], found[len(event.read) :]


def covered(at: Span, parts: Iterable[Span]) -> int:
    """Return how many bytes of a span some parts cover."""
    done, total = at[0], 0
    for low, high in sorted(parts):
        low, high = max(low, done), min(high, at[1])
        if low < high:
            total, done = total + high - low, high
    return total


def unwritten(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield what the last step did not write, or not from what it should."""
    writes = Writes(seen)
    yield from gradients(seen, writes)
    yield from added_up(seen, writes)
    yield from look_ups(seen)
    yield from update(seen, writes)
    yield from dtypes(seen)


# gradients


def gradients(seen: "Rehearsed", writes: Writes) -> Iterator[Finding]:
    """Yield the parameters whose gradient a micro-batch leaves out, loses, or adds to old ones."""
    sink, count = seen.run.sink, seen.micro_batches
    seeded = from_loss(seen)
    for bucket in sink.buckets:
        storage = grad_storage(seen, writes, bucket)
        if storage < 0:
            continue
        each = sink.each and not bucket.reduce_axes and bucket.reduction.zero_stage >= 2
        size = bucket.reduction.main_dtype.itemsize
        for name, param, start in bucket.params:
            at = start * size, (start + param.numel()) * size
            # a sum that is finished under backward writes here too, where it has no other memory
            found = [w for w in writes.to(storage, at) if not of_sum(writes, w)]
            rounds = 1 if each else count
            yield from of_param(seen, writes, name, at, found, rounds)
            given = [w for w in found if w.micro_batch >= 0 and not zeroes(writes, w)]
            yield from more_than_once(seen, writes, name, at, given)
            if given and not any(w.at in seeded for w in given):
                what = f"the gradient of {name} does not depend on the loss"
                yield Finding("gradient", *at_write(writes, given[-1], what))


def more_than_once(
    seen: "Rehearsed", writes: Writes, name: str, at: Span, given: list[Write]
) -> Iterator[Finding]:
    """Yield whether a micro-batch adds a parameter's gradient more often than it is used."""
    if not is_own_llama(seen):
        return  # a fork may call a layer several times
    param = dict(seen.run.model.named_parameters())[name]
    users = [m for m in seen.run.model.modules() if param in set(m.parameters(recurse=False))]
    nbytes = Counter[int]()
    for write in given:
        nbytes[write.micro_batch] += min(write.high, at[1]) - max(write.low, at[0])
    for micro_batch, count in nbytes.items():
        if count > len(users) * (at[1] - at[0]):
            what = f"micro-batch {micro_batch} writes the gradient of {name} "
            what += f"{count / (at[1] - at[0]):.3g} times; {len(users)} layer(s) give it"
            last = [w for w in given if w.micro_batch == micro_batch][-1]
            yield Finding("gradient", *at_write(writes, last, what))
            return


def added_up(seen: "Rehearsed", writes: Writes) -> Iterator[Finding]:
    """Yield the sums of each micro-batch's gradients that are added more often than there are any.

    The first one is a rank's part, the others are added to it.
    """
    sink = seen.run.sink
    for i, bucket in enumerate(sink.buckets):
        if not (sink.each and not bucket.reduce_axes and bucket.reduction.zero_stage >= 2):
            continue
        number, at = writes.number(bucket.grad_shard), span(bucket.grad_shard)
        adds = [w for w in writes.to(number, at) if w.adds and in_sum(writes, w)]
        nbytes = sum(min(w.high, at[1]) - max(w.low, at[0]) for w in adds)
        if nbytes > (seen.micro_batches - 1) * (at[1] - at[0]):
            what = f"{len(adds)} times something is added to the sum of bucket {i}'s gradients, in "
            what += f"{seen.micro_batches} micro-batches of which the first one begins it"
            yield Finding("gradient", *at_write(writes, adds[-1], what))


def in_sum(writes: Writes, write: Write) -> bool:
    """Return whether a write is a launch of the sum over ranks."""
    event: Any = writes.events[write.at]
    return type(event) is Launch and event.where.place.startswith("mpu/zero/")


def adds_rows(event: Launch) -> bool:
    """Return whether an index_add_ is of rows of an embedding, and counts nothing."""
    return "float" in event.dtype


def look_ups(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the embeddings that add no rows in some micro-batch; a tied head may hide that."""
    now, found, unsummed = -1, dict[str, set[int]](), dict[int, int]()
    for index in range(seen.first, len(seen.recorder.events)):
        event = seen.recorder.events[index]
        if type(event) is Action:
            matched = MICRO_BATCH.match(event.words)
            now = int(matched[1]) if matched else -1
        elif type(event) is Launch and event.op == "aten::index_add_" and adds_rows(event):
            found.setdefault(event.where.layer, set()).add(now)
            unsummed.update(dict.fromkeys(event.written, index))
        elif isinstance(event, (Launch, Transfer, HostUse)):
            for number in event.read:
                unsummed.pop(number, None)
    for index in [*unsummed.values()][:1]:
        what = "the sum of the rows that an embedding adds is not added to its weight's gradient"
        through = seen.recorder.chains.get(index, ())
        place = beginning(ParamAndGradBuffer._complete)
        yield Finding("gradient", place, what, beginning(GradientSink.add), through)
    for name, module in seen.run.model.named_modules():
        if isinstance(module, VocabParallelEmbedding):
            lost = set(range(seen.micro_batches)) - found.get(name, set())
            if lost:
                what = f"micro-batch {min(lost)} adds no rows to the gradient of {name}"
                yield Finding("gradient", beginning(_Lookup.backward), what)


def of_param(
    seen: "Rehearsed", writes: Writes, name: str, at: Span, found: list[Write], rounds: int
) -> Iterator[Finding]:
    """Yield what is wrong with one parameter's gradient. rounds: micro-batches that add it up."""
    given = [w for w in found if not zeroes(writes, w)]
    inside = [w for w in given if w.micro_batch >= 0]
    expected = range(seen.micro_batches - rounds, seen.micro_batches)
    missing = [
        i
        for i in expected
        if covered(at, [(w.low, w.high) for w in inside if w.micro_batch == i]) < at[1] - at[0]
    ]
    if missing:
        what = f"no micro-batch writes all of the gradient of {name}"
        if len(missing) < rounds:
            what = f"micro-batch {missing[0]} does not write all of the gradient of {name}"
        if inside:
            yield Finding("gradient", *at_write(writes, inside[-1], what))
        else:
            place, also, through = giver(seen, name)
            yield Finding("gradient", place, what, also, through)
        return
    first = min(inside, key=lambda w: w.at)
    zeroed = any(zeroes(writes, w) and w.at < first.at for w in found)
    if first.adds and not zeroed:
        what = f"the gradient of {name} is added to what the step before left"
        yield Finding("gradient", *at_write(writes, first, what))
    for later in inside:
        alone = later.low <= first.low and later.high >= first.high
        if later.micro_batch > first.micro_batch and alone and not later.adds:
            what = f"the gradient of {name} overwrites that of an earlier micro-batch"
            yield Finding("gradient", *at_write(writes, later, what))
            return


def of_sum(writes: Writes, write: Write) -> bool:
    """Return whether a write is of the sum over ranks, and not a layer's."""
    event = writes.events[write.at]
    if type(event) is Transfer:
        return True
    return type(event) is Launch and event.where.place.startswith(SUMMED) and event.op not in ZEROES


def zeroes(writes: Writes, write: Write) -> bool:
    """Return whether a write only sets zeros."""
    event = writes.events[write.at]
    return type(event) is Launch and event.op in ZEROES


def at_write(writes: Writes, write: Write, what: str) -> tuple[str, str, str, tuple[str, ...]]:
    """Return a finding's place, words, other place and lines, at an event that writes."""
    chain = writes.chain(write.at)
    return chain[0], what, "", chain[1:]


def giver(seen: "Rehearsed", name: str) -> tuple[str, str, tuple[str, ...]]:
    """Return where a parameter's layer gives its gradient, where its backward ends, and the lines
    of that.
    """
    param = dict(seen.run.model.named_parameters())[name]
    holders = {
        at: module
        for at, module in seen.run.model.named_modules()
        if any(each is param for each in module.parameters(recurse=False))
    }
    module = next(iter(holders.values()))
    gives = next((f for kind, f in GIVERS.items() if isinstance(module, kind)), GradientSink.add)
    function: Any = None
    through = dict[str, None]()
    for index in range(seen.first, len(seen.recorder.events)):
        event = seen.recorder.events[index]
        if type(event) is Launch and event.where.phase in ("backward", "wgrad", "recompute"):
            lines = (event.where.place, *seen.recorder.chains.get(index, ()))
            chunks = "head" in holders and any("linear_cross_entropy" in line for line in lines)
            if event.where.layer in holders or chunks:
                through.update(dict.fromkeys(lines))
                made = event.where.function.removesuffix(BACKWARD)
                if made != event.where.function:
                    function = seen.recorder.functions[made]
    return beginning(gives), end_of(function.backward) if function else "", tuple(through)


def grad_storage(seen: "Rehearsed", writes: Writes, bucket: Any) -> int:
    """Return the storage of a bucket's main gradients in the last step, or -1."""
    if bucket.grad is not None:
        return writes.number(bucket.grad)
    callers = seen.recorder.callers
    size = bucket.length * bucket.reduction.main_dtype.itemsize
    for event in reversed(writes.events[seen.first :]):
        if type(event) is Transfer and event.label.endswith(": grad sum"):
            if callers.get(event.id) is bucket and event.read:
                source = event.read[0]
                if writes.recorder.sizes.get(source) != size:  # a copy in the dtype that travels
                    source = made_of(writes, source, size)
                return source
    return -1


def made_of(writes: Writes, number: int, size: int) -> int:
    """Return the storage of a size from which a launch made another, or -1."""
    for write in reversed(writes.of.get(number, [])):
        event = writes.events[write.at]
        if type(event) is Launch:
            return next((n for n in event.read if writes.recorder.sizes.get(n) == size), -1)
    return -1


def from_loss(seen: "Rehearsed") -> set[int]:
    """Return the events that depend on the gradient of the loss, or on one that was received."""
    events, begins = seen.recorder.events, False
    marked, found = set[int](), set[int]()
    for index in range(seen.first, len(events)):
        event = events[index]
        if type(event) is Action:
            begins = event.words.startswith(("B ", "BW ")) or " overlapping BW " in event.words
        elif isinstance(event, (Launch, Transfer)):
            received = type(event) is Transfer and event.verb == "receive"
            shaped = type(event) is Launch and event.op.rpartition("::")[2] in SHAPED
            if (begins and type(event) is Launch and event.where.phase != FORWARD) or received:
                marked.update(event.written)  # autograd's first number, or a message
                begins = False
                found.add(index)
            elif not shaped and not marked.isdisjoint((*event.read, *event.written)):
                marked.update(event.written)
                found.add(index)
    return found


# the update


def update(seen: "Rehearsed", writes: Writes) -> Iterator[Finding]:
    """Yield the masters, moments and weights that the update leaves out, and stale gathers."""
    optimizer, sink = seen.run.optimizer, seen.run.sink
    offload = optimizer.offload
    grads = offload.gradients if offload else [b.grad_shard for b in sink.buckets]
    scalars = dependent(seen, writes)
    for i, segments in enumerate(optimizer.segments):
        last = seen.first
        for segment in segments:
            states = {"master": segment.weights, **segment.updater.state(segment.weights)}
            for kind, x in states.items():
                if writes.number(x) < 0:
                    continue  # in host memory that the device does not reach
                done = [w for w in writes.to(writes.number(x), span(x)) if not is_copy(writes, w)]
                if covered(span(x), [(w.low, w.high) for w in done]) < span(x)[1] - span(x)[0]:
                    what = f"the update leaves out {kind} of bucket {i}, [{segment.low:,}, "
                    what += f"{segment.high:,})"
                    yield missing(writes, what, done or every_update(writes, optimizer))
                    break
            else:
                masters = [
                    w
                    for w in writes.to(writes.number(segment.weights), span(segment.weights))
                    if not is_copy(writes, w)
                ]
                last = max(last, *(w.at for w in masters))
                grad = writes.number(grads[i])
                from_grad = any(grad in writes.events[w.at].read for w in masters)  # type: ignore[union-attr]
                if isinstance(segment.updater, MatrixUpdater):  # by way of the owners
                    from_grad = offload is not None or any(
                        mask >> i & 1 and writes.recorder.sizes.get(number, 0) > SCALAR
                        for w in masters
                        for number, mask in scalars.get(w.at, {}).items()
                    )
                if not from_grad:
                    read = f"the master of bucket {i} is updated without its gradients"
                    yield missing(writes, read, masters)
                yield from scaled(seen, writes, masters, scalars)
        yield from weights(seen, writes, i, last)


def is_copy(writes: Writes, write: Write) -> bool:
    """Return whether a write brings state from host memory, or sends it there."""
    event: Any = writes.events[write.at]
    return bool(event.where.place.startswith(STATE))


def missing(writes: Writes, what: str, done: list[Write]) -> Finding:
    """Return the finding at the last of some writes, or at the update's beginning."""
    if done:
        return Finding("update", *at_write(writes, done[-1], what))
    return Finding("update", beginning(Optimizer.step), what)


def every_update(writes: Writes, optimizer: Any) -> list[Write]:
    """Return the writes of any master."""
    return [w for m in optimizer.masters for w in writes.of.get(writes.number(m), ())]


def weights(seen: "Rehearsed", writes: Writes, i: int, updated: int) -> Iterator[Finding]:
    """Yield whether a bucket's weights are not those of the masters, or are gathered before."""
    bucket, master = seen.run.sink.buckets[i], seen.run.optimizer.masters[i]
    number, shard = writes.number(bucket.param_shard), bucket.param_shard
    separate = writes.number(master) != number
    segments, written = seen.run.optimizer.segments[i], updated
    for segment in segments if separate else ():
        own = writes.to(writes.number(segment.weights), span(segment.weights))
        since = max((w.at for w in own), default=seen.first)
        low, high = segment.low - bucket.low, segment.high - bucket.low
        at = span(shard[low:high])
        done = [
            w
            for w in writes.to(number, at)
            if w.at >= since and type(writes.events[w.at]) is not Transfer
        ]
        if covered(at, [(w.low, w.high) for w in done]) < at[1] - at[0]:
            what = f"the weights of bucket {i} are not written from their masters"
            place = beginning(Optimizer.weights_from_masters)
            through = writes.chain(updated) if updated > seen.first else ()
            if seen.run.optimizer.offload:
                place = beginning(type(seen.run.optimizer.offload)._send)
            yield Finding("update", place, what, "", through)
            return
        written = max(written, *(w.at for w in done))
    offload = seen.run.optimizer.offload
    if offload and offload._rounded[i] is not offload.masters[i]:
        rounded = writes.number(offload._rounded[i])
        if not any(w.at >= updated for w in writes.of.get(rounded, ())):
            what = f"the masters of bucket {i} are not rounded before their copy to the device"
            yield Finding("update", beginning(type(offload)._send), what)
    if bucket.shard is None or bucket.sharded or bucket.float8 is not None or not segments:
        return
    if bucket.shard.size > 1:
        begin, end = span(shard)
        gathers = [
            index
            for low, high, index in writes.read.get(number, ())
            if type(writes.events[index]) is Transfer and low < end and begin < high
        ]
        if not any(index > written for index in gathers):
            what = f"the updated weights of bucket {i} are not gathered"
            what += " after their update" if gathers else ""
            place = beginning(ParamAndGradBuffer.gather_weights)
            chain = writes.chain(gathers[-1]) if gathers else writes.chain(written)
            yield Finding("update", place, what, chain[0], chain)


def dependent(seen: "Rehearsed", writes: Writes) -> dict[int, dict[int, int]]:
    """Return, of each launch in the update, its inputs and the buckets whose gradients they are of.

    Buckets are bits; one bit more is the tokens that count. What comes of the exchange of matrices
    depends on all that any rank has sent for one.
    """
    exchanged = 0
    sink, bits = seen.run.sink, dict[int, int]()
    for i, bucket in enumerate(sink.buckets):
        number = writes.number(bucket.grad_shard)
        bits[number] = bits.get(number, 0) | 1 << i
    tokens, found = 1 << len(sink.buckets), dict[int, dict[int, int]]()
    script, counting, updating = seen.script.__file__ or "", True, False
    name = script.rpartition("/")[2]
    for index in range(seen.first, len(writes.events)):
        event = writes.events[index]
        if type(event) is Action and event.words.startswith("the update"):
            counting, updating = False, True
        if not isinstance(event, (Launch, Transfer, HostUse)):
            continue
        if counting:
            if (
                type(event) is Launch
                and event.where.place.startswith(name)
                and "float64" in event.dtypes
            ):
                bits.update({n: bits.get(n, 0) | tokens for n in event.written})
        if updating or type(event) is Transfer:
            mask = 0
            for number in event.read:
                mask |= bits.get(number, 0)
            if updating:
                found[index] = {number: bits.get(number, 0) for number in event.read}
            if updating and type(event) is Transfer and event.verb == "all_to_all":
                exchanged |= mask
                mask = exchanged
            shaped = type(event) is Launch and event.op.rpartition("::")[2] in SHAPED
            for number in event.written:
                bits[number] = 0 if shaped else bits.get(number, 0) | mask
    return found


def scaled(
    seen: "Rehearsed", writes: Writes, masters: list[Write], scalars: dict[int, dict[int, int]]
) -> Iterator[Finding]:
    """Yield whether what scales an update does not depend on the norm of all gradients."""
    optimizer, config = seen.run.optimizer, seen.config
    persistent = {
        writes.number(x)
        for some in optimizer.tensors_by_kind().values()
        for x in some
        if x is not None
    }
    if optimizer.offload:
        persistent |= {writes.number(x) for x in optimizer.offload.gradients}
    count = len(seen.run.sink.buckets)
    expected = (1 << count) - 1
    if config.optimizer.clip_grad <= 0 or config.run.dtype == torch.float64:
        return
    if optimizer.offload:
        return  # its scalars come by a copy that the host waits for
    for write in masters:
        event = writes.events[write.at]
        if type(event) is not Launch:
            continue
        sizes = {n: writes.recorder.sizes.get(n, 0) for n in event.read}
        inputs = {n: m for n, m in scalars.get(write.at, {}).items() if n not in persistent}
        for number, mask in inputs.items():
            if sizes[number] > SCALAR or not from_norm(writes, number):
                continue
            lost = [i for i in range(count) if not mask >> i & 1]
            if lost and mask & expected != expected:
                what = "what scales the update, or skips it, does not depend on the norm"
                what += f" of the gradients of bucket {lost[0]}" if len(lost) < count else ""
                place, what, _, through = at_write(writes, write, what)
                through += made_by(writes, number, write.at)
                yield Finding("update", place, what, beginning(_Part.squares), through)
                return
        masked = config.data.eod_mask_loss
        if masked and inputs and not any(m >> count & 1 for m in inputs.values()):
            what = "the update is not scaled by the tokens that count"
            yield Finding("update", *at_write(writes, write, what))
            return


def made_by(writes: Writes, number: int, before: int) -> tuple[str, ...]:
    """Return the lines of the update's launches that made a small storage, and what it came of."""
    lines, todo, done = dict[str, None](), [(number, before)], set[tuple[int, int]]()
    while todo:
        storage, limit = todo.pop()
        made = [w for w in writes.of.get(storage, ()) if w.at < limit and w.micro_batch < 0]
        for write in made[-1:]:
            if (storage, write.at) in done:
                continue
            done.add((storage, write.at))
            event: Any = writes.events[write.at]
            lines.update(dict.fromkeys(writes.chain(write.at)))
            small = (n for n in event.read if writes.recorder.sizes.get(n, 0) <= SMALL)
            todo += [(n, write.at) for n in small]
    return tuple(lines)


def from_norm(writes: Writes, number: int) -> bool:
    """Return whether a small input of the update was made in this step: no count of steps."""
    return any(not w.adds for w in writes.of.get(number, ()))


def dtypes(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield masters, moments and gradients that are stored in another dtype than the flags give."""
    optimizer, sink, recorder = seen.run.optimizer, seen.run.sink, seen.recorder
    wide = torch.float64 if seen.config.run.dtype == torch.float64 else torch.float32
    kinds = {
        kind.name: kind.dtype or wide
        for rule in rules_of(optimizer_groups(seen.config))
        for kind in rule.kinds
    }
    narrow = seen.config.parallel.main_grads_dtype == "bf16"
    main = torch.bfloat16 if narrow else wide

    def wrong(x: Tensor | None, dtype: torch.dtype, what: str) -> Iterator[Finding]:
        if x is not None and x.dtype != dtype:
            place = recorder.birthplace(x)
            yield Finding("dtype", place, f"{what} is stored in {x.dtype}, not {dtype}")

    for bucket, master, segments in zip(
        sink.buckets, optimizer.masters, optimizer.segments, strict=True
    ):
        yield from wrong(master, wide, "a master")
        yield from wrong(bucket.grad_shard, wide, "a sum of gradients")
        yield from wrong(bucket.grad, main, "a main gradient")
        for segment in segments:
            for kind, x in segment.updater.state(segment.weights).items():
                yield from wrong(x, kinds.get(kind, wide), f"{kind} of the optimizer")
    on_wire = torch.bfloat16 if seen.config.parallel.grad_reduce_in_bf16 else main
    yield from travelling(seen, on_wire)


def travelling(seen: "Rehearsed", wire: torch.dtype) -> Iterator[Finding]:
    """Yield the gradients that travel to their owners in another dtype than the flags say."""
    recorder, expected = seen.recorder, str(wire).removeprefix("torch.")
    for index in range(seen.first, len(recorder.events)):
        event = recorder.events[index]
        if type(event) is not Transfer or not event.label.endswith(": grad sum"):
            continue
        bucket: Any = recorder.callers.get(event.id)
        how = getattr(bucket, "reduction", None)
        if how is None or event.axis != how.shard.name or event.verb not in SUMMING:
            continue
        if event.dtype != expected and event.read:
            born = recorder.born.get(event.read[0], "")
            what = f"gradients travel in {event.dtype}, not {expected}; they were made at {born}"
            through = recorder.chains.get(index, ())
            yield Finding("dtype", event.where.place, what, born, through)
            return
