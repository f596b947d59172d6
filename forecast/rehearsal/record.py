# SPDX-License-Identifier: Apache-2.0
"""Record the work of a rank on its device: operations, storages, streams, transfers, host reads.

`Recorder` holds the events. `Watch` (watch.py), a dispatch mode, records torch's operations; the
fake device and communicators call `Recorder`'s methods. Both classes record runs on fake tensors
(rehearsals) as well as on real tensors; tests compare the two.
"""

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

from torch import Tensor

from forecast.rehearsal.events import (
    Action,
    Alloc,
    Call,
    Event,
    Free,
    HostUse,
    HostWait,
    Polled,
    Record,
    RecordStream,
    Transfer,
    Wait,
    Where,
)
from forecast.rehearsal.order import Finding
from forecast.rehearsal.places import FUNCTIONS, PARTS, STATE, phase_of
from mpu.host_memory import read_values
from mpu.kernels import by_address
from mpu.kernels.by_address import Requirements
from mpu.module_tracker import FORWARD, WGRAD, ModuleTracker, path_of, site

HOST = -1  # in place of a stream's number


class Inside(threading.local):
    """The running autograd functions of a thread, outermost first.

    needs: for each, which of its inputs need gradients: parameters, other tensors.
    """

    def __init__(self) -> None:
        self.functions: list[str] = []
        self.needs: list[tuple[bool, bool]] = []


class Recorder:
    """The events of one rank, in order, and its storages, streams and transfers.

    device: "cuda" or "cpu"; its storages are recorded. fork: the model's file, if not Weft's own.
    """

    def __init__(self, device: str, fork: str = "") -> None:
        self.device, self.fork = device, fork
        self.events: list[Event] = []
        self.stream = 0  # the current one
        self.layers: ModuleTracker | None = None
        self.action = ""
        self._here = Inside()
        self.functions: dict[str, type] = {}  # autograd functions that have run, by name
        self.live: dict[int, tuple[int, Any]] = {}  # a storage's id -> number, reference
        self.sizes: dict[int, int] = {}  # number -> bytes
        self._storages = self._events = self._transfers = 0
        self.counts: dict[int, int] = {}  # communicator's stream -> number of its last transfer
        self.streams = 1
        self.homes: dict[int, int] = {}  # storage -> the current stream at its allocation
        self.born: dict[int, str] = {}  # storage -> the line that allocated it
        self.abroad: set[int] = set()  # storages used by another stream than their home
        self.chains: dict[int, tuple[str, ...]] = {}  # event's index -> its call stack
        self.pinned: list[tuple[Any, str]] = []  # page-locked storages, each with its line
        self.pinned_at: list[Counter[str]] = []  # live ones by line, at each turn of the loop
        self.led: dict[str, tuple[str, ...]] = {}  # line -> its call stack, the first time
        self._spans: dict[Any, Any] = {}  # interned spans and call stacks
        self.paused = False
        self.found: list[Finding] = []  # mistakes of single events

    # where

    def where(self) -> Where:
        """Return the running part of the step, from the action, the layers and the Python stack."""
        call, use, function = site(self.fork)
        layers, action = self.layers, self.action
        layer = layers.running() if layers else ""
        phase = phase_of(action)
        part = "glue"
        if use:
            file = use.partition(":")[0]
            part = PARTS.get(file, "glue")
            if file.startswith("mpu/layers/fused"):
                part = next((p for f, p in FUNCTIONS.items() if f in function.lower()), "glue")
        if phase in ("forward", "backward") and layers is not None:
            running = layers.phase
            phase = phase if running == FORWARD else running
            if running == WGRAD or "wgrad" in function.lower():
                phase = part = WGRAD
        if phase in ("grad sum", "update"):
            part = "optimizer"
        elif call.startswith(("mpu/zero/", "mpu/optim/")) and part == "linear":
            part = "wgrad"
        if call.startswith(STATE):  # whichever layer's gradient triggered it
            part = "state"
        inside = self._here.functions
        return Where(phase, layer, part, call or use, inside[-1] if inside else "")

    def place(self) -> str:
        """Return the innermost line of the product, mpu/comm included."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if path := path_of(frame.f_code.co_filename, self.fork):
                return f"{path}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    # storages

    def number(self, tensor: Tensor, where: Where | None = None, kind: str = "") -> int:
        """Return the number of a tensor's storage, adding it if it is new; -1: not recorded."""
        if tensor.device.type == "meta":
            return -1
        storage = tensor.untyped_storage()
        ours = tensor.device.type == self.device or kind
        if not (ours or getattr(storage, "_weft_pinned", False)):
            return -1
        key = id(storage)
        found = self.live.get(key)
        if found is not None:
            return found[0]
        number = self.new_storage(storage.nbytes() if ours else 0)
        self.live[key] = number, weakref.ref(storage, lambda _: self._freed(key, number))
        if not self.paused:
            self.born[number] = born = getattr(storage, "_weft_born", "") or self.place()
            if born not in self.led:
                self.led[born] = self.lines()
        if not self.paused and ours:
            where = where or self.where()
            self.homes[number] = self.stream
            device = tensor.device.type
            self.events.append(Alloc(number, storage.nbytes(), kind, self.stream, device, where))
        return number

    def _freed(self, key: int, number: int) -> None:
        if self.live.get(key, (None,))[0] == number:
            del self.live[key]
        if not self.paused:
            self.events.append(Free(number, self.place() if number in self.abroad else ""))

    def pin(self, x: Tensor) -> None:
        """Mark a tensor's memory as page-locked."""
        storage: Any = x.untyped_storage()
        storage._weft_pinned, storage._weft_born = True, self.place()
        self.pinned.append((weakref.ref(storage), storage._weft_born))
        self.led.setdefault(storage._weft_born, self.lines())

    def count_pinned(self) -> None:
        """Record the number of live page-locked storages by line."""
        self.pinned = [one for one in self.pinned if one[0]() is not None]
        self.pinned_at.append(Counter(place for _, place in self.pinned))

    def new_storage(self, nbytes: int) -> int:
        """Return the number of a new storage, not yet mapped to a tensor."""
        self._storages += 1
        self.sizes[self._storages - 1] = nbytes
        return self._storages - 1

    def new_transfer(self, stream: int) -> tuple[int, int]:
        """Return a new transfer's number, and its number on its communicator's stream."""
        place = self.counts[stream] = self.counts.get(stream, -1) + 1
        self._transfers += 1
        return self._transfers - 1, place

    def resized(self, storage: Any, where: Where) -> None:
        """Record that a storage was resized: as the end of one storage and the begin of another."""
        found = self.live.get(id(storage))
        if found is None or self.sizes[found[0]] == storage.nbytes():
            return
        number = found[0]
        self.events.append(Free(number, where.place))
        new, key = self.new_storage(storage.nbytes()), id(storage)
        self.live[key] = new, weakref.ref(storage, lambda _: self._freed(key, new))
        self.homes[new] = self.stream
        self.born[new] = where.place
        if storage.nbytes():
            self.events.append(Alloc(new, storage.nbytes(), "", self.stream, self.device, where))

    def check_layout(
        self, call: str, given: Mapping[Any, Any], where: Where,
        required: Requirements | None = None,
    ) -> None:  # fmt: skip
        """Record arguments whose layout a kernel would misread (mpu/kernels/by_address.py).

        required: the declared requirements of a kernel of Weft's own.
        """
        why = list(by_address.wrong(call, given, required))
        if call == "aten::_scaled_mm_v2":
            scales = ("scale_a", "recipe_a", "scale_b", "recipe_b")
            one = (given[name][0] for name in scales)
            why += by_address.scaled_mm(given["self"], given["mat2"], *one)
        for x, each in why:
            born, near = self.birthplace(x), self.place()
            self.found.append(Finding("layout", where.place or near, each, born, (born, near)))

    def uses(
        self, read: Iterable[Tensor], written: Iterable[Tensor], where: Where, stream: int
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Return the storages read and written by a stream, and the span of bytes of each use."""
        reads = dict.fromkeys((self.number(x, where), *span(x)) for x in read)
        writes = dict.fromkeys((self.number(x, where), *span(x)) for x in written)
        found = [[use for use in uses if use[0] >= 0] for uses in (reads, writes)]
        numbers = [tuple(use[0] for use in uses) for uses in found]
        spans = tuple(use[1:] for uses in found for use in uses)
        moved = False
        for number in (*numbers[0], *numbers[1]):
            moved = moved or number in self.abroad or self.homes.get(number, stream) != stream
            if moved:
                self.abroad.add(number)
        if moved:
            self.chain()
        return numbers[0], numbers[1], self._spans.setdefault(spans, spans)

    def numbers(self, tensors: Iterable[Tensor], where: Where) -> tuple[int, ...]:
        """Return the numbers of several tensors' storages, without those that are not recorded."""
        found = (self.number(tensor, where) for tensor in tensors)
        return tuple(number for number in found if number >= 0)

    def chain(self) -> None:
        """Store the lines of the product on the call stack for the next event."""
        found = self.lines()
        self.chains[len(self.events)] = self._spans.setdefault(found, found)

    def lines(self) -> tuple[str, ...]:
        """Return the lines of the product on the call stack, innermost first."""
        lines, frame = [], sys._getframe(1)
        while frame is not None:
            if path := path_of(frame.f_code.co_filename, self.fork):
                lines.append(f"{path}:{frame.f_lineno}")
            frame = frame.f_back  # type: ignore[assignment]
        return tuple(lines)

    def birthplace(self, x: Tensor) -> str:
        """Return the line of the product that allocated a tensor's storage, "" if unknown."""
        storage = x.untyped_storage()
        number = self.live.get(id(storage), (-1,))[0]
        return getattr(storage, "_weft_born", "") or self.born.get(number, "")

    # called by the fake device and the fake communicators

    def new_stream(self) -> int:
        """Return a new stream's number."""
        self.streams += 1
        return self.streams - 1

    def new_event(self) -> int:
        """Return a new event's number."""
        self._events += 1
        return self._events - 1

    def record(self, event: int, stream: int) -> None:
        """Record that an event is recorded on a stream."""
        self.chain()
        self.events.append(Record(event, stream, self.place()))

    def wait(self, stream: int, event: int = -1, transfer: int = -1) -> None:
        """Record that a stream waits for an event or a transfer."""
        self.chain()
        self.events.append(Wait(event, stream, self.place(), transfer))

    def host_wait(
        self, event: int = -1, stream: int = -1, reads: str = "", of: Tensor | None = None
    ) -> None:
        """Record that the host waits: for an event, else for a stream, else for the device.

        reads: name of the operation that waits. of: the tensor that it reads.
        """
        self.chain()
        storage = -1 if of is None else self.number(of)
        where, declared = self.where(), declares()
        waits = HostWait(event, stream, reads, where, storage=storage, declared=declared)
        self.events.append(waits)

    def polled(self, transfer: int) -> None:
        """Record that the host has polled a transfer and found it complete."""
        self.events.append(Polled(transfer))

    def host_use(self, read: list[Tensor], written: list[Tensor]) -> None:
        """Record that the host reads or writes page-locked tensors; others are ignored."""
        if all(x.device.type != "cpu" for x in (*read, *written)) or self.device == "cpu":
            return
        where = self.where()
        reads, writes, spans = self.uses(read, written, where, HOST)
        if reads or writes:
            self.chain()
            self.events.append(HostUse(reads, writes, where, spans))

    def record_stream(self, tensor: Tensor, stream: int) -> None:
        """Record a call of Tensor.record_stream."""
        self.events.append(RecordStream(self.number(tensor), stream, self.place()))

    def transfer(self, **fields: Any) -> Transfer:
        """Record a collective or a message and return it."""
        number, place = self.new_transfer(fields["stream"])
        weights, inputs = self._here.needs[-1] if self._here.needs else (True, True)
        # an all-gather is of an input; anything else can also be of what a weight makes of one
        needed = inputs or (weights and fields["verb"] != "all_gather")
        where = self.where()
        made = Transfer(id=number, number=place, where=where, differentiated=needed, **fields)
        self.events.append(made)
        return made

    def enters(self, name: str, made: type, needs: tuple[bool, bool]) -> None:
        """Record that the host enters an autograd function, forward or backward; see `leaves`.

        needs: whether any of its parameters, and any of its other inputs, needs a gradient.
        """
        self._here.functions.append(name)
        self._here.needs.append(needs)
        self.functions[made.__name__] = made
        if not self.paused:
            self.events.append(Call(name))

    def leaves(self) -> None:
        """Leave the autograd function that was entered last."""
        self._here.functions.pop()
        self._here.needs.pop()

    def acts(self, words: str) -> None:
        """Record that the rank begins another action."""
        self.action = words
        if self.layers is not None:
            self.layers.new_action()
        if not self.paused:
            self.events.append(Action(words))


def declares() -> bool:
    """Return whether the program declares that the host must wait, by calling read_values."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not read_values.__code__:
        frame = frame.f_back
    return frame is not None


def span(x: Tensor) -> tuple[int, int]:
    """Return the bytes [low, high) of its storage that a tensor covers, gaps included."""
    low, size = int(x.storage_offset()), x.element_size()
    if not x.numel():
        return low * size, low * size
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return low * size, (low + last + 1) * size
