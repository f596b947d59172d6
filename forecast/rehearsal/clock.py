# SPDX-License-Identifier: Apache-2.0
"""Time one rank's record on a device: the host issues in order, streams run side by side.

    Launch     begins when issued and when its stream is free
    Call       costs the host alone, as launches and transfers do (roofline.py, host_seconds)
    Transfer   begins when issued, when its communicator's stream is free and when the stream that
               called it has reached that point; transfers of one batch begin together. A receive
               ends as it begins: pipeline_clock.py knows better
    Record     marks how far a stream is; Wait makes a stream wait, HostWait the host

A transfer needs SMs. On a stream of high priority it gets them at once. On another it queues behind
the kernel that computes when it could begin, or that can begin at that very time, as the
transfer's stream still waits for its event then. It begins in that kernel's tail, in which SMs are
free. A matmul during a collective has the SMs that the collective leaves. What a stream waits for
while nothing else keeps it, the host included, is exposed: it counts for the axis that it waits
for, or for the link between device and host.

Streams are not played by mpu/pipeline/play.py, as stages and cores are. There each event names
those that it comes after. Here which kernel a transfer comes behind depends on when the transfer
could begin, so on times that are known only when all before it has been played; one pass in the
order in which the host issues has them.
"""

import re
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from forecast.device_file import Device
from forecast.rehearsal.events import (
    Action,
    Call,
    Event,
    HostWait,
    Launch,
    Record,
    Transfer,
    Wait,
    Where,
)
from forecast.rehearsal.links import bandwidth, collective_seconds, message_seconds, spans
from forecast.rehearsal.roofline import (
    MATMULS,
    MESSAGES,
    Kernel,
    host_seconds,
    kernel_of,
    kind_of,
    matmul_dtype,
    short_name,
)

HOST_LINK = "host link"  # between device and host, each way as fast as the other
ITERATION = re.compile(r"of iteration (\d+)")


class Span(NamedTuple):
    """Something on a stream, for a trace: seconds since the record's begin."""

    stream: int
    name: str
    begin: float
    end: float
    where: Where


class ActionSpan(NamedTuple):
    """What the computing stream did under one Action: seconds, and its place in Timing.spans.

    in_layers: of these seconds, those from the first kernel of the model's layers to their last.
    """

    words: str
    begin: float
    end: float
    first_span: int
    in_layers: float = 0.0


class Busy(NamedTuple):
    """A kernel on the computing stream, from begin to end; in its tail SMs are free."""

    begin: float
    end: float
    tail: float


@dataclass
class Timing:
    """How long a rank's step takes and why.

    Its computing stream is busy, waits for communication or waits for the host: the step is the sum
    of busy_seconds, exposed_seconds and host_seconds.

    step_seconds: of the last iteration recorded. mfu: share of the device's dense peak of the
    matmuls' dtype that the model's FLOPs reach. busy_seconds: of kernels on the computing stream,
    by KINDS. exposed_seconds: by axis, communication that nothing hides. bounds: what each resource
    alone would need; bound_seconds is the largest and bound_by its name. host_seconds: the
    computing stream idle because the host issues too slowly.
    """

    step_seconds: float
    mfu: float = 0.0
    busy_seconds: dict[str, float] = field(default_factory=dict)
    exposed_seconds: dict[str, float] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)
    host_seconds: float = 0.0
    spans: list[Span] = field(default_factory=list)
    actions: list[ActionSpan] = field(default_factory=list)

    @property
    def bound_seconds(self) -> float:
        return max(self.bounds.values(), default=0.0)

    @property
    def bound_by(self) -> str:
        return max(self.bounds, key=lambda name: self.bounds[name], default="nothing")

    @property
    def launch_bound_share(self) -> float:
        return self.host_seconds / self.step_seconds if self.step_seconds else 0.0


class Clock:
    """The state of the host, the streams and the communicators; `run` takes events, one by one."""

    def __init__(self, device: Device, rank: int = 0, trace: bool = True) -> None:
        self.device, self.rank, self.trace = device, rank, trace
        self.host = 0.0
        self.free: dict[int, float] = defaultdict(float)  # when each stream has done all it has
        self.waits_for: dict[int, str] = defaultdict(str)  # the axis that moved `free` last
        self.host_waits_for = ""
        self.ready: dict[int, float] = {}  # `free` before its waits, of a stream that waits
        self.host_ready = 0.0
        self.marks: dict[int, tuple[float, str]] = {}
        self.ends: dict[int, tuple[float, str]] = {}
        self.batches: dict[int, float] = {}
        self.batch = -1  # the one that the host has begun last
        self.kernels: deque[Busy] = deque()  # those that end after the host's time
        # transfers that wait for SMs, by stream: each with the time at which it could begin
        self.queued: dict[int, deque[tuple[float, Transfer]]] = defaultdict(deque)
        self.streams: dict[int, int] = {}  # of each of these transfers
        self.busy: list[tuple[float, float]] = []  # begin and end of collectives, the last ones
        self.timing = Timing(0.0)
        self.exposed: dict[str, float] = defaultdict(float)
        self.bounds: dict[str, float] = defaultdict(float)
        self.kinds: dict[str, float] = defaultdict(float)  # Timing.busy_seconds
        self.words, self.began, self.from_span = "", 0.0, 0
        self.in_layers = 0.0  # seconds of the action
        self.layers_end: float | None = None  # of the computing stream's last kernel, if a layer's
        self.iteration, self.iteration_began, self.iterations = "", 0.0, 0
        self.under_next: set[int] = set()  # streams whose last copies go on in the next iteration
        self.seconds: dict[tuple[object, ...], float] = {}
        self.alone: dict[tuple[object, ...], Kernel] = {}

    def run(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Launch):
                self._launch(event)
            elif isinstance(event, Transfer):
                self._transfer(event)
            elif isinstance(event, Wait):
                if event.transfer in self.streams:
                    self._advance(self.streams[event.transfer])
                known = self.ends if event.event < 0 else self.marks
                which = event.transfer if event.event < 0 else event.event
                self._block(event.stream, *known.get(which, (0.0, "")))  # none: before the record
            elif isinstance(event, Record):
                stream = event.stream
                self._advance(stream)
                self.marks[event.event] = self.free[stream], self.waits_for[stream]
            elif isinstance(event, HostWait):
                self._host_wait(event)
            elif isinstance(event, Call):
                self._launch_cost(host_seconds(self.device, event))
            elif isinstance(event, Action):
                self._action(event.words)

    def finish(self, flops: float, dtype: str) -> Timing:
        """Return the timing of what ran; flops: of the model, in one step of this rank."""
        self._action("")
        for waiting in list(self.queued):
            self._advance(waiting)
        # what an iteration sends down under the next one's forward, the next one waits for
        leave = self.under_next if self.iterations > 1 else ()
        free = {stream: time for stream, time in self.free.items() if stream not in leave}
        last = max([self.host, *free.values()])
        late = max(free, key=lambda stream: free[stream])
        done = max(self.ready.get(0, self.free[0]), self.iteration_began)  # of the last kernel
        for stream in (0, late):  # what the computing stream waits for, then what else goes on
            if self.free[stream] > done and self.waits_for[stream]:
                self.exposed[self.waits_for[stream]] += self.free[stream] - done
                done = self.free[stream]
        self.timing.host_seconds += max(0.0, last - max(done, self.free[late]))
        timing = self.timing
        timing.step_seconds = last - self.iteration_began
        if flops and timing.step_seconds:
            timing.mfu = flops / (timing.step_seconds * self.device.peak(dtype))
        timing.exposed_seconds, timing.bounds = dict(self.exposed), dict(self.bounds)
        timing.busy_seconds = dict(self.kinds)
        return timing

    def _launch_cost(self, seconds: float) -> None:
        """Let the host launch something, which takes it so long."""
        self.host += seconds
        self.bounds["host"] += seconds

    def _launch(self, event: Launch) -> None:
        device, stream = self.device, event.stream
        self._launch_cost(host_seconds(device, event))
        free = self.free[stream]
        begin = max(self.host, free)
        if stream == 0 and begin > 0:
            self._idle(begin)
        if stream == 0:
            self._begin_before(begin)
        end = begin + self._kernel(event, begin)
        if stream == 0:
            self.kinds[kind_of(event)] += end - begin
            tail = self.alone[key_of(event)].tail
            self.kernels.append(Busy(begin, end, min(tail, end - begin)))
            self._begin_behind(self.kernels[-1])
            in_layer = event.where.layer.startswith("layers.")
            if in_layer:
                self.in_layers += end - (begin if self.layers_end is None else self.layers_end)
            self.layers_end = end if in_layer else None
        self.free[stream] = end
        self.ready.pop(stream, None)
        copies = event.op.startswith("memcpy ")
        down = copies and event.op.endswith("DtoH") and event.where.part == "state"
        (self.under_next.add if down and stream else self.under_next.discard)(stream)
        if copies and stream:
            self.waits_for[stream] = HOST_LINK
        elif not stream or begin > free:  # else it is late by what the stream waited for
            self.waits_for[stream] = ""
        if event.flops:
            self.bounds["matmul"] += event.flops / device.peak(matmul_dtype(event))
        link = HOST_LINK if copies else "memory"
        bandwidth_key = "host_bandwidth" if copies else "bandwidth"
        self.bounds[link] += event.bytes / device[bandwidth_key]
        if self.trace:
            self.timing.spans.append(Span(stream, event.op, begin, end, event.where))

    def _kernel(self, event: Launch, begin: float) -> float:
        """Return a kernel's seconds; a matmul has fewer SMs while a collective runs."""
        key = key_of(event)
        kernel = self.alone.get(key)
        if kernel is None:
            kernel = self.alone[key] = kernel_of(self.device, event)
        alone = kernel.seconds
        if not event.flops or not self.busy:
            return alone
        self.busy = [span for span in self.busy if span[1] > begin]
        if not self.busy:
            return alone
        slow = self.seconds.get(("overlap", key))
        if slow is None:
            left = max(1.0, self.device["sms"] - self.device["collective_sms"])
            slow = self.seconds["overlap", key] = kernel_of(self.device, event, left).seconds
        at, done = begin, 0.0
        for first, last in sorted(self.busy):
            alone_until = max(at, first)
            if done + (alone_until - at) / alone >= 1:
                break
            done += (alone_until - at) / alone
            at = alone_until
            overlap = max(at, last) - at
            if done + overlap / slow >= 1:
                return at + (1 - done) * slow - begin
            done += overlap / slow
            at += overlap
        return at + (1 - done) * alone - begin

    def _transfer(self, event: Transfer) -> None:
        if event.batch == -1 or event.batch != self.batch:  # a batch is one call
            self._launch_cost(host_seconds(self.device, event))
        self.batch = event.batch
        ready = max(self.host, self.free[event.origin])
        while self.kernels and self.kernels[0].end <= self.host:
            self.kernels.popleft()
        self.queued[event.stream].append((ready, event))
        self.streams[event.id] = event.stream
        if event.urgent or event.stream == 0:
            self._advance(event.stream)
        elif ready < self.free[0]:  # another stream called it: kernels after `ready` are known
            for kernel in self.kernels:
                self._begin_before(kernel.begin)
                self._begin_behind(kernel)

    def _advance(self, stream: int) -> None:
        """Begin the transfers of a stream that wait for SMs: no kernel is before them."""
        while self.queued[stream]:
            self._begin(stream, 0.0)

    def _begin_before(self, time: float) -> None:
        """Begin the transfers that can before the next kernel is ready."""
        for stream, waiting in self.queued.items():
            while waiting and max(waiting[0][0], self.free[stream]) < time:
                self._begin(stream, 0.0)

    def _begin_behind(self, kernel: Busy) -> None:
        """Begin in a kernel's tail the transfers that could begin while it runs."""
        for stream, waiting in self.queued.items():
            while waiting and max(waiting[0][0], self.free[stream]) < kernel.end:
                self._begin(stream, kernel.end - kernel.tail)

    def _begin(self, stream: int, earliest: float) -> None:
        """Begin the first transfer that waits on a stream."""
        ready, event = self.queued[stream].popleft()
        del self.streams[event.id]
        begin = max(ready, self.free[stream], earliest)
        if event.batch != -1:
            begin = self.batches.setdefault(event.batch, begin)
        seconds = self._seconds(event)
        end = begin + seconds
        if end >= self.free[stream]:
            self.free[stream], self.waits_for[stream] = end, event.axis
        self.ends[event.id] = end, event.axis
        if seconds and event.verb not in MESSAGES and event.stream != 0:
            self.busy.append((begin, end))
        device = self.device
        if event.sent:
            ends = (self.rank, event.peer) if event.verb in MESSAGES else event.group
            level = spans(device.blocks, ends)[-1].level
            self.bounds[device.levels[level].name] += event.sent / bandwidth(device, level)
        if self.trace:
            name = f"{event.verb} {event.axis} {event.bytes}"
            self.timing.spans.append(Span(stream, name, begin, end, event.where))

    def _seconds(self, event: Transfer) -> float:
        key = (event.verb, event.bytes, event.group, event.peer)
        seconds = self.seconds.get(key)
        if seconds is None:
            if event.verb == "receive":
                seconds = 0.0
            elif event.verb == "send":
                seconds = message_seconds(self.device, event.bytes, self.rank, event.peer)
            else:
                seconds = collective_seconds(self.device, event.verb, event.bytes, event.group)
            self.seconds[key] = seconds
        return seconds

    def _block(self, stream: int, until: float, axis: str) -> None:
        """Make a stream wait."""
        if until > self.free[stream]:
            self.ready.setdefault(stream, self.free[stream])
            self.free[stream] = until
            self.waits_for[stream] = axis

    def _host_wait(self, event: HostWait) -> None:
        for waiting in list(self.queued) if event.event < 0 else ():
            if event.stream in (-1, waiting):
                self._advance(waiting)
        if event.event >= 0:
            until, axis = self.marks.get(event.event, (0.0, ""))
        else:
            streams = [event.stream] if event.stream >= 0 else list(self.free)
            late = max(streams, key=lambda stream: self.free[stream], default=0)
            until, axis = self.free[late], self.waits_for[late]
        if until > self.host:
            if not self.host_waits_for:
                self.host_ready = self.host
            self.host, self.host_waits_for = until, axis

    def _idle(self, begin: float) -> None:
        """Tell why the computing stream was idle until `begin`: an axis, or the host."""
        free = self.free[0]
        ready = self.ready.get(0, free)
        if free >= begin and free > ready:  # it waited for a transfer
            axis, since = self.waits_for[0], max(ready, self.host)
            if axis:
                self.exposed[axis] += begin - since
        elif begin > free and self.host_waits_for:  # the host waited for one
            self.exposed[self.host_waits_for] += begin - max(free, self.host_ready)
        elif begin > free:
            self.timing.host_seconds += begin - free
        self.host_waits_for = ""

    def _action(self, words: str) -> None:
        now, spans_now = self.free[0], len(self.timing.spans)
        if self.words:
            done = ActionSpan(self.words, self.began, now, self.from_span, self.in_layers)
            self.timing.actions.append(done)
        self.words, self.began, self.from_span = words, now, spans_now
        self.in_layers, self.layers_end = 0.0, None
        found = ITERATION.search(words)
        if found and found[1] != self.iteration:
            if self.iteration:
                self.iteration_began = max(self.host, now)
                self.timing.host_seconds = 0.0
                self.exposed.clear()
                self.bounds.clear()
                self.kinds.clear()
            self.iteration = found[1]
            self.iterations += 1


def key_of(event: Launch) -> tuple[object, ...]:
    """Return what the seconds of a kernel depend on."""
    shapes = event.shapes if short_name(event) in MATMULS else ()
    return event.op, shapes, event.dtype, event.bytes, event.flops


def time_record(
    events: Sequence[Event],
    device: Device,
    flops: float = 0.0,
    dtype: str = "bfloat16",
    rank: int = 0,
    trace: bool = True,
) -> Timing:
    """Time the record of a world rank; in a pipeline (time_pipeline) messages arrive at once here.

    flops: of the model in one step of this rank, for the MFU against the peak of `dtype`.
    """
    clock = Clock(device, rank, trace)
    clock.run(events)
    return clock.finish(flops, dtype)
