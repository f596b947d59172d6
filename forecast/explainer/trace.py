# SPDX-License-Identifier: Apache-2.0
"""Record each collective and message of a step, for tools/explain.py: who asks, who waits, why.

The trainer does not know of it. The grid's trace is called for each collective and message, with
the label that its caller gave it. explainer/ops.py sees every operation, which shows what made
a tensor and what ran while bytes were under way. A FailureMonitor gets each action that begins.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from forecast.explainer.ops import (
    ADDS,
    COPIES,
    MATMULS,
    UNWRITTEN,
    WGRAD_MATMUL,
    Operation,
    matmul_in,
    memory,
    name_of,
)
from forecast.explainer.zero import Buckets
from forecast.recording import Actions
from mpu.comm.transport import Axis, Label
from mpu.module_tracker import FORWARD, MAIN_GRAD, RECOMPUTE, ModuleTracker, Site, site
from mpu.pipeline.engine import Payload
from pretrain_llama import LlamaRun

MESSAGES = ("send", "receive")
BUCKETS = ("mpu/zero/", "mpu/optim/")  # lines that work on buckets


class Place(NamedTuple):
    """Where a collective is called, and for whom."""

    layer: str
    site: str  # file:line
    phase: str
    bucket: int | None  # the one that is summed or gathered
    during: str  # of a bucket: the layer that runs meanwhile, and where


@dataclass(eq=False)
class Seen:
    """A collective or message. shape: of its input. sent: the bytes that leave this rank.

    Numbers of actions index `explainer.actions`.
    """

    explainer: "Explainer"
    number: int  # from 1
    verb: str
    axis: str
    size: int
    shape: tuple[int, ...]
    sent: int
    is_async: bool
    action: int  # during which it was issued; a receive: before which
    place: Place
    needs: str  # what made its input
    first: int  # operations done before it was issued
    payload: Payload | None = None
    pending: str = ""  # gradients that the bucket behind this one waits for
    gathered: list[int] = field(default_factory=list)  # other buckets whose weights are gathered
    waited_at: str = ""
    waited_in: int = 0  # action; for a receive, the one that uses its data
    meanwhile: list[str] = field(default_factory=list)

    @property
    def result(self) -> str:
        """Return the name of its result, for the `needs` of others."""
        return f"{'message' if self.payload else 'collective'} {self.number}"

    @property
    def in_outbox(self) -> bool:
        """Return whether a thread of the outbox waits for it: a message that a stage sends."""
        return self.verb == "send" and self.payload is not None

    def waiting(self) -> None:
        """Count operations from now on, until `waited`, as a part of the collective."""
        if not self.in_outbox:
            self.explainer.finishing.append(self)

    def waited(self) -> None:
        """Note who waited for the result, and what ran since the start."""
        if self.in_outbox:
            return
        explainer = self.explainer
        explainer.finishing.pop()
        self.waited_at = explainer.waits_at(self.place)
        self.waited_in = len(explainer.actions)
        self.meanwhile = explainer.done[self.first :]


class Explainer:
    """A trace for a grid: keeps every collective and message of a step in `events`.

    monitor: the FailureMonitor to give to the run. actions: what the run gave it, in order. begun:
    how many operations were done when each of them began. before: collectives that were on their
    way when the step began.
    """

    def __init__(self) -> None:
        self.events: list[Seen] = []
        self.before: list[Seen] = []
        self.actions: list[str] = []
        self.begun: list[int] = []
        self.buckets: Buckets | None = None  # once there is a run
        self.layers: ModuleTracker | None = None  # once there is a run
        self.done: list[str] = []  # operations in order
        self.monitor = Actions(self._begins)
        self.maker: dict[int, str] = {}  # memory -> what wrote it last
        self.finishing: list[Seen] = []  # collectives that are being waited for, outermost first
        self._called_at: dict[str, str] = {}  # layer -> where it last called a collective

    def know(self, run: LlamaRun) -> None:
        """Follow the layers of a run, and count its gradients as they are done."""
        self.buckets = Buckets(run)
        readers = {MAIN_GRAD: self.buckets.ready}
        self.layers = ModuleTracker(run.model, run.engine.queue, run.sink, readers)

    def begin(self, micro_batches: int) -> None:
        """Begin the step to be printed; keep only collectives that are still on their way."""
        assert self.buckets is not None, "know() comes first"
        self.buckets.begin(micro_batches)
        on_their_way = [event for event in self.events if event.is_async and not event.waited_at]
        self.before = [event for event in on_their_way if event.payload is None]  # others were sent
        for event in self.before:
            event.first = 0
        self.events.clear()
        self.actions.clear()
        self.begun.clear()
        self.done.clear()
        self.maker.clear()

    def _begins(self, words: str) -> None:
        if self.layers is not None:
            self.layers.new_action()
        if not words.startswith("waiting for"):  # `waited` records that
            self.actions.append(words)
            self.begun.append(len(self.done))

    def issued(
        self,
        verb: str,
        axis: Axis,
        tensor: Tensor,
        sent: int,
        is_async: bool,
        label: Label | None = None,
    ) -> Seen:
        """Record a collective or message that is about to start, and where it is called."""
        place = self._place(label)
        event = Seen(
            self,
            number=len(self.events) + 1,
            verb=verb,
            axis=axis.name,
            size=axis.size,
            shape=tuple(tensor.shape),
            sent=sent,
            is_async=is_async,
            action=len(self.actions) - (verb != "receive"),
            place=place,
            needs=self.maker.get(memory(tensor), ""),
            first=len(self.done),
        )
        if place.bucket is not None and self.buckets is not None:
            event.gathered, event.pending = (
                self.buckets.gathered(),
                self.buckets.after(place.bucket),
            )
        if label is not None and isinstance(label.who, Payload):
            event.payload = label.who
        if verb == "receive":
            self.maker[memory(tensor)] = f"{place.layer}, {event.result}"
        self.events.append(event)
        return event

    def _place(self, label: Label | None) -> Place:
        """Return the place that a label names; without a label, the layer that runs."""
        here, layers = _site(), self.layers
        running = layers.running() if layers else ""
        back = layers is not None and layers.in_backward
        who, phase = label or Label(None, "backward" if back else "forward")
        if phase == FORWARD and back:
            phase = RECOMPUTE
        bucket = self.buckets.number(who) if self.buckets else None
        if bucket is not None:
            during = f"{running} ({here.use})" if running else ""
            return Place(f"bucket {bucket}", here.call, phase, bucket, during)
        if isinstance(who, str):
            name = who
        elif isinstance(who, Payload):
            name = f"stage {who.stage}'s {'activation' if who.kind == 'F' else 'gradient'}"
            name += f" {who.micro_batch}"
        else:
            name = (layers.names.get(id(who)) if layers else None) or running or name_of(here)
        if here.call:
            self._called_at[name] = here.call
        call = here.call or f"{self._called_at.get(name, name)} (backward)"
        return Place(name, call, phase, None, "")

    def waits_at(self, place: Place) -> str:
        """Return which layer or line waits for the result of a call at `place`."""
        here, running = _site(), self.layers.running() if self.layers else ""
        if place.bucket is not None and running:
            return f"{running} ({here.use})"
        return here.call or f"{self._called_at.get(place.layer, place.layer)} (backward)"

    def ran(self, operation: Operation) -> None:
        """Record an operation, and which memory it wrote."""
        story = self._story(operation)
        for place in operation.written:
            self.maker[place] = story

    def _story(self, operation: Operation) -> str:
        """Return what an operation did for whom; append it to `done` if it computed something."""
        assert self.layers is not None and self.buckets is not None, "know() comes first"
        name, read = operation.name, operation.read
        if self.finishing:
            return self.finishing[-1].result
        if name.startswith("c10d::"):  # torch.distributed's own
            return self.events[-1].result
        short, kind = name.strip("_"), matmul_in(self.layers.phase)
        if name in COPIES:
            return self.maker.get(read[0], short)
        if short in ADDS and kind == WGRAD_MATMUL:  # into a main gradient of another dtype
            for maker in (self.maker.get(place, "") for place in read):
                if maker.startswith(WGRAD_MATMUL):
                    return maker
        here, layer = _site(), self.layers.running()
        bucket = self.buckets.holding(operation.written) if here.call.startswith(BUCKETS) else None
        if bucket is not None:
            layer = f"bucket {bucket}"
        what, layer = kind if short in MATMULS else short, layer or name_of(here)
        if short.startswith(UNWRITTEN) and here.function:  # compiled code fills it
            what = kind.replace("matmul", here.function.partition(".")[0].strip("_"))
        story = f"{what} of {layer}" if layer else f"autograd's {what}"
        if not short.startswith(UNWRITTEN):
            self.done.append(story)
        return f"{story} ({here.call})" if here.call else story


def _site() -> Site:
    """Return the current site; a line of autograd's engine is nobody's."""
    return site(autograd=False)
