# SPDX-License-Identifier: Apache-2.0
"""Find mistakes in the record of a rehearsed rank: what would fail, wait or be slow on a GPU.

Each rule asks the record, and nothing that is written down about the program, so it holds for a
changed model or training script as well:

    order, free, keep   what streams use without a wait (order.py, group.py)
    host read           where in a step the host waits, unless the program says that it must
    device, no kernel   what a launch is given, and torch's list of CUDA kernels
    dtype, float64      what work in a wider dtype than the run's costs, by bytes and FLOPs
    layout              what a kernel reads by address (mpu/kernels/by_address.py)
    overlap             transfers that a product could hide (exposed.py)
    traffic             a backward without the transfers of its forward (conjugates.py)
    communicator        one that NCCL would set up in a step
    leak                memory that grows (growth.py)
"""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from forecast.rehearsal.conjugates import one_way
from forecast.rehearsal.events import Action, HostWait, Launch, Transfer
from forecast.rehearsal.exposed import exposed
from forecast.rehearsal.growth import grown
from forecast.rehearsal.kernels_of_cuda import has_kernel
from forecast.rehearsal.order import Finding, order
from forecast.rehearsal.places import phase_of
from forecast.rehearsal.roofline import MATMULS, short_name
from mpu.optim.offload import Offload

if TYPE_CHECKING:
    from forecast.rehearsal.run import Rehearsed

PASSES = ("forward", "backward", "wgrad")
MESSAGES = ("send", "receive")
HALVES = ("bfloat16", "float16")
BY_VALUE = ("aten::fill_", "aten::index_put_", "aten::_fused_adamw_")  # take a number of the host
# What is done in a wider dtype than the run's is a choice while it costs less of a step than this:
# of the bytes that launches read and write for float64, of the FLOPs of products for float32.
DOUBLE, SINGLE = 0.01, 0.05
OF_STEPS = (one_way, grown, exposed)  # rules of a step that went through


def findings(seen: "Rehearsed") -> list[Finding]:
    """Return what is wrong, in the order in which it came, each place once."""
    found: dict[tuple[str, str, str], Finding] = {}
    every = [] if seen.failure is None else [seen.failure]
    every += seen.recorder.found
    if seen.recorder.device != "cpu":
        every += [*waits(seen), *launches(seen), *communicators(seen)]
        if seen.failure is None:
            every += [one for rule in OF_STEPS for one in rule(seen)]
    for one in [*every, *order(seen.recorder.events, seen.recorder.chains)]:
        found.setdefault((one.kind, one.place, one.also), one)
    return list(found.values())


def waits(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield where the host waits for the device in the last step: it launches nothing meanwhile.

    It may wait where the program says that it must (mpu.host_memory.read_values), and in an update
    that it computes itself. Of one step it is not known what only a first one does.
    """
    if seen.begin == seen.first:
        return
    phase = ""
    for index in range(seen.loop, seen.end):
        event = seen.recorder.events[index]
        if type(event) is Action:
            phase = phase_of(event.words)
        elif type(event) is HostWait and not event.declared:
            offloaded = phase == "update" and isinstance(seen.run.optimizer.home, Offload)
            if not offloaded:
                what = f"the host waits for the device ({event.reads or 'synchronize'}) in a step"
                through = seen.recorder.chains.get(index, ())
                yield Finding("host read", event.where.place, what, event.made, through)


def launches(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield what is wrong with the launches of the last step."""
    for index in range(seen.first, seen.end):
        event = seen.recorder.events[index]
        if type(event) is Launch:
            for kind, what in refused(event):
                yield at_launch(seen, index, kind, what)
    yield from wide(seen)


def refused(event: Launch) -> Iterator[tuple[str, str]]:
    """Yield the kind and the words of what CUDA would refuse of a launch."""
    if not has_kernel(event.op):
        yield "no kernel", f"{event.op} has no CUDA kernel"
    if event.host and event.op not in BY_VALUE:
        yield "device", f"{event.op} takes a tensor in host memory (made at {event.host[0]})"


def wide(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the lines whose work in a wider dtype than the run's costs a part of the last step."""
    narrow = str(seen.config.run.dtype).removeprefix("torch.")
    double, single, first = Counter[str](), Counter[str](), dict[tuple[str, str], int]()
    moved, flops, phase = 0, 0.0, ""
    for index in range(seen.first, seen.end):
        event = seen.recorder.events[index]
        if type(event) is Action:
            phase = phase_of(event.words)
        if type(event) is not Launch:
            continue
        place = event.where.place
        moved += event.bytes
        if "float64" in event.dtypes:
            double[place] += event.bytes
            first.setdefault(("float64", place), index)
        if phase in PASSES:
            flops += event.flops
            if in_single(event):
                single[place] += int(event.flops)
                first.setdefault(("dtype", place), index)
    for place, count in double.items() if narrow != "float64" else ():
        if count > DOUBLE * moved:
            index = first["float64", place]
            what = f"{op_of(seen, index)} computes in float64"
            yield at_launch(seen, index, "float64", what)
    for place, count in single.items() if narrow in HALVES else ():
        if count > SINGLE * flops:
            index = first["dtype", place]
            what = f"{op_of(seen, index)} multiplies in float32 in a {narrow} run"
            yield at_launch(seen, index, "dtype", what)


def in_single(event: Launch) -> bool:
    """Return whether a launch multiplies factors in float32."""
    at = MATMULS.get(short_name(event), 0)  # where its factors stand, behind what it adds to
    ours = event.op.startswith("triton::")  # they load each tensor in its dtype
    return bool(event.flops) and not ours and "float32" in event.dtypes[at : at + 2]


def op_of(seen: "Rehearsed", index: int) -> str:
    """Return the operation of a launch."""
    event = seen.recorder.events[index]
    assert type(event) is Launch
    return event.op


def at_launch(seen: "Rehearsed", index: int, kind: str, what: str) -> Finding:
    """Return a finding at a launch. Its other place: where its first tensor was made."""
    event, recorder = seen.recorder.events[index], seen.recorder
    assert type(event) is Launch
    made = [recorder.born.get(n, "") for n in (*event.read, *event.written)]
    through = (*made, *event.host, *recorder.chains.get(index, ()))
    return Finding(kind, event.where.place, what, (*made, "")[0], through)


def communicators(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the collectives that are the first of their communicator, in a step."""
    for index in range(seen.begin, len(seen.recorder.events)):
        event = seen.recorder.events[index]
        if type(event) is Transfer and event.verb not in MESSAGES and event.number == 0:
            what = (
                f"the communicator of {event.axis} begins in a step, with this {event.verb}: NCCL "
                "sets it up then, and may wait for a rank that waits for this one"
            )
            through = seen.recorder.chains.get(index, ())
            yield Finding("communicator", event.where.place, what, "", through)
