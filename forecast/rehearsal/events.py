# SPDX-License-Identifier: Apache-2.0
"""The events of one rank, in the order of its host's calls: the rehearsal's record.

The recorder (record.py in this folder) writes these; memory.py, order.py, clock.py and report.py
read them. A stream is a number: 0 is the stream that computes. A communicator has a stream of its
own, as in NCCL. A storage is a number too, and never used for another storage.
"""

from typing import NamedTuple


class Where(NamedTuple):
    """Which part of the step calls. place: file:line of the innermost line of the product.

    phase: "forward", "backward", "wgrad", "grad sum", "gather", "update", ... layer: the innermost
    module's name in the model, such as "layers.3.mlp.down"; "" outside of all. part: "norm",
    "rope", "swiglu", "attention", "loss", "embedding", "linear", "wgrad", "optimizer" or "glue".
    function: the innermost torch.autograd.Function, such as "AllGatherMatmul" in its forward and
    "AllGatherMatmul.backward" in its backward.
    """

    phase: str = ""
    layer: str = ""
    part: str = "glue"
    place: str = ""
    function: str = ""


class Launch(NamedTuple):
    """One kernel, or one library call, on a stream."""

    op: str  # such as "aten::mm", or the name of a Triton kernel
    stream: int
    shapes: tuple[tuple[int, ...], ...]  # of its tensors, inputs first
    dtype: str
    read: tuple[int, ...]  # storages
    written: tuple[int, ...]  # storages
    bytes: int  # read and written, each tensor once
    flops: float  # of its matmuls
    where: Where
    # of each storage read, then of each written: bytes [low, high); empty: all of it
    spans: tuple[tuple[int, int], ...] = ()
    dtypes: tuple[str, ...] = ()  # of its tensors, as `shapes`
    host: tuple[str, ...] = ()  # places of inputs that are in host memory
    arguments: int = 0  # of a Triton kernel: arguments of its launch


class Transfer(NamedTuple):
    """One collective, or one message, on the stream of its communicator.

    It waits for what was launched before it on the stream `origin`, which called it.
    """

    id: int  # counts the transfers of the rank
    verb: str  # all_gather, reduce_scatter, all_reduce, all_to_all, send or receive
    axis: str  # such as "tp", "dp_cp"
    group: tuple[int, ...]  # the communicator's ranks in the world
    peer: int  # of a message: the rank at its other end; else -1
    number: int  # its place among the transfers of its communicator, from 0
    bytes: int  # of the input; of a receive, of the result
    sent: int  # bytes that leave this rank, by the ideal algorithm
    dtype: str
    shape: tuple[int, ...]
    stream: int
    origin: int
    read: tuple[int, ...]
    written: tuple[int, ...]
    batch: int  # the same number for messages that start together; -1: it starts alone
    label: str
    where: Where
    spans: tuple[tuple[int, int], ...] = ()  # as in Launch
    op: str = ""  # the operator of a reduction
    communicator: str = ""  # its name, the same on all its ranks
    urgent: bool = False  # its stream has high priority
    is_async: bool = False  # the program waits for it later


class Record(NamedTuple):
    """An event marks how far a stream is."""

    event: int
    stream: int
    place: str


class Wait(NamedTuple):
    """A stream waits until an event's mark is reached, or a transfer's end (then event is -1)."""

    event: int
    stream: int
    place: str
    transfer: int = -1


class HostWait(NamedTuple):
    """The host waits: for an event, for all of a stream (event -1), or for the device (both -1)."""

    event: int
    stream: int
    reads: str  # what it reads then, such as "aten::item", or ""
    where: Where
    made: str = ""  # the line that made the host's side of a copy
    storage: int = -1  # the storage that it reads
    declared: bool = False  # within mpu.host_memory.read_values


class Polled(NamedTuple):
    """The host queried whether a transfer is over, and it was."""

    transfer: int


class HostUse(NamedTuple):
    """The host itself reads and writes page-locked memory, which the device may copy meanwhile."""

    read: tuple[int, ...]
    written: tuple[int, ...]
    where: Where
    spans: tuple[tuple[int, int], ...] = ()


class RecordStream(NamedTuple):
    """A storage is not used again by the allocator before this stream is done with it."""

    storage: int
    stream: int
    place: str


class Alloc(NamedTuple):
    """A storage begins, allocated while `stream` was current."""

    storage: int
    bytes: int
    kind: str
    stream: int
    device: str
    where: Where


class Free(NamedTuple):
    """A storage ends: its last reference is gone."""

    storage: int
    place: str


class Call(NamedTuple):
    """The host enters a torch.autograd.Function, forward or backward. name: of its class."""

    name: str


class Action(NamedTuple):
    """The rank begins something else. words: of FailureMonitor.action."""

    words: str


Event = (
    Launch | Transfer | Record | Wait | HostWait | Polled | HostUse | RecordStream | Alloc | Free
    | Call | Action
)  # fmt: skip
