# SPDX-License-Identifier: Apache-2.0
"""What a whole step must have: gradients summed over every axis, communicators that are there."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mpu.layers.embedding import VocabParallelEmbedding
from mpu.layers.fused import ResidualRMSNorm, RMSNorm
from mpu.param import placement_of, tie
from mpu.zero.norm import GlobalNorm
from mpu.zero.reduce import sum_over_data, sum_over_extra_axes
from tools.rehearsal.events import Launch, Transfer
from tools.rehearsal.order import Finding
from tools.rehearsal.places import beginning, defined
from tools.rehearsal.traffic_rules import is_own_llama

if TYPE_CHECKING:
    from tools.rehearsal.run import Rehearsed

SUMS = ("reduce_scatter", "all_reduce", "all_to_all")
MESSAGES = ("send", "receive")
# What is one number of the whole model, by the label of its sums: the axes over which it is summed.
SUMMED_OVER = {"optimizer: norm": ("tp", "pp"), "train_step: loss sum": ("dp_cp", "pp")}


def in_last_step(seen: "Rehearsed") -> Iterator[Finding]:
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


def unplaced(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the weights whose gradient is a part, by what the record shows, and not by Placement.

    A norm that meets a rank's part of the tokens gives a part of the gradient of its weight, and so
    does each end of a pipeline of the tied weights that both hold.
    """
    model, grid, events = seen.run.model, seen.grid, seen.recorder.events
    batch, config = seen.config.batch, seen.config.model
    tokens = batch.micro_batch_size * config.seq_length // grid.cp.size
    norms = {n: m for n, m in model.named_modules() if type(m) in (RMSNorm, ResidualRMSNorm)}
    function = beginning(sum_over_extra_axes)
    for index in range(seen.first, len(events)):
        event = events[index]
        if type(event) is not Launch or event.where.layer not in norms or grid.tp.size == 1:
            continue
        if event.where.phase != "forward" or "norm_forward" not in event.op:
            continue
        weight = norms.pop(event.where.layer).weight
        rows = math.prod(event.shapes[0]) // weight.numel()
        over = {axis.name for axis in placement_of(weight).reduce_axes}
        if rows * grid.tp.size == tokens and grid.tp.name not in over:
            what = f"{event.where.layer}: each rank of tp norms {rows:,} of {tokens:,} tokens, and "
            what += "the Placement of its weight does not say that its gradients are summed over tp"
            through = seen.recorder.chains.get(index, ())
            yield Finding("sum", function, what, event.where.place, through)
    tied = not config.untie_embeddings_and_output_weights and grid.pp.size > 1
    ends = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding)]
    ends += [m for m in model.modules() if getattr(m, "output_layer", False)]
    for module in ends if tied and len(ends) == 1 and is_own_llama(seen) else ():
        if grid.embd.name not in {axis.name for axis in placement_of(module.weight).reduce_axes}:
            what = "a tied weight is on both ends of the pipeline, and its Placement does not "
            what += "say that its gradients are summed over embd"
            yield Finding("sum", function, what, beginning(tie))


def place_of_sum(seen: "Rehearsed", label: str) -> str:
    """Return where a number of the whole model is summed, or should be."""
    if label.startswith("optimizer"):
        return beginning(GlobalNorm.__call__)
    return defined(seen.script.__file__ or "", label.partition(":")[0])


def partial(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the axes over which a number of the whole model was not summed in the last step."""
    for label, axes in SUMMED_OVER.items():
        sums = [
            (index, event)
            for index, event in enumerate(seen.recorder.events[seen.first :], seen.first)
            if type(event) is Transfer and event.label == label
        ]
        over = {event.axis for _, event in sums}
        for axis in axes:
            if getattr(seen.grid, axis).size > 1 and axis not in over:
                place = sums[-1][1].where.place if sums else place_of_sum(seen, label)
                through = tuple(line for i, _ in sums for line in seen.recorder.chains.get(i, ()))
                yield Finding("sum", place, f"{label}: nothing is summed over {axis}", "", through)
