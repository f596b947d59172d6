# SPDX-License-Identifier: Apache-2.0
"""Tell the story of each collective and message of a step, for tools/explain.py: who asks, who
waits, why.

Nothing in the trainer knows of this. The trace of the grid hears of each collective and message,
with the label that its caller gave it; tools/explain_ops.py sees every operation, and so it is
known what a tensor came from and what ran while bytes were under way; a FailureMonitor hears of
each action that begins.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from mpu.comm.failure_monitor import FailureMonitor
from mpu.comm.transport import Axis, Label
from mpu.pipeline.engine import Parcel
from pretrain_llama import Run
from tools.explain_ops import (
    ADDS,
    COPIES,
    MATMULS,
    UNWRITTEN,
    WGRAD,
    Layers,
    Operation,
    memory,
    site,
)
from tools.explain_zero import Buckets

MESSAGES = ("send", "receive")


class Place(NamedTuple):
    """Where a collective is called, and for whom."""

    layer: str
    site: str  # file:line
    phase: str
    bucket: int | None  # that is being summed or gathered
    during: str  # the layer that runs, and where, if a bucket's turn came in the middle of one


@dataclass(eq=False)
class Seen:
    """A collective or message with its story. `shape` is of the tensor put in, `sent` of this rank.

    The numbers of actions are places in `explainer.actions`.
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
    needs: str  # what made the tensor put in
    first: int  # operations done before it was issued
    parcel: Parcel | None = None
    pending: str = ""  # gradients that the bucket behind this one waits for
    whole: list[int] = field(default_factory=list)  # other buckets with gathered weights
    waited_at: str = ""
    waited_in: int = 0  # action; of a receive the one that its data is for
    meanwhile: list[str] = field(default_factory=list)

    @property
    def result(self) -> str:
        """Name what it leaves behind."""
        return f"{'message' if self.parcel else 'collective'} {self.number}"

    def waiting(self) -> None:
        """Take what runs from now on for a part of the collective."""
        if self.verb != "send":  # a thread of the outbox waits for those
            self.explainer.finishing.append(self)

    def waited(self) -> None:
        """Note who waited for the result, and what ran since the start."""
        if self.verb == "send":
            return
        explainer = self.explainer
        explainer.finishing.pop()
        self.waited_at = explainer.waits_at(self.place)
        self.waited_in = len(explainer.actions)
        self.meanwhile = explainer.done[self.first :]


class Actions(FailureMonitor):
    """A monitor at world size 1 that tells what the rank does next."""

    def __init__(self, begins: Callable[[str], None]) -> None:
        self._begins = begins
        super().__init__()

    @property
    def action(self) -> str:
        """What the rank is doing, in words."""
        return self._action

    @action.setter
    def action(self, words: str) -> None:
        self._action = words
        self._begins(words)


class Explainer:
    """The trace of a grid: is told of every collective and message, and keeps them in `events`.

    monitor: for the run to say what it does; actions: what it said, in order. before: what was on
    its way when the step began.
    """

    def __init__(self) -> None:
        self.events: list[Seen] = []
        self.before: list[Seen] = []
        self.actions: list[str] = []
        self.buckets: Buckets | None = None  # once there is a run
        self.layers: Layers | None = None  # too
        self.monitor = Actions(self._begins)
        self.done: list[str] = []  # operations in order
        self.maker: dict[int, str] = {}  # memory -> what wrote it last
        self.finishing: list[Seen] = []  # collectives that are being waited for, outermost first
        self._called_at: dict[str, str] = {}  # layer -> where it last called a collective

    def know(self, run: Run) -> None:
        """Follow the layers of a run, and hear of each gradient that is done."""
        self.layers, self.buckets = Layers(run.model, run.engine.queue), Buckets(run)

    def begin(self, micro_batches: int) -> None:
        """Forget what was, but for what is still on its way: the step that is told begins."""
        assert self.buckets is not None, "know() comes first"
        self.buckets.begin(micro_batches)
        on_their_way = [event for event in self.events if event.is_async and not event.waited_at]
        self.before = [event for event in on_their_way if event.parcel is None]  # the rest is sent
        for event in self.before:
            event.first = 0
        self.events.clear()
        self.actions.clear()
        self.done.clear()
        self.maker.clear()

    def _begins(self, words: str) -> None:
        if self.layers is not None:
            self.layers.new_action()
        if not words.startswith("waiting for"):  # that is told of the message
            self.actions.append(words)

    def issued(
        self,
        verb: str,
        axis: Axis,
        tensor: Tensor,
        sent: int,
        is_async: bool,
        label: Label | None = None,
    ) -> Seen:
        """Record a collective or message that is about to start, and where it stands."""
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
            event.whole, event.pending = self.buckets.whole(), self.buckets.after(place.bucket)
        if label is not None and isinstance(label.who, Parcel):
            event.parcel = label.who
        if verb == "receive":
            self.maker[memory(tensor)] = f"{place.layer}, {event.result}"
        self.events.append(event)
        return event

    def _place(self, label: Label | None) -> Place:
        """Read a label; where there is none, say what runs."""
        here, layers = site(), self.layers
        running = layers.running() if layers else ""
        back = layers is not None and layers.in_backward
        who, phase = label or Label(None, "backward" if back else "forward")
        if phase == "forward" and back:
            phase = "recompute"
        bucket = self.buckets.number(who) if self.buckets else None
        if bucket is not None:
            during = f"{running} ({here.use})" if running else ""
            return Place(f"bucket {bucket}", here.call, phase, bucket, during)
        if isinstance(who, str):
            name = who
        elif isinstance(who, Parcel):
            name = f"stage {who.stage}'s {'activation' if who.kind == 'F' else 'gradient'}"
            name += f" {who.micro_batch}"
        else:
            name = (layers.names.get(id(who)) if layers else None) or running or here.name
        if here.call:
            self._called_at[name] = here.call
        call = here.call or f"{self._called_at.get(name, name)} (backward)"
        return Place(name, call, phase, None, "")

    def waits_at(self, place: Place) -> str:
        """Say where somebody waits for what was called at `place`: a layer, where one runs that
        waits for a bucket, or a line.
        """
        here, running = site(), self.layers.running() if self.layers else ""
        if place.bucket is not None and running:
            return f"{running} ({here.use})"
        return here.call or f"{self._called_at.get(place.layer, place.layer)} (backward)"

    def ran(self, operation: Operation) -> None:
        """Note an operation, and which memory it wrote."""
        story = self._story(operation)
        for place in operation.written:
            self.maker[place] = story

    def _story(self, operation: Operation) -> str:
        """Say what an operation did for whom; note it as done unless it only moves bytes."""
        assert self.layers is not None and self.buckets is not None, "know() comes first"
        name, read = operation.name, operation.read
        if self.finishing:
            return self.finishing[-1].result
        if name.startswith("c10d::"):  # torch.distributed's own
            return self.events[-1].result
        short, kind = name.strip("_"), self.layers.kind
        if name in COPIES:
            return self.maker.get(read[0], short)
        if short in ADDS and kind == WGRAD:  # into a main gradient of another dtype
            for maker in (self.maker.get(place, "") for place in read):
                if maker.startswith(WGRAD):
                    return maker
        here, layer = site(), self.layers.running()
        bucket = self.buckets.holding(operation.written) if here.in_zero else None
        if bucket is not None:
            layer = f"bucket {bucket}"
        what, layer = kind if short in MATMULS else short, layer or here.name
        story = f"{what} of {layer}" if layer else f"autograd's {what}"
        if short == "add" and not here.call:
            story = "autograd's add of the gradients of two branches"
        if not short.startswith(UNWRITTEN):
            self.done.append(story)
        return f"{story} ({here.call})" if here.call else story
