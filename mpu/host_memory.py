# SPDX-License-Identifier: Apache-2.0
"""Page-locked host memory for large tensors, and reads of device values on the host.

torch's host allocator rounds n bytes up to the next power of two
(ATen/core/CachingHostAllocator.h; the setting that changes it is newer than torch 2.11), so 160 MB
lock 256 MB, and a checkpoint of 33 GB locks 64. Here many tensors share a slab whose size is a
power of two, and tensors themselves are not rounded:

    slab 0 (1 GiB)   | tensor 0 | tensor 1 | tensor 2 | tensor 3 | free |
    slab 1 (1 GiB)   | tensor 4 | ...
"""

from math import prod
from typing import Any

import torch
from torch import Tensor

ALIGN = 256  # bytes: alignment of each tensor
LEAST, MOST = 1 << 20, 1 << 30  # bytes of a slab, unless a tensor is larger
TENSORS = 8  # minimum number of equal tensors for which a slab has room, up to MOST


class HostMemory:
    """Allocates tensors in page-locked host memory; they keep their slab alive.

    locked: use page-locked memory, for a CUDA device; on a CPU each tensor has its own memory.
    expected: bytes of all tensors, if known, from which the sizes of slabs are chosen.
    """

    def __init__(self, locked: bool, expected: int = 0) -> None:
        self.locked, self._left = locked, expected
        self._slabs: list[tuple[Tensor, int]] = []  # (slab, bytes in use)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all slabs."""
        return sum(slab.nbytes for slab, _ in self._slabs)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor."""
        if not self.locked:
            return torch.empty(shape, dtype=dtype)
        return self._take(prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor of zeros."""
        return self.empty(shape, dtype).zero_() if self.locked else torch.zeros(shape, dtype=dtype)

    def _take(self, nbytes: int) -> Tensor:
        """Return a range of bytes in the first slab that has room, or in a new one."""
        room = -(-nbytes // ALIGN) * ALIGN
        places = (i for i, (slab, taken) in enumerate(self._slabs) if taken + room <= slab.nbytes)
        if (at := next(places, None)) is None:
            at, size = len(self._slabs), slab_bytes(room, self._left)
            slab = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            self._slabs.append((slab, 0))
        slab, taken = self._slabs[at]
        self._slabs[at], self._left = (slab, taken + room), self._left - room
        return slab[taken : taken + nbytes]


def slab_bytes(room: int, left: int = 0) -> int:
    """Return the size of a slab for tensors of `room` bytes: a power of two.

    left: bytes of this and all later tensors, 0 if unknown.
    """
    if left >= room:
        return max(power_of_two(room), 1 << (left.bit_length() - 1))
    return power_of_two(max(room, min(max(TENSORS * room, LEAST), MOST)))


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is not less than n >= 1."""
    return 1 << (n - 1).bit_length()


def read_values(x: Tensor, after: torch.cuda.Event | None = None) -> Any:
    """Return a tensor's values, as `x.tolist()` does: nested lists, or one number.

    after: an event at the end of a copy to x, which is then page-locked host memory.
    The host waits for the device and launches nothing meanwhile, so a step only reads what it must:
    sizes that depend on values, and values to log. A rehearsal reports every other wait.
    """
    if after is not None:
        after.synchronize()
    return x.tolist()
