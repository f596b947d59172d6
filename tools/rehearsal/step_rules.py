# SPDX-License-Identifier: Apache-2.0
"""What a whole step must have: gradients summed over every axis, communicators that are there."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mpu.zero.reduce import sum_over_data, sum_over_extra_axes
from tools.rehearsal.events import Transfer
from tools.rehearsal.order import Finding
from tools.rehearsal.places import beginning

if TYPE_CHECKING:
    from tools.rehearsal.run import Rehearsed

SUMS = ("reduce_scatter", "all_reduce", "all_to_all")
MESSAGES = ("send", "receive")
# What is one number of the whole model, by the label of its sums: the axes over which it is summed.
WHOLE = {"optimizer: norm": ("tp", "pp"), "train_step: loss sum": ("dp_cp", "pp")}


def in_whole_step(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield what is wrong with the last step as a whole, and with communicators in any step."""
    if seen.recorder.device == "cpu" or seen.failure is not None:
        return
    yield from unsummed(seen)
    yield from partial(seen)
    for index in range(seen.begin, len(seen.recorder.events)):
        event = seen.recorder.events[index]
        if type(event) is not Transfer or event.verb in MESSAGES:
            continue
        through = seen.recorder.chains.get(index, ())
        if event.number == 0:
            what = (
                f"the communicator of {event.axis} begins in a step, with this {event.verb}: NCCL "
                "sets it up then, and may wait for a rank that waits for this one"
            )
            yield Finding("communicator", event.where.place, what, "", through)
        if event.axis == "pp_back":
            what = f"{event.verb} over pp_back, which carries messages to earlier stages only"
            yield Finding("axis", event.where.place, what, "", through)


def unsummed(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the axes over which fewer gradients were summed than the placements ask for.

    Every bucket is summed once over its extra axes, once or once a micro-batch over the ranks that
    share it, and its parts once over the optimizer's instances.
    """
    sink, must, place = seen.run.sink, Counter[str](), {}

    def needs(axis: Any, numbers: int, function: Callable[..., Any]) -> None:
        if axis.size > 1:
            must[axis.name] += numbers
            place[axis.name] = beginning(function)

    for bucket in sink.buckets:
        for axis in bucket.reduce_axes:
            needs(axis, bucket.length, sum_over_extra_axes)
        how = bucket.reduction
        each = sink.each and not bucket.reduce_axes and how.zero_stage >= 2
        shard, replicate = how.shard, how.replicate
        needs(shard, bucket.length * (seen.micro_batches if each else 1), sum_over_data)
        needs(replicate, bucket.length // shard.size, sum_over_data)
    summed = Counter[str]()
    for event in seen.recorder.events[seen.first :]:
        if type(event) is Transfer and event.label.endswith(": grad sum") and event.verb in SUMS:
            summed[event.axis] += math.prod(event.shape)
    for axis, numbers in must.items():
        if summed[axis] < numbers:
            what = f"{summed[axis]:,} of {numbers:,} gradients are summed over {axis} in a step"
            yield Finding("sum", place[axis], what)


def partial(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the axes over which a number of the whole model was not summed in the last step."""
    for label, axes in WHOLE.items():
        sums = [
            (index, event)
            for index, event in enumerate(seen.recorder.events[seen.first :], seen.first)
            if type(event) is Transfer and event.label == label
        ]
        over = {event.axis for _, event in sums}
        for axis in axes:
            if getattr(seen.grid, axis).size > 1 and axis not in over:
                place = sums[-1][1].where.place if sums else ""
                through = tuple(line for i, _ in sums for line in seen.recorder.chains.get(i, ()))
                yield Finding("sum", place, f"{label}: nothing is summed over {axis}", "", through)
