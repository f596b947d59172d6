# SPDX-License-Identifier: Apache-2.0
"""Keep masters and optimizer state in host memory between steps (`--optimizer-state-offload`).

The update stays on the device. A bucket's state, and that of the next bucket, is copied up once its
last gradient is complete, so during the rest of backward. It is copied down during the next
forward, in forward order, and its memory is freed at the first use of the bucket's weights:

    compute   ... backward 0 | backward 1 | backward 2 | norm, update | forward 2 | forward 1 | ...
    up                       | state 0, 1 | state 2    |
    down                                                              | state 2   | state 1   | ...

So it is on the host while activations need most memory. Storages are resized to zero and back, so
an updater's tensors stay the same objects, for any optimizer. Bytes are copied, so no bit changes.
On a CPU the same code makes plain copies.
"""

from collections.abc import Sequence
from enum import Enum
from itertools import pairwise

import torch
from torch import Tensor

from mpu.host_memory import ALIGN, HostMemory
from mpu.optim.interface import StateHome, Updater

Stream = torch.cuda.Stream | None  # None on a CPU
Event = torch.cuda.Event | None


class At(Enum):
    """Where a bucket's state is."""

    DEVICE = "on the device"
    DOWN = "on its way down; the device has it too"
    HOST = "in host memory"
    UP = "on its way up; the host has it too"


class BucketState:
    """The masters and the optimizer state of one bucket.

    flats: all elements of each storage. home: their host memory between steps. following: the
    bucket whose gradients are complete next.
    """

    def __init__(self, flats: Sequence[Tensor], host: HostMemory, streams: tuple[Stream, Stream]):
        self.flats = flats
        self.home = [host.empty(tuple(flat.shape), flat.dtype) for flat in flats]
        self.at = At.DEVICE
        self._sizes = [flat.nbytes for flat in flats]
        self._up, self._down = streams
        self._over: Event = None  # marks the end of the last copies
        self.following: BucketState | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes copied in each direction per step."""
        return sum(self._sizes)

    def fetch(self) -> None:
        """Start to copy this bucket's state and the next one's to the device."""
        self._fetch()
        if self.following:
            self.following._fetch()

    def _fetch(self) -> None:
        """Start the copy to the device, unless the device has the state."""
        if self.at == At.DOWN:  # its weights have not been used since: nothing was freed
            self.at = At.DEVICE
        if self.at != At.HOST:
            return
        for flat, size in zip(self.flats, self._sizes, strict=True):
            flat.untyped_storage().resize_(size)
        self._copy(self._up, self.flats, self.home)
        self.at = At.UP

    def arrive(self) -> None:
        """Make the current stream wait until the state is on the device."""
        self._fetch()
        if self.at == At.UP:
            self._wait()
            self.at = At.DEVICE

    def send(self) -> None:
        """Start the copy to the host; the device's memory stays until `leave`."""
        assert self.at == At.DEVICE
        self._copy(self._down, self.home, self.flats)
        self.at = At.DOWN

    def leave(self) -> None:
        """Free the device memory of state that is being copied to the host, once it has arrived."""
        if self.at != At.DOWN:
            return
        self._wait()
        for flat in self.flats:
            flat.untyped_storage().resize_(0)
        self.at = At.HOST

    def rest(self) -> None:
        """Move the state to host memory only, so that the host may read and write it."""
        if self.at == At.UP:
            self.arrive()
        if self.at == At.DEVICE:
            self.send()
        self.leave()
        if self._over:
            self._over.synchronize()

    def _copy(self, stream: Stream, into: Sequence[Tensor], from_: Sequence[Tensor]) -> None:
        """Start copies on a stream, after all work queued on the current one."""
        if stream:  # earlier writers of the state and users of the memory are on the current stream
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            for to, own in zip(into, from_, strict=True):
                to.copy_(own, non_blocking=True)
        self._over = stream.record_event() if stream else None

    def _wait(self) -> None:
        """Make the current stream wait for the last copies."""
        if self._over:
            self._over.wait()


class StateOffload(StateHome):
    """Keeps masters and state in host memory between steps; the device updates them."""

    def keep(self, states: Sequence[Sequence[Tensor]]) -> None:
        """Set the tensors of each bucket that move to host memory. Weights stay on the device, also
        if they are their own masters.
        """
        found = {id(x.untyped_storage()) for x in self.weights}
        flats: list[list[Tensor]] = []
        for tensors in states:
            flats.append([])
            for x in tensors:
                storage = x.untyped_storage()
                if id(storage) not in found and storage.nbytes():
                    found.add(id(storage))
                    size = storage.nbytes() // x.element_size()
                    flats[-1].append(x.detach().as_strided((size,), (1,), 0))
        every = [flat for some in flats for flat in some]
        streams: tuple[Stream, Stream] = None, None
        if every and (device := every[0].device).type == "cuda":
            streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        host = HostMemory(streams[0] is not None, sum(flat.nbytes + ALIGN for flat in every))
        self.buckets = [BucketState(some, host, streams) for some in flats]
        for bucket, following in pairwise(self.buckets):
            bucket.following = following
        self._home = {  # by storage, whose identity survives resizing
            id(flat.untyped_storage()): home
            for bucket in self.buckets
            for flat, home in zip(bucket.flats, bucket.home, strict=True)
        }
        self.rest()

    @property
    def nbytes(self) -> int:
        """Return the bytes copied in each direction per step."""
        return sum(bucket.nbytes for bucket in self.buckets)

    def masters_to_read(self) -> list[Tensor]:
        """Return the masters of each bucket, on the device if it has their values."""
        if all(bucket.at in (At.DEVICE, At.DOWN) for bucket in self.buckets):
            return self.masters
        self.rest()
        return [self.at_rest(master) for master in self.masters]

    def update(
        self, updaters: Sequence[Sequence[Updater]], factor: Tensor, found_inf: Tensor
    ) -> None:
        """Update once all state has arrived."""
        self.arrive()
        super().update(updaters, factor, found_inf)

    def arrive(self) -> None:
        """Make the current stream wait until all state is on the device, for an update."""
        for bucket in self.buckets:
            bucket.fetch()
        for bucket in self.buckets:
            bucket.arrive()

    def leave(self) -> None:
        """Start to copy all state to the host, after an update."""
        for bucket in reversed(self.buckets):  # approximately the order of the next forward
            bucket.send()

    def rest(self) -> None:
        """Move all state to host memory, so that the host may read and write it."""
        for bucket in self.buckets:
            bucket.rest()

    def at_rest(self, x: Tensor) -> Tensor:
        """Return a view of a tensor's host memory; `x` itself if it stays on the device."""
        flat = self._home.get(id(x.untyped_storage()))
        if flat is None:
            return x
        return flat.as_strided(x.shape, x.stride(), x.storage_offset())
