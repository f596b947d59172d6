# SPDX-License-Identifier: Apache-2.0
"""Find mistakes in the record of a rehearsed rank: errors, waits and slow work on a GPU.

Each rule reads only the record and assumes nothing about the program, so it also holds for a
changed model or training script:

    order, free, keep   memory used or freed without a wait (order.py, group.py)
    host read           the host waits in a step, and the program does not declare that it must
    device, no kernel   a launch on tensors in host memory; an operation without a CUDA kernel
    dtype, float64      costly work in a wider dtype than the run's, by bytes and FLOPs
    layout              strides that a kernel misreads by address (mpu/kernels/by_address.py)
    overlap             exposed transfers that a matmul could hide (exposed.py)
    traffic             a backward without the conjugate transfers of its forward (conjugates.py)
    communicator        a communicator that NCCL would set up in a step
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
BY_VALUE = ("aten::fill_", "aten::index_put_", "aten::_fused_adamw_")  # accept host scalars
# Work in a wider dtype than the run's is reported above these shares of a step: for float64 a share
# of the bytes that launches read and write, for float32 a share of the FLOPs of matmuls.
DOUBLE, SINGLE = 0.01, 0.05
OF_STEPS = (one_way, grown, exposed)  # rules that need a complete step


def findings(seen: "Rehearsed") -> list[Finding]:
    """Return the findings of all rules, each kind once for a pair of places."""
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
    """Yield the host's waits for the device in the last step, during which it launches nothing.

    Waits are allowed if the program declares them (mpu.host_memory.read_values), and in an update
    that the host computes itself. If only one step ran, none are reported: they may be a first
    step's.
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
    """Yield the findings on launches of the last step."""
    for index in range(seen.first, seen.end):
        event = seen.recorder.events[index]
        if type(event) is Launch:
            for kind, what in refused(event):
                yield at_launch(seen, index, kind, what)
    yield from wide(seen)


def refused(event: Launch) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) for each reason why CUDA would refuse a launch."""
    if not has_kernel(event.op):
        yield "no kernel", f"{event.op} has no CUDA kernel"
    if event.host and event.op not in BY_VALUE:
        yield "device", f"{event.op} takes a tensor in host memory (made at {event.host[0]})"


def wide(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the lines whose work in a wider dtype than the run's is costly in the last step."""
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
    """Return whether a launch multiplies float32 matrices."""
    at = MATMULS.get(short_name(event), 0)  # index of its first factor
    ours = event.op.startswith("triton::")  # Weft's kernels load each tensor in its dtype
    return bool(event.flops) and not ours and "float32" in event.dtypes[at : at + 2]


def op_of(seen: "Rehearsed", index: int) -> str:
    """Return the operation of a launch."""
    event = seen.recorder.events[index]
    assert type(event) is Launch
    return event.op


def at_launch(seen: "Rehearsed", index: int, kind: str, what: str) -> Finding:
    """Return a finding at a launch. Its other place is the line that made its first tensor."""
    event, recorder = seen.recorder.events[index], seen.recorder
    assert type(event) is Launch
    made = [recorder.born.get(n, "") for n in (*event.read, *event.written)]
    through = (*made, *event.host, *recorder.chains.get(index, ()))
    return Finding(kind, event.where.place, what, (*made, "")[0], through)


def communicators(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the collectives in a step that are the first of their communicator."""
    for index in range(seen.begin, len(seen.recorder.events)):
        event = seen.recorder.events[index]
        if type(event) is Transfer and event.verb not in MESSAGES and event.number == 0:
            what = (
                f"this {event.verb} is the first on the communicator of {event.axis}, so NCCL sets "
                "it up in a step, which may wait for a rank that waits for this one"
            )
            through = seen.recorder.chains.get(index, ())
            yield Finding("communicator", event.where.place, what, "", through)
