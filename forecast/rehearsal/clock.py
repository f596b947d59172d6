# SPDX-License-Identifier: Apache-2.0
"""Time one rank's record on a device: the host issues work in order, streams run concurrently.

    Launch     begins once it is issued and its stream is free
    Call       takes host time only; launches and transfers take some, too (host_seconds in
               roofline.py)
    Transfer   begins once it is issued, its communicator's stream is free and the calling stream
               has reached this point; transfers of one batch begin together. A receive takes no
               time here: pipeline_clock.py adds its wait
    Record     marks how far a stream is; Wait blocks a stream, HostWait the host

A transfer needs SMs. On a high-priority stream it gets them at once. On any other stream it queues
behind the kernel that runs when the transfer is ready, or that becomes ready at the same time,
since the transfer's stream has to wait for an event first. It begins in that kernel's tail, when
SMs are free. A matmul that overlaps a collective has the SMs that the collective leaves. Time that
the computing stream waits and that neither kernels nor the host account for is exposed; it is
attributed to the axis it waits for, or to the link between device and host.

Streams do not use mpu/pipeline/play.py, as stages and cores do. There each event names its
predecessors. Here the kernel behind which a transfer queues depends on when the transfer is ready,
which is known only after all earlier events. A single pass in the host's order knows these times.
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

HOST_LINK = "host link"  # between device and host, equally fast in both directions
ITERATION = re.compile(r"of iteration (\d+)")


class Span(NamedTuple):
    """A kernel or transfer on a stream, for a trace; seconds since the record's begin."""

    stream: int
    name: str
    begin: float
    end: float
    where: Where


class ActionSpan(NamedTuple):
    """The time of one Action on the computing stream, in seconds.

    first_span: index of its first span in Timing.spans. in_layers: the seconds of it in layers of
    the model, gaps between consecutive kernels of layers included.
    """

    words: str
    begin: float
    end: float
    first_span: int
    in_layers: float = 0.0


class Busy(NamedTuple):
    """A kernel on the computing stream. tail: seconds at its end in which SMs are free."""

    begin: float
    end: float
    tail: float


@dataclass
class Timing:
    """The duration of a rank's step and its parts.

    The computing stream is busy, waits for communication or waits for the host: step_seconds is the
    sum of busy_seconds, exposed_seconds and host_seconds.

    step_seconds: of the last recorded iteration. mfu: the model's FLOP/s as a share of the device's
    dense peak in the run's dtype. busy_seconds: of kernels on the computing stream, by KINDS.
    exposed_seconds: of communication that is not hidden, by axis. bounds: the seconds that each
    resource alone would need; bound_seconds is the largest and bound_by its name. host_seconds: the
    computing stream is idle because the host issues too slowly.
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
    """The state of the host, the streams and the communicators; `run` plays events, in order."""

    def __init__(self, device: Device, rank: int = 0, trace: bool = True) -> None:
        self.device, self.rank, self.trace = device, rank, trace
        self.host = 0.0
        self.free: dict[int, float] = defaultdict(float)  # when each stream's queued work ends
        self.waits_for: dict[int, str] = defaultdict(str)  # the axis that moved `free` last, or ""
        self.host_waits_for = ""
        self.ready: dict[int, float] = {}  # `free` of a stream before its pending waits
        self.waits: list[tuple[float, str]] = []  # of the computing stream since its last kernel
        self.host_ready = 0.0
        self.marks: dict[int, tuple[float, str]] = {}
        self.ends: dict[int, tuple[float, str]] = {}
        self.batches: dict[int, float] = {}
        self.batch = -1  # the batch that the host issued last
        self.kernels: deque[Busy] = deque()  # kernels that end after the host's time
        # transfers that wait for SMs, by stream: each with the time at which it is ready
        self.queued: dict[int, deque[tuple[float, Transfer]]] = defaultdict(deque)
        self.streams: dict[int, int] = {}  # queued transfer -> its stream
        self.busy: list[tuple[float, float]] = []  # begin and end of recent collectives
        self.timing = Timing(0.0)
        self.exposed: dict[str, float] = defaultdict(float)
        self.bounds: dict[str, float] = defaultdict(float)
        self.kinds: dict[str, float] = defaultdict(float)  # Timing.busy_seconds
        self.words, self.began, self.from_span = "", 0.0, 0
        self.in_layers = 0.0  # seconds of the current action in layers
        self.layers_end: float | None = None  # end of the last kernel, if it is a layer's
        self.iteration, self.iteration_began, self.iterations = "", 0.0, 0
        self.under_next: set[int] = set()  # streams whose last copies overlap the next iteration
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
        """Return the timing of all played events. flops: of the model in a step of this rank."""
        self._action("")
        for waiting in list(self.queued):
            self._advance(waiting)
        # the next iteration waits for copies to the host that overlap its forward, not this one
        leave = self.under_next if self.iterations > 1 else ()
        free = {stream: time for stream, time in self.free.items() if stream not in leave}
        last = max([self.host, *free.values()])
        late = max(free, key=lambda stream: free[stream])
        done = max(self.ready.get(0, self.free[0]), self.iteration_began)  # of the last kernel
        self._expose(done)
        done = max(done, self.free[0])
        if self.free[late] > done and self.waits_for[late]:  # the stream that ends last
            self.exposed[self.waits_for[late]] += self.free[late] - done
            done = self.free[late]
        self.timing.host_seconds += max(0.0, last - max(done, self.free[late]))
        timing = self.timing
        timing.step_seconds = last - self.iteration_began
        if flops and timing.step_seconds:
            timing.mfu = flops / (timing.step_seconds * self.device.peak(dtype))
        timing.exposed_seconds, timing.bounds = dict(self.exposed), dict(self.bounds)
        timing.busy_seconds = dict(self.kinds)
        return timing

    def _launch_cost(self, seconds: float) -> None:
        """Advance the host by the time of a launch."""
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
        if stream == 0:
            self.waits.clear()
        copies = event.op.startswith("memcpy ")
        down = copies and event.op.endswith("DtoH") and event.where.part == "state"
        (self.under_next.add if down and stream else self.under_next.discard)(stream)
        if copies and stream:
            self.waits_for[stream] = HOST_LINK
        elif not stream or begin > free:  # else it still depends on the stream's last wait
            self.waits_for[stream] = ""
        if event.flops:
            self.bounds["matmul"] += event.flops / device.peak(matmul_dtype(event))
        link = HOST_LINK if copies else "memory"
        bandwidth_key = "host_bandwidth" if copies else "bandwidth"
        self.bounds[link] += event.bytes / device[bandwidth_key]
        if self.trace:
            self.timing.spans.append(Span(stream, event.op, begin, end, event.where))

    def _kernel(self, event: Launch, begin: float) -> float:
        """Return the seconds of a kernel; a matmul has fewer SMs while a collective runs."""
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
        elif ready < self.free[0]:  # called from another stream: some later kernels are known
            for kernel in self.kernels:
                self._begin_before(kernel.begin)
                self._begin_behind(kernel)

    def _advance(self, stream: int) -> None:
        """Begin all queued transfers of a stream, behind no kernel."""
        while self.queued[stream]:
            self._begin(stream, 0.0)

    def _begin_before(self, time: float) -> None:
        """Begin the queued transfers that are ready before `time`, when the next kernel begins."""
        for stream, waiting in self.queued.items():
            while waiting and max(waiting[0][0], self.free[stream]) < time:
                self._begin(stream, 0.0)

    def _begin_behind(self, kernel: Busy) -> None:
        """Begin the queued transfers that are ready before a kernel's end in the kernel's tail."""
        for stream, waiting in self.queued.items():
            while waiting and max(waiting[0][0], self.free[stream]) < kernel.end:
                self._begin(stream, kernel.end - kernel.tail)

    def _begin(self, stream: int, earliest: float) -> None:
        """Begin the first queued transfer of a stream, not before `earliest`."""
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
        """Block a stream until a time, because of an axis."""
        if until > self.free[stream]:
            self.ready.setdefault(stream, self.free[stream])
            self.free[stream] = until
            self.waits_for[stream] = axis
            if stream == 0:
                self.waits.append((until, axis))

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
        """Attribute the idle time of the computing stream before `begin` to an axis or the host."""
        free = self.free[0]
        ready = self.ready.get(0, free)
        if free >= begin and free > ready:  # the stream waited for a transfer
            self._expose(max(ready, self.host))
        elif begin > free and self.host_waits_for:  # the host waited for one
            self.exposed[self.host_waits_for] += begin - max(free, self.host_ready)
        elif begin > free:
            self.timing.host_seconds += begin - free
        self.host_waits_for = ""

    def _expose(self, since: float) -> None:
        """Attribute the waits of the computing stream after `since`, each to its own axis."""
        for until, axis in self.waits:
            if until > since:
                if axis:
                    self.exposed[axis] += until - since
                since = until

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
    """Return the fields of a launch on which its seconds depend, as a key."""
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
    """Time the record of a world rank. Receives take no time; for a pipeline see time_pipeline.

    flops: of the model in one step of this rank, for the MFU against the peak of `dtype`.
    """
    clock = Clock(device, rank, trace)
    clock.run(events)
    return clock.finish(flops, dtype)
