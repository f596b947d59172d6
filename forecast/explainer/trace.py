# SPDX-License-Identifier: Apache-2.0
"""Record each collective and message of a step for tools/explain.py: its caller, wait and inputs.

The trainer has no code for this. The grid's trace hook is called for each collective and message
with its label. explainer/ops.py intercepts every operation, which shows the operation that made a
tensor and those that ran while a transfer was in flight. A FailureMonitor receives each action.
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
BUCKETS = ("mpu/zero/", "mpu/optim/")  # folders of the code that works on buckets


class Place(NamedTuple):
    """Where a collective is called, and for which layer or bucket."""

    layer: str
    site: str  # file:line
    phase: str
    bucket: int | None  # number of the bucket that is summed or gathered
    during: str  # for a bucket: the layer that runs at the call, and its line


@dataclass(eq=False)
class Seen:
    """A collective or message. shape: of its input. sent: bytes that leave this rank.

    Actions are indices into `explainer.actions`.
    """

    explainer: "Explainer"
    number: int  # from 1
    verb: str
    axis: str
    size: int
    shape: tuple[int, ...]
    sent: int
    is_async: bool
    action: int  # the action that issued it; for a receive, the one after that
    place: Place
    needs: str  # the operation that made its input
    first: int  # number of operations before it was issued
    payload: Payload | None = None
    pending: str = ""  # gradients for which the bucket after this one waits
    gathered: list[int] = field(default_factory=list)  # other buckets whose weights are gathered
    waited_at: str = ""  # the layer or line that waited for it
    waited_in: int = 0  # the action of the wait; for a receive, the one that uses its data
    meanwhile: list[str] = field(default_factory=list)  # operations between issue and wait

    @property
    def result(self) -> str:
        """Return the name of its result, for `needs` of other events."""
        return f"{'message' if self.payload else 'collective'} {self.number}"

    @property
    def in_outbox(self) -> bool:
        """Return whether the outbox's thread waits for it: a message sent by a stage."""
        return self.verb == "send" and self.payload is not None

    def waiting(self) -> None:
        """Attribute operations to this collective until `waited` is called."""
        if not self.in_outbox:
            self.explainer.finishing.append(self)

    def waited(self) -> None:
        """Record the layer or line that waited, and the operations since the issue."""
        if self.in_outbox:
            return
        explainer = self.explainer
        explainer.finishing.pop()
        self.waited_at = explainer.waits_at(self.place)
        self.waited_in = len(explainer.actions)
        self.meanwhile = explainer.done[self.first :]


class Explainer:
    """A trace for a grid that stores every collective and message of a step in `events`.

    monitor: the FailureMonitor for the run. actions: those that it received, in order. begun:
    number of operations before each of them. before: collectives in flight as the step began.
    """

    def __init__(self) -> None:
        self.events: list[Seen] = []
        self.before: list[Seen] = []
        self.actions: list[str] = []
        self.begun: list[int] = []
        self.buckets: Buckets | None = None  # set by `know`
        self.layers: ModuleTracker | None = None  # set by `know`
        self.done: list[str] = []  # operations in order
        self.monitor = Actions(self._begins)
        self.maker: dict[int, str] = {}  # address -> the operation that wrote it last
        self.finishing: list[Seen] = []  # collectives during their wait, outermost first
        self._called_at: dict[str, str] = {}  # layer -> the line of its last collective

    def know(self, run: LlamaRun) -> None:
        """Track the layers and the ready gradients of a run."""
        self.buckets = Buckets(run)
        readers = {MAIN_GRAD: self.buckets.ready}
        self.layers = ModuleTracker(run.model, run.engine.queue, run.sink, readers)

    def begin(self, micro_batches: int) -> None:
        """Begin the step to print; keep only collectives that are still in flight."""
        assert self.buckets is not None, "know() comes first"
        self.buckets.begin(micro_batches)
        on_their_way = [event for event in self.events if event.is_async and not event.waited_at]
        self.before = [event for event in on_their_way if event.payload is None]  # no messages
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
        """Record a collective or message that is about to start, and its caller."""
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
        """Return the place named by a label; without a label, the running layer."""
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
        """Return the layer or line that waits for the result of a call at `place`."""
        here, running = _site(), self.layers.running() if self.layers else ""
        if place.bucket is not None and running:
            return f"{running} ({here.use})"
        return here.call or f"{self._called_at.get(place.layer, place.layer)} (backward)"

    def ran(self, operation: Operation) -> None:
        """Record an operation, and the memory that it wrote."""
        story = self._story(operation)
        for place in operation.written:
            self.maker[place] = story

    def _story(self, operation: Operation) -> str:
        """Return an operation and its layer as text; append it to `done` if it computes."""
        assert self.layers is not None and self.buckets is not None, "know() comes first"
        name, read = operation.name, operation.read
        if self.finishing:
            return self.finishing[-1].result
        if name.startswith("c10d::"):  # an operation of torch.distributed
            return self.events[-1].result
        short, kind = name.strip("_"), matmul_in(self.layers.phase)
        if name in COPIES:
            return self.maker.get(read[0], short)
        if short in ADDS and kind == WGRAD_MATMUL:  # accumulation in a main gradient's dtype
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
    """Return the current site, none if autograd's engine calls."""
    return site(autograd=False)
