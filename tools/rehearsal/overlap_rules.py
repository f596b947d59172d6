# SPDX-License-Identifier: Apache-2.0
"""Transfers that the flags hide under computation: each must have some between start and wait."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mpu.pipeline.schedules import Action, Schedule
from mpu.pipeline.steps import last_needed
from mpu.zero.gather import Gatherer
from mpu.zero.param_and_grad_buffer import ParamAndGradBuffer
from tools.rehearsal.events import Launch, Record, Transfer, Wait
from tools.rehearsal.order import Finding
from tools.rehearsal.places import STATE, beginning
from tools.rehearsal.traffic_rules import caller

if TYPE_CHECKING:
    from tools.rehearsal.run import Rehearsed

GATHERS = "gathers of weights under the block before"
SMALL = 1 << 12  # bytes of a copy that may be on the stream that computes
IN_ONE_PIECE = "mpu/layers/linear_cross_entropy.py"  # its gathers and sums have no overlap
ACTIVATIONS = "mpu/activation_offload.py"
CARRIES = ("mpu/optim/offload.py", STATE, ACTIVATIONS)


def not_hidden(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the transfers of the last step that nothing hides, of the kinds that are hidden."""
    yield from copies(seen)
    yield from carried(seen)
    yield from late_sums(seen)
    events, exposed, every = seen.recorder.events, dict[str, list[int]](), Counter[str]()
    started: dict[int, tuple[int, str, int]] = {}  # transfer: index, sort, launches before
    launches = 0
    for index in range(seen.first, len(events)):
        event = events[index]
        if type(event) is Launch and event.stream == 0:
            launches += 1
        elif type(event) is Transfer:
            if sort := sort_of(seen, event):
                every[sort] += 1
                started[event.id] = index, sort, launches
        elif type(event) is Wait and event.transfer in started:
            at, sort, before = started.pop(event.transfer)
            if launches == before:
                exposed.setdefault(sort, []).append(at)
    for sort, indices in exposed.items():
        if len(indices) > allowed(seen, sort, every[sort]):
            through = dict.fromkeys(
                line for i in indices for line in seen.recorder.chains.get(i, ())
            )
            event = events[indices[-1]]
            assert type(event) is Transfer
            what = f"{sort}: {len(indices)} of {every[sort]} transfers have no computation between "
            what += "start and wait"
            starts = beginning(Gatherer._follow) if sort == GATHERS else caller(seen, indices[-1])
            yield Finding("overlap", event.where.place, what, starts, tuple(through))


def late_sums(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield whether sums of gradients that backward hides start when backward is over."""
    sink, started = seen.run.sink, list[Any]()
    if not seen.config.parallel.overlap_grad_reduce:
        return
    for index in range(seen.first, len(seen.recorder.events)):
        event = seen.recorder.events[index]
        if type(event) is not Transfer or not event.label.endswith(": grad sum"):
            continue
        bucket: Any = seen.recorder.callers.get(event.id)
        first = bucket not in started  # the next ones follow it, wherever it ends
        started.append(bucket)
        of_bucket = bucket in sink._early and event.axis == bucket.reduction.shard.name
        if of_bucket and event.where.phase == "grad sum" and first:
            what = "the sum of gradients that are there starts when all backward is over"
            through = seen.recorder.chains.get(index, ())
            starts = beginning(ParamAndGradBuffer.register_grad_ready)
            yield Finding("overlap", event.where.place, what, starts, through)
            return


def sort_of(seen: "Rehearsed", event: Transfer) -> str:
    """Return what hides a transfer, in words; "" where nothing has to."""
    p, phase, label = seen.config.parallel, event.where.phase, event.label
    if label.endswith(": grad sum") and p.overlap_grad_reduce and phase != "grad sum":
        return "sums of gradients under backward" if event.verb == "reduce_scatter" else ""
    if label.endswith(": gather") and p.overlap_param_gather:
        return GATHERS
    if label.endswith(": update") and p.overlap_param_gather:
        return "gathers of updated weights under the next forward"
    if event.axis == "tp" and event.verb == "receive":
        return ""  # it goes with a send
    if label.endswith(": wgrad"):
        return ""  # a deferred gradient gathers its operand, and multiplies it at once
    if event.axis == "tp" and event.verb == "send" and p.tp_comm_overlap == "ring":
        return "parts of a ring of matmuls"
    if event.axis == "tp" and label.startswith("ColumnParallelLinear: backward"):
        deferred = seen.run.engine.schedule is not None and seen.run.engine.schedule.split
        if getattr(seen.recorder.callers.get(event.id), "output_layer", False):
            deferred = deferred or p.defer_embedding_wgrad_compute
        if not deferred and not event.where.place.startswith(IN_ONE_PIECE):
            return "gathers and sums of a column-parallel layer's backward"
    if event.axis == "cp" and label.startswith("core_attention") and event.verb != "all_to_all":
        return "keys and values under attention"
    if event.verb == "receive" and event.axis in ("pp", "pp_back"):
        return "messages between stages"
    return ""


def allowed(seen: "Rehearsed", sort: str, count: int) -> int:
    """Return how many transfers of a sort may be exposed, of so many."""
    if sort.startswith("gathers of weights"):
        return max(2 * seen.micro_batches, count // 2)
    if sort.startswith("messages"):
        return answers(seen.run.engine.schedule, seen.grid.pp.rank)
    if sort.startswith("parts") and seen.grid.tp.size > 2:
        return count // 2  # what is gathered during a matmul travels in several parts
    if sort.startswith("sums of gradients"):
        return 1 + count // 4
    return 0


def answers(schedule: Schedule, rank: int) -> int:
    """Return how many messages a rank is sent in answer to the action before their use.

    No computation can stand between their start and their wait, whoever posts them: of one
    micro-batch all are of this kind. B and W of a schedule that is not split are one action, and so
    overlaps an F.
    """
    actions, count = schedule.ranks[rank], 0
    for message, needed in last_needed(schedule).items():
        if message.to == rank:
            begin = schedule.begin(rank, actions.index(Action(*message[:3])))
            count += needed >= (schedule.begin(rank, begin - 1) if begin else -1)
    return count


def copies(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the copies to or from the host that hold up the stream that computes."""
    for index in range(seen.first, len(seen.recorder.events)):
        event = seen.recorder.events[index]
        if type(event) is Launch and event.op.startswith("memcpy") and event.stream == 0:
            if event.where.place.startswith(CARRIES) and event.bytes:
                what = f"{event.op} of {event.bytes:,} bytes on the stream that computes"
                through = seen.recorder.chains.get(index, ())
                yield Finding("overlap", event.where.place, what, "", through)


def carried(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the copies of activations whose end the computing stream waits for at once."""
    marks: dict[int, tuple[int, int, str]] = {}  # event: launches before, the copy's index, its op
    copied: dict[int, tuple[int, str]] = {}  # stream: the last copy
    launches = 0
    for index in range(seen.first, len(seen.recorder.events)):
        event = seen.recorder.events[index]
        if type(event) is Launch and event.stream == 0:
            launches += 1
        elif type(event) is Launch and event.op.startswith("memcpy"):
            if event.where.place.startswith(ACTIVATIONS):
                copied[event.stream] = index, event.op
        elif type(event) is Record and event.stream in copied:
            marks[event.event] = launches, *copied.pop(event.stream)
        elif type(event) is Wait and event.stream == 0 and event.event in marks:
            before, copy, op = marks.pop(event.event)
            if before == launches:
                what = f"{op} of activations has no computation between start and wait"
                chains = seen.recorder.chains
                through = (*chains.get(copy, ()), *chains.get(index, ()))
                place = seen.recorder.events[copy].where.place  # type: ignore[union-attr]
                yield Finding("overlap", place, what, event.place, through)
                return
