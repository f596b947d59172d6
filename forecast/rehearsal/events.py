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
    """One kernel, or one library call, on a stream.

    op: such as "aten::mm" or a Triton kernel's name. shapes: of its tensors, inputs first. read,
    written: storages. bytes: that it reads and writes, each tensor once. flops: of its matmuls.
    spans: of each storage read, then of each written, the bytes [low, high); empty: all of it.
    dtypes: of its tensors, as shapes. host: the places of inputs that lie in host memory.
    arguments: of a Triton kernel, those that its launch takes.
    """

    op: str
    stream: int
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    read: tuple[int, ...]
    written: tuple[int, ...]
    bytes: int
    flops: float
    where: Where
    spans: tuple[tuple[int, int], ...] = ()
    dtypes: tuple[str, ...] = ()
    host: tuple[str, ...] = ()
    arguments: int = 0


class Transfer(NamedTuple):
    """One collective, or one message, on its communicator's stream.

    id: counts the rank's transfers. verb: all_gather, reduce_scatter, all_reduce, all_to_all, send
    or receive. axis: "tp", "dp_cp".
    group: the communicator's ranks in the world. peer: of a message, the rank at its other end,
    else -1. number: this transfer's place among those of its communicator, from 0. bytes: of the
    input; of a receive, of the result. sent: bytes that leave this rank, by the ideal algorithm.
    batch: messages that start together have one number; -1 where one starts alone. From the
    stream `origin`, which called it, the transfer waits for what was launched on it before. op:
    what a reduction computes. spans: as of a Launch. communicator: its name, the same on all its
    ranks. urgent: its stream has high priority. is_async: the program waits for it later.
    """

    id: int
    verb: str
    axis: str
    group: tuple[int, ...]
    peer: int
    number: int
    bytes: int
    sent: int
    dtype: str
    shape: tuple[int, ...]
    stream: int
    origin: int
    read: tuple[int, ...]
    written: tuple[int, ...]
    batch: int
    label: str
    where: Where
    spans: tuple[tuple[int, int], ...] = ()
    op: str = ""
    communicator: str = ""
    urgent: bool = False
    is_async: bool = False


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
    """The host waits: for an event, or for all of a stream (event -1), or of the device (both -1).

    reads: "" or what it reads then, such as "aten::item"; storage: of what. made: the line that
    made the host's side of a copy. declared: within mpu.host_memory.read_values.
    """

    event: int
    stream: int
    reads: str
    where: Where
    made: str = ""
    storage: int = -1
    declared: bool = False


class Polled(NamedTuple):
    """The host queried whether an event, or a transfer (then event is -1), is over, and it was."""

    event: int
    transfer: int = -1


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
