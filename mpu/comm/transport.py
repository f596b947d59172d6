# SPDX-License-Identifier: Apache-2.0
"""Define groups of ranks that communicate, their transport, and handles of transfers in flight.

Axis        a group of ranks, as one of them sees it: laid out by mpu/grid.py
Transport   the backend of an axis: a process group (mpu/comm/collectives.py), memory shared by
            the ranks of one host (mpu/comm/shared_memory.py), memory that GPUs write to each
            other (mpu/comm/symmetric_cuda.py), or shapes only (mpu/comm/meta.py)
Handle      one collective or message in flight, to be waited for once
Trace       called at every start, if the axis has one (forecast/explainer/trace.py)
Waits       records what this rank waits for, and for how long (mpu/comm/waits.py)
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from threading import get_ident
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mpu.comm.waits import MESSAGES, Wait, Waits


class CommunicationError(RuntimeError):
    """A collective or message failed; training/faults/monitor.py finds the peer behind it."""


class Label(NamedTuple):
    """The origin of a collective and its phase of the step. A trace receives it.

    who: the layer, bucket, pipeline message or name to which the collective belongs.
    phase: "forward", "backward", "wgrad", "grad sum", "gather", "norm", "update", ...
    """

    who: object
    phase: str


class Splits(NamedTuple):
    """Rows of dim 0 in an all-to-all: `input` to each rank, `output` from each rank.

    A rank's output[i] must equal rank i's input for this rank. Zeros are allowed.
    """

    input: tuple[int, ...]
    output: tuple[int, ...]

    @property
    def reversed(self) -> "Splits":
        """Return the splits of the inverse exchange."""
        return Splits(self.output, self.input)


class Started(Protocol):
    """A trace's record of one collective that is about to start."""

    def waiting(self) -> None:
        """Record that the wait for the result begins."""

    def waited(self) -> None:
        """Record that the result is available."""


class Trace(Protocol):
    """Receives a call at the start of each collective and message of an axis."""

    def issued(
        self,
        verb: str,
        axis: "Axis",
        tensor: Tensor,
        sent: int,
        is_async: bool,
        label: Label | None,
    ) -> Started | None:
        """Record a start; return the object that records its wait, or None.

        tensor: the input; for a receive, the result. sent: bytes that this rank sends (sent_bytes).
        """


class blocked:  # noqa: N801 - used as `with blocked(waits, wait):`
    """Record that the rank waits in this block, unless in another thread or a wait already.

    A class, as a generator is slower: a step enters it about a hundred times.
    """

    __slots__ = ("_began", "_noted", "_wait", "_waits")

    def __init__(self, waits: Waits | None, wait: Wait | None) -> None:
        self._waits, self._wait, self._noted = waits, wait, False

    def __enter__(self) -> None:
        waits, wait = self._waits, self._wait
        if waits is None or wait is None or waits.now is not None or get_ident() != waits.thread:
            return
        waits.now, self._noted, self._began = wait, True, time.monotonic()

    def __exit__(self, *error: object) -> None:
        if not self._noted:
            return
        waits, wait = self._waits, self._wait
        assert waits is not None and wait is not None
        waits.now, waits.moved = None, time.monotonic()
        waits.seconds[wait.axis] = waits.seconds.get(wait.axis, 0.0) + waits.moved - self._began


class Handle:
    """A collective in flight, with its tensors. `wait()` orders the current stream after it.

    Axis.start makes it; the block of a `with` then starts the work, and leaving the block waits for
    it unless async_op. work: the result of torch.distributed. keep: tensors that must live until
    the wait. finish: called after the wait.
    """

    def __init__(
        self,
        finish: Callable[[], object] | None = None,
        what: str = "",
        event: Started | None = None,
        waits: Waits | None = None,
        wait: Wait | None = None,
        async_op: bool = True,
    ) -> None:
        self.work: Any = None
        self.keep: tuple[Tensor, ...] = ()
        self.finish = finish
        self.what, self._event, self._async_op = what, event, async_op
        self._waits, self._wait = waits, wait

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError):
            raise CommunicationError(f"{self.what}: {error}") from error
        if error is None and not self._async_op:
            self.wait()

    def wait(self) -> None:
        """Wait for the result; a second call does nothing. Raises CommunicationError."""
        work, finish, event = self.work, self.finish, self._event
        self.work = self.finish = self._event = None
        if event is not None:
            event.waiting()
        if work is not None:
            try:
                with blocked(self._waits, self._wait):
                    work.wait()
            except RuntimeError as error:
                raise CommunicationError(f"{self.what}: {error}") from error
        if finish is not None:
            finish()
        if event is not None:
            event.waited()
        self.keep = ()

    def blocked(self) -> blocked:
        """Return a context manager for a block in which the rank waits for this transfer."""
        return blocked(self._waits, self._wait)

    def is_completed(self) -> bool:
        """Return whether the transfer is complete, as far as the backend reports it."""
        return self.work is None or bool(self.work.is_completed())


DONE = Handle()


class Transport(ABC):
    """The communication backend of an axis of several ranks.

    The methods are the collectives of mpu/comm/collectives.py and the messages of mpu/comm/p2p.py,
    where their results are documented.

    staged: GPU tensors are copied through host memory. symmetric: the ranks can access one
    another's memory; else why_not is the reason, if it is known.
    """

    staged = False
    symmetric = False
    why_not = ""

    def on_gpu(self, x: Tensor) -> bool:
        """Return whether a tensor is on a GPU, or represents one that is (mpu/comm/meta.py)."""
        return x.is_cuda

    @abstractmethod
    def all_reduce(
        self, x: Tensor, axis: "Axis", async_op: bool, op: Any, label: Label | None
    ) -> tuple[Tensor, Handle]:
        """Sum x over the axis, in place, or combine it by another op of torch.distributed."""

    @abstractmethod
    def all_gather(
        self, x: Tensor, axis: "Axis", async_op: bool, into: Tensor | None, label: Label | None
    ) -> tuple[Tensor, Handle]:
        """Concatenate the ranks' x along dim 0."""

    @abstractmethod
    def reduce_scatter(
        self, x: Tensor, axis: "Axis", async_op: bool, into: Tensor | None, label: Label | None
    ) -> tuple[Tensor, Handle]:
        """Sum x over the axis; return this rank's slice of dim 0."""

    @abstractmethod
    def all_to_all(
        self, x: Tensor, axis: "Axis", async_op: bool, splits: Splits | None, label: Label | None
    ) -> tuple[Tensor, Handle]:
        """Send each rank its rows of dim 0: equal parts, unless `splits` are given."""

    @abstractmethod
    def send(self, x: Tensor, axis: "Axis", to: int, label: Label | None) -> Handle:
        """Start sending x to the axis' rank `to`."""

    @abstractmethod
    def receive(self, out: Tensor, axis: "Axis", source: int, label: Label | None) -> Handle:
        """Post a receive of `out` from the axis' rank `source`."""

    @abstractmethod
    def exchange(
        self, x: Tensor, axis: "Axis", to: int, source: int, into: Tensor, label: Label | None
    ) -> Handle:
        """Start sending x to one rank and receiving `into` from another."""

    @abstractmethod
    def gather_bytes(self, data: bytes, axis: "Axis", device: torch.device | None) -> list[bytes]:
        """Return the bytes of every rank, in axis order."""


@dataclass(frozen=True, eq=False)
class Axis:
    """A group of ranks that communicate, as seen by this rank."""

    name: str
    rank: int = 0  # this rank's place in the axis
    size: int = 1
    ranks: tuple[int, ...] = (0,)  # global ranks, in the order of the axis
    transport: Transport | None = None  # None at size 1, and before Grid.connect
    trace: Trace | None = None  # receives every start, unless None
    waits: Waits | None = None  # the timed waits of this rank, over all its axes

    @property
    def following(self) -> list[int]:
        """Return the other ranks' places in cyclic order, the next rank's first."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    @cached_property
    def _over(self) -> str:
        return f" over {self.name} (ranks {list(self.ranks)})"

    @property
    def staged(self) -> bool:
        """Return whether GPU tensors are copied through host memory."""
        return self.transport is not None and self.transport.staged

    @property
    def symmetric(self) -> bool:
        """Return whether the ranks can access one another's memory."""
        return self.transport is not None and self.transport.symmetric

    def on_gpu(self, x: Tensor) -> bool:
        """Return whether a tensor is on a GPU, or represents one that is."""
        return x.is_cuda if self.transport is None else self.transport.on_gpu(x)

    @property
    def required_transport(self) -> Transport:
        """Return the transport. Raises ValueError where the axis has none yet."""
        if self.transport is None:
            raise ValueError(
                f"the {self.size} ranks of {self.name} are not connected: call Grid.connect (or "
                "Grid.add_groups) before you make the LayerContext, which copies the grid's axes"
            )
        return self.transport

    def start(
        self,
        verb: str,
        tensor: Tensor,
        *,
        async_op: bool = False,
        label: Label | None = None,
        peer: int | None = None,
        splits: Splits | None = None,
    ) -> Handle:
        """Record the start of one collective or message; return its Handle.

        The caller starts it in the block of `with handle`. tensor: the input; for a receive, the
        result. label: the caller, for the trace. peer: for a message, the global rank at the other
        end. splits: for an uneven all-to-all.
        """
        event = None
        if self.trace is not None:
            leaving = None if splits is None else sum(splits.input) - splits.input[self.rank]
            sent = sent_bytes(verb, tensor, self.size, leaving)
            event = self.trace.issued(verb, self, tensor, sent, async_op, label)
        waits, wait = self.waits, None
        if waits is not None and verb in MESSAGES:
            wait = Wait(verb, self.name, self.ranks if peer is None else (peer,), 0)
        elif waits is not None:
            number = waits.started[self.name] = waits.started.get(self.name, 0) + 1
            wait = waits.last = Wait(verb, self.name, self.ranks, number)
        return Handle(None, verb + self._over, event, waits, wait, async_op)


def sent_bytes(verb: str, tensor: Tensor, size: int, leaving: int | None = None) -> int:
    """Return the bytes that a rank sends for a verb on `tensor`, by the ideal algorithm.

    leaving: for an uneven all-to-all, the rows for other ranks.
    """
    n = tensor.numel() * tensor.element_size()
    if leaving is not None:
        return n // max(len(tensor), 1) * leaving
    if verb == "receive":
        return 0
    if verb == "all_gather":
        return n * (size - 1)
    if verb == "all_reduce":
        return 2 * n * (size - 1) // size
    return n * (size - 1) // size if verb in ("reduce_scatter", "all_to_all") else n
