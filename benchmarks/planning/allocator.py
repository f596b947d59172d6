# SPDX-License-Identifier: Apache-2.0
"""Follow PyTorch's caching allocator of CUDA memory: what a run reserves, fragments and all.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with its default settings: sizes are whole
512 bytes; the smallest free block that is large enough is taken, and split where over a MiB is left
(512 bytes among small ones); neighbours that are free become one block; a segment asked of CUDA is
2 MiB for small sizes, 20 MiB below 10 MiB, whole 2 MiB else; where CUDA has no more, segments that
are wholly free are given back.
"""

from bisect import bisect_left, insort
from collections import deque

MIB = 1 << 20


class Block:
    """A part of a segment. key: its place among the free ones, whose first number is its size."""

    __slots__ = ("after", "before", "free", "key", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.before: Block | None = None
        self.after: Block | None = None
        self.free = False
        self.key: tuple[int, int, Block] = (size, 0, self)


Taken = tuple[Block, int]  # and the pool it is of


class Allocator:
    """Bytes of one device. limit: of all segments.

    ahead: kernels by which the host is ahead of the device. What another stream has used can be
    taken again once the device has come by, so many kernels after it was freed; clock counts them.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.ahead = 0
        self.clock = 0
        self.reserved = 0
        self.most = 0
        self.full = False  # whether more was asked for than the limit
        self._free: tuple[list[tuple[int, int, Block]], ...] = ([], [])  # small, large
        self._number = 0
        self._waiting: deque[tuple[int, Block, int]] = deque()

    def take(self, size: int) -> Taken:
        """Return a block of at least so many bytes."""
        size = -(-size // 512) * 512
        while self._waiting and self._waiting[0][0] <= self.clock:
            self._release(*self._waiting.popleft()[1:])
        pool = int(size > MIB)
        free = self._free[pool]
        at = bisect_left(free, (size, 0))
        if at < len(free):
            block = free.pop(at)[2]
            block.free = False
        else:
            block = self._segment(size)
        left = block.size - size
        if left > (MIB if pool else 511):
            rest = Block(left)
            block.size = size
            rest.before, rest.after = block, block.after
            if rest.after is not None:
                rest.after.before = rest
            block.after = rest
            self._put(rest, pool)
        return block, pool

    def give(self, taken: Taken, elsewhere: bool = False) -> None:
        """Free a block. elsewhere: another stream has used it."""
        if elsewhere and self.ahead:
            self._waiting.append((self.clock + self.ahead, *taken))
        else:
            self._release(*taken)

    def wait(self) -> None:
        """Let the device come by."""
        while self._waiting:
            self._release(*self._waiting.popleft()[1:])

    def _segment(self, size: int) -> Block:
        whole = 2 * MIB if size <= MIB else 20 * MIB
        if size >= 10 * MIB:
            whole = -(-size // (2 * MIB)) * 2 * MIB
        if self.reserved + whole > self.limit:
            self.wait()
            for free in self._free:
                kept = [key for key in free if key[2].before or key[2].after]
                self.reserved -= sum(key[0] for key in free) - sum(key[0] for key in kept)
                free[:] = kept
            self.full = self.full or self.reserved + whole > self.limit
        self.reserved += whole
        self.most = max(self.most, self.reserved)
        return Block(whole)

    def _put(self, block: Block, pool: int) -> None:
        self._number += 1
        block.free, block.key = True, (block.size, self._number, block)
        insort(self._free[pool], block.key)

    def _release(self, block: Block, pool: int) -> None:
        free, after, before = self._free[pool], block.after, block.before
        if after is not None and after.free:
            del free[bisect_left(free, after.key)]
            block.size += after.size
            block.after = after.after
            if block.after is not None:
                block.after.before = block
        if before is not None and before.free:
            del free[bisect_left(free, before.key)]
            before.size += block.size
            before.after = block.after
            if before.after is not None:
                before.after.before = before
            block = before
        self._put(block, pool)
