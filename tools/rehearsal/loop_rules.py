# SPDX-License-Identifier: Apache-2.0
"""Find memory that grows from step to step or micro-batch to micro-batch, and needless reads.

A storage that each micro-batch's forward or backward allocates, and that still exists when the
step's sums are finished, is a leak. So are bytes that exist after a step beyond those after the
step before. Page-locked host memory counts, too.
"""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tools.rehearsal.events import (
    Action,
    Alloc,
    Call,
    Event,
    Free,
    HostUse,
    HostWait,
    Launch,
    Transfer,
)
from tools.rehearsal.order import Finding
from tools.rehearsal.places import beginning, on_lines
from tools.rehearsal.record import RECOMPUTED
from tools.rehearsal.write_rules import MICRO_BATCH, SHAPED

if TYPE_CHECKING:
    from tools.rehearsal.run import Rehearsed

SUMS = "the gradient sums"
FED = "training/data/batch.py"
POSTED = "mpu/pipeline/"  # it posts the receive of another micro-batch ahead
OFFLOAD = "mpu/activation_offload.py"
SETS = (*SHAPED, "zero_", "fill_", "zeros", "full", "index")  # cheap, or of a stage without layers
PER_PART = 4  # storages that may outlive the forward of a recomputed part: its output, and tables
DECIDES = {"mpu/recompute.py": ("decision = decide()",)}
NEXT_LAUNCH = 6  # events from a storage to the launch that allocates it, at most
FLOAT8 = ("mpu/layers/float8/", "mpu/zero/")  # codes of weights stay until their next update
LARGE = 1 << 12  # bytes of a result


def grown(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the lines whose memory lives on in the last step, more with each."""
    persistent = set(seen.kinds())
    in_use: dict[int, tuple[str, int]] = {}  # what a micro-batch began: its line and number
    now, reported = -1, set[str]()
    last = {of: index for index, of in actions(seen) if of >= 0}  # of each, its last action
    over: list[int] = []
    for index in range(seen.first, len(seen.recorder.events)):
        event = seen.recorder.events[index]
        if type(event) is Alloc and now >= 0 and event.storage not in persistent:
            if not (place := line_of(seen, event)).startswith(POSTED):
                in_use[event.storage] = place, now
        elif type(event) is Free:
            in_use.pop(event.storage, None)
        elif type(event) is Action:
            over += [now] if now >= 0 and last[now] < index and now not in over else []
            left: dict[str, set[int]] = {}
            for place, micro_batch in in_use.values() if len(over) > 3 else ():
                if micro_batch in over[:-1]:  # the last backward's are freed by the next one
                    left.setdefault(place, set()).add(micro_batch)
            for place, some in left.items():
                if len(some) > 2 and place not in reported:
                    reported.add(place)
                    what = f"memory of {len(some)} micro-batches lives when they are over"
                    yield Finding("leak", place, what, "", ways(seen, place))
            if event.words.startswith(SUMS):
                break
            now = micro_batch_of(event)
    yield from steps(seen, persistent)


def micro_batch_of(event: Action) -> int:
    """Return the micro-batch of an action, or -1."""
    matched = MICRO_BATCH.match(event.words)
    return int(matched[1]) if matched else -1


def actions(seen: "Rehearsed") -> Iterator[tuple[int, int]]:
    """Yield the index and the micro-batch, or -1, of each action of the last step."""
    for index in range(seen.first, len(seen.recorder.events)):
        event = seen.recorder.events[index]
        if type(event) is Action:
            yield index, micro_batch_of(event)


def steps(seen: "Rehearsed", persistent: set[int]) -> Iterator[Finding]:
    """Yield the lines of which more memory lives after the last step than before it.

    What lives in another line's place, storage for storage of the same size, is not more: float8's
    first step scales by what is at hand, later ones by a history.
    """
    if seen.begin == seen.first:
        return  # one step was rehearsed
    before, then = (live_by_place(seen, end, persistent) for end in (seen.loop, seen.end))
    freed = Counter[int]()  # storages that lived before it, by their size
    for place, (count, nbytes) in before.items():
        freed[nbytes // count] += max(0, count - then.get(place, (0, 0))[0])
    for place, (count, nbytes) in then.items():
        had = before.get(place, (0, 0))
        if count > had[0]:
            size = (nbytes - had[1]) // (count - had[0])
            if freed[size] >= count - had[0]:
                freed[size] -= count - had[0]
                continue
            what = f"{nbytes - had[1]:,} bytes more live after a step than before it"
            yield Finding("leak", place, what, "", ways(seen, place))
    if len(seen.recorder.pinned_at) > 1:
        host_before, host_then = seen.recorder.pinned_at[-2:]
        for place, count in (host_then - host_before).items():
            what = f"{count} page-locked tensors more live after a step than before it"
            yield Finding("leak", place, what, "", ways(seen, place))


def live_by_place(seen: "Rehearsed", end: int, persistent: set[int]) -> dict[str, tuple[int, int]]:
    """Return how many storages live before an event, and their bytes, by the lines that began
    them.
    """
    in_use: dict[int, Alloc] = {}
    replay, now = seen.recorder.replay, -1
    for index in range(end):
        event = seen.recorder.events[index]
        if type(event) is Action:
            now = micro_batch_of(event)
        elif type(event) is Alloc and replay is not None and replay.copied(now):
            continue  # what ends of it may end with another micro-batch's
        elif type(event) is Alloc:
            in_use[event.storage] = event
        elif type(event) is Free:
            in_use.pop(event.storage, None)
    count, sizes = Counter[str](), Counter[str]()
    for number, event in in_use.items():
        if number not in persistent:
            count[line_of(seen, event)] += 1
            sizes[line_of(seen, event)] += event.bytes
    return {place: (count[place], sizes[place]) for place in count if place}


def line_of(seen: "Rehearsed", event: Alloc) -> str:
    """Return the line that allocated a storage."""
    return event.where.place or seen.recorder.born.get(event.storage, "")


def ways(seen: "Rehearsed", place: str) -> tuple[str, ...]:
    """Return the lines that led to a line: in the last step, or of a storage that began there."""
    for index, event in numbered(seen):
        if type(event) is Launch and event.where.place == place:
            if index in seen.recorder.chains:
                return seen.recorder.chains[index]
    return seen.recorder.led.get(place, ())


def unread(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the parts of a batch that no launch of the last step reads."""
    events, recorder = seen.recorder.events, seen.recorder
    given: dict[int, str] = {}
    for index in range(seen.loop, seen.first):
        event = events[index]
        if type(event) is Alloc and event.where.place.startswith(FED):
            given[event.storage] = event.where.place
    replay, parts = recorder.replay, max(1, len(given) // max(1, seen.micro_batches))
    if replay is not None:  # the copies of a micro-batch name what it read, not what they would
        given = {
            number: place
            for at, (number, place) in enumerate(given.items())
            if not replay.copied(at // parts)
        }
    forward: tuple[str, ...] = ()
    for index in range(seen.first, len(events)):
        event = events[index]
        if isinstance(event, (Launch, Transfer, HostUse)):
            for number in event.read:
                given.pop(number, None)
            if not forward and type(event) is Launch and event.where.phase == "forward":
                forward = recorder.chains.get(index, ())
    stage = seen.run.model.stages
    ends = any(one.embedding for one in stage) and any(one.loss for one in stage)
    for place in set(given.values()) if ends else ():
        name = seen.script.__file__.rpartition("/")[2] if seen.script.__file__ else ""
        own = next((line for line in forward if line.startswith(name)), place)
        yield Finding("unread", own, "a part of the batch is read by nothing in a step", place)


def unreleased(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the memory that lives where the flags free it: what is recomputed, what went to host
    memory, and unsharded gradients after their sum.
    """
    ends = {e.storage: i for i, e in numbered(seen) if type(e) is Free}
    yield from recomputed_again(seen, ends)
    yield from not_freed_by_offload(seen, ends)
    yield from after_sums(seen, ends)
    yield from after_passes(seen, ends)


def numbered(seen: "Rehearsed") -> Iterator[tuple[int, Event]]:
    """Yield the last step's events with their indices."""
    return enumerate(seen.recorder.events[seen.first :], seen.first)


def decided(seen: "Rehearsed", index: int) -> bool:
    """Return whether a storage begins in a decision, which recomputation takes as it is."""
    chains = seen.recorder.chains
    lines = next((chains[i] for i in range(index, index + NEXT_LAUNCH) if i in chains), ())
    return any(on_lines(line, DECIDES) for line in lines)


def recomputed_again(seen: "Rehearsed", ends: dict[int, int]) -> Iterator[Finding]:
    """Yield lines whose memory outlives the forward of what is recomputed, but for its output."""
    calls, begun = 0, dict[int, Alloc]()
    for index, event in numbered(seen):
        if type(event) is Call and event.name == RECOMPUTED:
            calls += 1
        elif type(event) is Alloc and event.where.again and event.where.phase == "forward":
            if not event.where.place.startswith(FLOAT8) and not decided(seen, index):
                begun[event.storage] = event
        elif type(event) is Action:
            alive = [one for n, one in begun.items() if ends.get(n, len(ends) + (1 << 62)) > index]
            if calls and len(alive) > PER_PART * calls:
                places = Counter(line_of(seen, one) for one in alive)
                place, count = places.most_common(1)[0]
                what = (
                    f"{len(alive)} storages of {calls} recomputed parts, {count} of them of this "
                )
                what += "line, live on after their forward, which backward runs again"
                yield Finding("leak", place, what, "", ways(seen, place))
                return
            calls, begun = 0, {}


def not_freed_by_offload(seen: "Rehearsed", ends: dict[int, int]) -> Iterator[Finding]:
    """Yield whether activations live on the device until backward, though they were copied away."""
    copied: dict[int, int] = {}
    for index, event in numbered(seen):
        if type(event) is Launch and event.where.place.startswith(OFFLOAD):
            if event.op == "memcpy DtoH":
                copied.update(dict.fromkeys(event.read, index))
            elif event.op == "memcpy HtoD":
                for number, at in copied.items():
                    if seen.recorder.sizes.get(number) and ends.get(number, index) >= index:
                        from mpu.activation_offload import _Unit

                        what = f"{seen.recorder.sizes[number]:,} bytes that were copied to host "
                        what += "memory live on the device until they come back"
                        place = seen.recorder.events[at].where.place  # type: ignore[union-attr]
                        lines = seen.recorder.chains.get(at, ())
                        yield Finding("leak", beginning(_Unit.leave), what, place, lines)
                        return
                copied.clear()


def after_sums(seen: "Rehearsed", ends: dict[int, int]) -> Iterator[Finding]:
    """Yield whether unsharded gradients live on when their owners have the sums, from stage 2 on.
    """
    from mpu.zero.bucket import ParamAndGradBucket

    recorder, update = seen.recorder, update_of(seen)
    for index, event in numbered(seen):
        bucket: Any = type(event) is Transfer and recorder.callers.get(event.id)
        if not isinstance(bucket, ParamAndGradBucket) or bucket.reduction.zero_stage < 2:
            continue
        assert type(event) is Transfer
        if not event.label.endswith(": grad sum") or event.axis != bucket.reduction.shard.name:
            continue
        for number in event.read:
            if ends.get(number, update) >= update:
                born = recorder.born.get(number, "")
                what = (
                    f"{event.bytes:,} bytes of unsharded gradients (made at {born}) live until the "
                )
                what += "update; their owners have the sums"
                place = beginning(ParamAndGradBucket._close_grad)
                lines = (*recorder.chains.get(index, ()), *ways(seen, born))
                yield Finding("leak", place, what, born, lines)
                return


def update_of(seen: "Rehearsed") -> int:
    """Return the index at which the last step's update begins."""
    updates = (
        i for i, e in numbered(seen) if type(e) is Action and e.words.startswith("the update")
    )
    return next(updates, len(seen.recorder.events))


def after_passes(seen: "Rehearsed", ends: dict[int, int]) -> Iterator[Finding]:
    """Yield whether weights that are gathered for a use live until the update."""
    from mpu.zero import gather

    recorder, update = seen.recorder, update_of(seen)
    for index, event in numbered(seen):
        if type(event) is not Transfer or not event.label.endswith(": gather"):
            continue
        bucket: Any = recorder.callers.get(event.id)
        if not getattr(bucket, "sharded", False) or bucket.float8 is not None:
            continue
        if any(ends.get(number, update) >= update for number in event.written):
            what = f"{event.bytes:,} bytes of weights, gathered for a use, live until the update"
            chain = recorder.chains.get(index, ())
            yield Finding("leak", beginning(gather._hide), what, event.where.place, chain)
            return


def for_nothing(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the launches with large results that nothing reads, and nothing keeps."""
    events, persistent = seen.recorder.events, set(seen.kinds())
    for bucket in seen.run.sink.buckets:
        for x in (bucket.weights, bucket.param_shard, bucket.grad, bucket.grad_shard):
            if x is not None:
                persistent.add(seen.recorder.live.get(x.untyped_storage()._cdata, (-1,))[0])
    made: dict[int, int] = {}  # storage: who wrote it last
    for index, event in numbered(seen):
        if isinstance(event, (Launch, Transfer, HostUse)):
            for number in event.read:
                made.pop(number, None)
        elif type(event) is HostWait:
            made.pop(event.storage, None)
        if type(event) is Launch and event.op.rpartition("::")[2] not in SETS:
            size = max((seen.recorder.sizes.get(n, 0) for n in event.written), default=0)
            # a recomputed region makes what backward alone reads in both of its runs
            if size >= LARGE and persistent.isdisjoint(event.written) and not event.where.again:
                made.update(dict.fromkeys(event.written, index))
    reported = set[str]()
    for index in dict.fromkeys(made.values()):
        launch = events[index]
        assert type(launch) is Launch
        if any(made.get(number) != index for number in launch.written):
            continue  # of several results one is read
        place = launch.where.place
        if place not in reported and launch.written:
            reported.add(place)
            what = (
                f"{launch.op} reads and writes {launch.bytes:,} bytes, and nothing reads what it "
            )
            what += "makes"
            yield Finding("for nothing", place, what, "", seen.recorder.chains.get(index, ()))
