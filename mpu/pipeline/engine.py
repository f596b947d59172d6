# SPDX-License-Identifier: Apache-2.0
"""Execute a pipeline schedule on one rank: any schedule, forward and backward or forward alone.

    for each action of this rank (mpu/pipeline/steps.py lists its receives and sends):
        post the next receives      asynchronous, mostly one action ahead of their use
        F  wait for the activation from the previous stage, forward, send the output, keep its graph
        B  wait for the gradient from the next stage, backward, send the gradient of the input;
           in a split schedule the weight gradients are deferred
        F with B    wait for both inputs, run the two interleaved, send both outputs
        W  compute the deferred weight gradients
    compute the deferred weight gradients of the output layer (Schedule.deferred)
    Sends are asynchronous too (mpu/comm/p2p.py, SendQueue): they overlap the next actions.

No gradient is sent to stages before the first trainable one: B and W do nothing there. With a
single stage a schedule is plain gradient accumulation. The engine is independent of the model. It
takes forward(chunk, micro_batch, hidden), which returns the output for the next stage or, on the
last stage, the loss on which to call backward. Layers add weight gradients to the sink themselves.
"""

import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mpu.comm.p2p import SendQueue, receive, send
from mpu.comm.transport import Handle, Label
from mpu.gradients import WeightGradientQueue, run_deferred
from mpu.grid import Grid
from mpu.interleave import Interleaver
from mpu.pipeline.schedules import Schedule
from mpu.pipeline.steps import Message, Step, plan
from mpu.worker import Worker

Forward = Callable[[int, int, Tensor | None], Tensor]
Key = tuple[int, int]  # chunk, micro-batch


class Monitor(Protocol):
    """Receives this rank's current action, for failure reports (training/faults/monitor.py)."""

    action: str  # in words, to follow "during" or "while"


class Payload(NamedTuple):
    """The content of a message: the output of a stage's F, or the input gradient of its B.

    kind: F or B. stage: the stage that computed it. peer: the pipeline rank at the other end.
    """

    kind: str
    micro_batch: int
    stage: int
    peer: int


PHASE = {"F": "forward", "B": "backward"}


class Engine:
    """Run schedules on one rank of the pipeline axis.

    queue: the layers' weight-gradient queue. interleaver: the layers' interleaver of two
    micro-batches. dtype: of the hidden states sent. schedule: the last one run. spans: None, or a
    list that each run replaces by its actions' (kind, chunk, micro_batch, begin, end) in seconds of
    time.perf_counter; BW is B and W in one. If an F overlaps a B and its W, a third of the time is
    attributed to the F. The work that Schedule.deferred puts after the last action is in no span.
    trained: (pipeline rank, chunk) of each stage in which a parameter trains, or None if one does
    in the first stage (mpu/zero/frozen.py).
    """

    def __init__(
        self,
        grid: Grid,
        queue: WeightGradientQueue,
        monitor: Monitor,
        dtype: torch.dtype,
        device: torch.device,
        interleaver: Interleaver | None = None,
        trained: Collection[tuple[int, int]] | None = None,
    ) -> None:
        self.trained = trained
        self.grid, self.queue, self.monitor, self.interleaver = (
            grid,
            queue,
            monitor,
            interleaver or Interleaver(),
        )
        self.dtype, self.device = dtype, device
        self._sender = Worker("send-queue")
        self.schedule: Schedule | None = None
        self.spans: list[tuple[str, int, int, float, float]] | None = None

    def run(
        self, schedule: Schedule, forward: Forward, shape: tuple[int, ...], during: str = ""
    ) -> None:
        """Execute this rank's part of `schedule`; a schedule of F's alone runs without autograd.

        forward(chunk, micro_batch, hidden): hidden is None on the first stage, else [*shape]. It
        returns [*shape] on every stage but the last, where it returns a scalar loss. during: words
        that follow the action in Monitor.action ("of iteration 7").
        """
        first = self._first_that_trains(schedule)
        steps = plan(schedule, first)[self.grid.pp.rank]
        self.schedule, clock = schedule, None
        if self.spans is not None:
            clock = _CudaClock() if self.device.type == "cuda" else _Clock()
        polls = self.device.type != "cpu" and not self.grid.pp.staged
        queue = SendQueue(polls, self._sender) if self.grid.pp.size > 1 else nullcontext()
        with queue as send_queue:
            during = f" {during}" if during else ""
            running = _Run(self, schedule, forward, shape, send_queue, during=during, first=first)
            for step in steps:
                running.do(step, clock)
            running.drain()
            self.monitor.action = f"waiting for its last messages to be sent{during}"
        if clock is not None:
            self.spans = clock.spans()

    def _first_that_trains(self, schedule: Schedule) -> int:
        """Return the first stage in which anything trains."""
        if self.trained is None or (0, 0) in self.trained:
            return 0
        stages = range(schedule.stages)
        return next((s for s in stages if schedule.place(s) in self.trained), 0)


class _Clock:
    """Records when each action began and ended.

    noted: kind, chunk, micro-batch, begin, end, and the part (low, high) of that time attributed to
    the action.
    """

    def __init__(self) -> None:
        self.noted: list[tuple[str, int, int, Any, Any, float, float]] = []

    def note(
        self, kind: str, chunk: int, i: int, begin: Any, end: Any, low: float = 0, high: float = 1
    ) -> None:
        self.noted.append((kind, chunk, i, begin, end, low, high))

    def now(self) -> Any:
        return time.perf_counter()

    def seconds(self, noted: Any) -> float:
        return float(noted)

    def spans(self) -> list[tuple[str, int, int, float, float]]:
        made = list[tuple[str, int, int, float, float]]()
        for kind, chunk, i, *both, low, high in self.noted:
            begin, end = map(self.seconds, both)
            duration = end - begin
            made.append((kind, chunk, i, begin + low * duration, begin + high * duration))
        return made


class _CudaClock(_Clock):
    """Records events on the stream, and reads their times once at the end."""

    def __init__(self) -> None:
        super().__init__()
        torch.cuda.synchronize()
        self.zero, self.began = self.now(), time.perf_counter()

    def now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, noted: Any) -> float:
        return self.began + float(self.zero.elapsed_time(noted)) / 1e3

    def spans(self) -> list[tuple[str, int, int, float, float]]:
        torch.cuda.synchronize()
        return super().spans()


class _Run:
    """One execution of a schedule: messages in flight, and activations kept for backward."""

    def __init__(
        self,
        engine: Engine,
        schedule: Schedule,
        forward: Forward,
        shape: tuple[int, ...],
        send_queue: SendQueue | None,  # None where one rank is the whole pipeline
        during: str,
        first: int,  # the first stage in which anything trains
    ) -> None:
        self.engine, self.schedule, self.forward = engine, schedule, forward
        self.shape, self.send_queue, self.during = shape, send_queue, during
        self.first = first
        self.rank, self.last = engine.grid.pp.rank, schedule.stages - 1
        self.training = any(action.kind == "B" for action in schedule.ranks[self.rank])
        self.arriving: dict[tuple[str, int, int], tuple[Tensor, Handle]] = {}
        self.local: dict[tuple[str, int, int], Tensor] = {}  # from another chunk of this rank
        self.inputs: dict[Key, Tensor] = {}
        self.outputs: dict[Key, GradientEdge] = {}  # where backward starts; the tensors are freed
        self.deferred: dict[Key, deque[Callable[[], None]]] = {}
        self.overlapped: Step | None = None  # an F held back until the B that it overlaps

    def do(self, step: Step, clock: _Clock | None) -> None:
        """Execute one step: post receives, take the input, compute, send."""
        for message in step.receives:
            self.arriving[message[:3]] = self._post(message)
        if step.overlapped:
            self.overlapped = step
            return
        kind, chunk, i = step.action
        fused = kind != "F" and not self.schedule.split
        if kind == "W" and fused:
            return  # already done with its B
        if self.overlapped is not None:
            forward, self.overlapped = self.overlapped, None
            return self._pair(forward, step, clock)
        given = self._take(step) if kind != "W" else None
        name = "BW" if fused else kind
        doing = f"{name} chunk {chunk} micro-batch {i}"
        self.engine.monitor.action = f"{doing} in stage {step.stage}{self.during}"
        begin = clock.now() if clock else None
        if kind == "F":
            out = self._forward(step, given)
        elif kind == "B":
            out = self._backward(step, given, fused)
        else:
            out = run_deferred(self.deferred.pop((chunk, i), deque()))
        if clock:
            clock.note(name, chunk, i, begin, clock.now())
        if out is not None:
            self._give(kind, step.stage, i, out)

    def _pair(self, forward: Step, backward: Step, clock: _Clock | None) -> None:
        """Execute an F interleaved with a B and its W."""
        hidden, dy = self._take(forward), self._take(backward)
        (_, chunk, i), (_, other, j) = forward.action, backward.action
        self.engine.monitor.action = (
            f"F chunk {chunk} micro-batch {i} in stage {forward.stage} overlapping "
            f"BW chunk {other} micro-batch {j} in stage {backward.stage}{self.during}"
        )
        begin = clock.now() if clock else None
        out, dx = self.engine.interleaver.run(
            lambda: self._forward(forward, hidden),
            lambda: self._backward(backward, dy, True),
            self.engine.grid.waits.follow,
        )
        if clock:
            end = clock.now()
            clock.note("F", chunk, i, begin, end, high=1 / 3)
            clock.note("BW", other, j, begin, end, low=1 / 3)
        for kind, stage, of, result in (("F", forward.stage, i, out), ("B", backward.stage, j, dx)):
            if result is not None:
                self._give(kind, stage, of, result)

    def _forward(self, step: Step, hidden: Tensor | None) -> Tensor | None:
        _, chunk, i = step.action
        with torch.set_grad_enabled(self.training):
            if hidden is not None and self.training and step.stage > self.first:
                self.inputs[chunk, i] = hidden.requires_grad_()
            out = self.forward(chunk, i, hidden)
            if step.stage != self.last:
                self._check(out, step.stage)
            if self.training and step.stage >= self.first:
                self.outputs[chunk, i] = get_gradient_edge(out)
        return None if step.stage == self.last else out.detach()

    def _check(self, out: Tensor, stage: int) -> None:
        """Raise ValueError if a stage returns other hidden states than the next one receives."""
        made, due = (list(out.shape), out.dtype), (list(self.shape), self.engine.dtype)
        if made != due:
            a, b = (f"{shape}, {dtype}".replace("torch.", "") for shape, dtype in (made, due))
            raise ValueError(
                f"stage {stage} returns hidden states {a}, and the next stage receives {b}:"
                " Model.hidden_shape must return the shape of what a block returns, and a block "
                "returns the dtype of ctx.dtype"
            )

    def drain(self) -> None:
        """Compute the output layer's deferred weight gradients, in micro-batch order."""
        for chunk, i in sorted(self.deferred):
            doing = f"the output layer's deferred W of micro-batch {i}"
            self.engine.monitor.action = f"{doing} in stage {self.last}{self.during}"
            run_deferred(self.deferred.pop((chunk, i)))

    def _backward(self, step: Step, dy: Tensor | None, fused: bool) -> Tensor | None:
        _, chunk, i = step.action
        if step.stage < self.first:
            return None
        queue, edge = self.engine.queue, self.outputs.pop((chunk, i))
        defers = not fused or (step.stage == self.last and self.schedule.deferred)
        if defers:
            queue.defer(output_layer_only=fused)
        torch.autograd.backward((edge,), (dy,))  # dy is None for a scalar loss
        if defers:
            self.deferred[chunk, i] = queue.take()
        x = self.inputs.pop((chunk, i), None)
        return None if x is None else x.grad

    def _post(self, message: Message) -> tuple[Tensor, Handle]:
        engine, grid = self.engine, self.engine.grid
        axis = grid.pp if message.sender < message.to else grid.pp_back
        kind, stage = message.kind, self.schedule.stage(message.to, message.chunk)
        maker = stage + (-1 if kind == "F" else 1)
        label = Label(Payload(kind, message.micro_batch, maker, message.sender), PHASE[kind])
        return receive(self.shape, engine.dtype, engine.device, axis, message.sender, label)

    def _take(self, step: Step) -> Tensor | None:
        """Wait for the input of an F or B and return it (None at the model's ends)."""
        action, stage = step.action, step.stage
        kind, chunk, i = action
        if stage == (0 if kind == "F" else self.last) or (kind == "B" and stage < self.first):
            return None
        if action in self.local:
            return self.local.pop(action)
        tensor, handle = self.arriving.pop(action)
        source = stage + (-1 if kind == "F" else 1)
        rank = self.engine.grid.pp.ranks[self.schedule.place(source)[0]]
        self.engine.monitor.action = (
            f"waiting for {kind} chunk {chunk} micro-batch {i} from stage {source} (rank {rank}) "
            f"in stage {stage}{self.during}"
        )
        handle.wait()
        return tensor

    def _give(self, kind: str, stage: int, i: int, out: Tensor) -> None:
        """Pass an output to the next stage, or an input gradient to the previous one."""
        to, chunk = self.schedule.place(stage + (1 if kind == "F" else -1))
        if to == self.rank:
            self.local[kind, chunk, i] = out
            return
        grid, label = self.engine.grid, Label(Payload(kind, i, stage, to), PHASE[kind])
        assert self.send_queue is not None
        self.send_queue.put(send(out, grid.pp if self.rank < to else grid.pp_back, to, label))
