# SPDX-License-Identifier: Apache-2.0
"""The events of one rank, in the order of its host's calls: the rehearsal's record.

The recorder (record.py) writes these; memory.py, order.py, clock.py and report.py read them.
Streams are numbers; 0 is the computing stream. A communicator has a stream of its own, as in NCCL.
Storages are numbers, too, and a number is never reused.
"""

from typing import NamedTuple


class Where(NamedTuple):
    """The part of the step that makes a call. place: file:line, the product's innermost line.

    phase: "forward", "backward", "wgrad", "grad sum", "update", ... layer: the innermost module's
    name in the model, such as "layers.3.mlp.down"; "" outside of all modules. part: "norm", "rope",
    "swiglu", "attention", "loss", "embedding", "linear", "wgrad", "optimizer", "glue", ...
    function: the innermost torch.autograd.Function, such as "AllGatherMatmul" in its forward and
    "AllGatherMatmul.backward" in its backward.
    """

    phase: str = ""
    layer: str = ""
    part: str = "glue"
    place: str = ""
    function: str = ""


class Launch(NamedTuple):
    """A kernel or a library call on a stream."""

    op: str  # such as "aten::mm", or the name of a Triton kernel
    stream: int
    shapes: tuple[tuple[int, ...], ...]  # of its tensors, inputs first
    dtype: str
    read: tuple[int, ...]  # storages
    written: tuple[int, ...]  # storages
    bytes: int  # read and written, each tensor once
    flops: float  # of its matmuls
    where: Where
    # bytes [low, high) of each storage read, then of each written; empty: the whole storages
    spans: tuple[tuple[int, int], ...] = ()
    dtypes: tuple[str, ...] = ()  # of its tensors, as `shapes`
    host: tuple[str, ...] = ()  # places of inputs that are in host memory
    arguments: int = 0  # of a Triton kernel: arguments of its launch


class Transfer(NamedTuple):
    """A collective or a message on the stream of its communicator.

    It waits for earlier work of the stream `origin`, the current stream when it was called.
    """

    id: int  # number among all transfers of the rank
    verb: str  # all_gather, reduce_scatter, all_reduce, all_to_all, send or receive
    axis: str  # such as "tp", "dp_cp"
    group: tuple[int, ...]  # the communicator's ranks in the world
    peer: int  # of a message: the rank at its other end; else -1
    number: int  # number among the transfers of its communicator, from 0
    bytes: int  # of the input; of a receive, of the result
    sent: int  # bytes that leave this rank, by the ideal algorithm
    dtype: str
    shape: tuple[int, ...]
    stream: int
    origin: int
    read: tuple[int, ...]
    written: tuple[int, ...]
    batch: int  # number of the batch with which a message starts; -1: it starts alone
    label: str
    where: Where
    spans: tuple[tuple[int, int], ...] = ()  # as in Launch
    op: str = ""  # the operator of a reduction
    communicator: str = ""  # its name, the same on all its ranks
    urgent: bool = False  # its stream has high priority
    is_async: bool = False  # the caller waits for it later
    differentiated: bool = True  # in an autograd function's forward: backward comes to it too


class Record(NamedTuple):
    """An event is recorded on a stream."""

    event: int
    stream: int
    place: str


class Wait(NamedTuple):
    """A stream waits for an event, or for the end of a transfer (then event is -1)."""

    event: int
    stream: int
    place: str
    transfer: int = -1


class HostWait(NamedTuple):
    """The host waits for an event, for a stream (event -1), or for the device (both -1)."""

    event: int
    stream: int
    reads: str  # the operation that makes it wait, such as "aten::item", or ""
    where: Where
    made: str = ""  # the line that made the host's side of a copy
    storage: int = -1  # the storage that it reads
    declared: bool = False  # within mpu.host_memory.read_values


class Polled(NamedTuple):
    """The host polled a transfer and found it complete."""

    transfer: int


class HostUse(NamedTuple):
    """The host reads or writes page-locked memory, which the device may copy at the same time."""

    read: tuple[int, ...]
    written: tuple[int, ...]
    where: Where
    spans: tuple[tuple[int, int], ...] = ()


class RecordStream(NamedTuple):
    """The allocator must not reuse a storage before this stream's work is done."""

    storage: int
    stream: int
    place: str


class Alloc(NamedTuple):
    """A storage is allocated while `stream` is current."""

    storage: int
    bytes: int
    kind: str
    stream: int
    device: str
    where: Where


class Free(NamedTuple):
    """A storage is freed: its last reference is gone, or it is resized."""

    storage: int
    place: str


class Call(NamedTuple):
    """The host enters a torch.autograd.Function's forward or backward. name: as Where.function."""

    name: str


class Action(NamedTuple):
    """The rank begins another action. words: as in FailureMonitor.action."""

    words: str


Event = (
    Launch | Transfer | Record | Wait | HostWait | Polled | HostUse | RecordStream | Alloc | Free
    | Call | Action
)  # fmt: skip
