# SPDX-License-Identifier: Apache-2.0
"""Overlap by messages: one part is in flight while another is multiplied. Any backend, any nodes.

A gather multiplies the rank's own part first, a scatter last. The other ranks' parts follow in
cyclic order, the next rank's first.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mpu.comm.collectives import sum_of_parts
from mpu.comm.p2p import exchange
from mpu.comm.transport import DONE, Axis, Handle, Label
from mpu.kernels import available
from mpu.overlap.method import Gathering, OverlapMethod, Product


class _RingGathering(Gathering):
    """A ring all-gather: each rank receives parts from the right and passes them on to the left."""

    def __init__(self, x: Tensor, axis: Axis, label: Label | None) -> None:
        self.x, self.axis, self._label = x, axis, label
        self._full = x.new_empty((axis.size, *x.shape))
        self._full[axis.rank] = x
        self._turns = [axis.rank, *axis.following]
        self._here = 1
        self._coming = DONE

    def start(self) -> None:
        """Start to pass this rank's own part on."""
        self._coming = self._pass_on(0)

    def _pass_on(self, i: int) -> Handle:
        if i + 1 == self.axis.size:
            return DONE
        left, right = (self.axis.rank - 1) % self.axis.size, (self.axis.rank + 1) % self.axis.size
        into = self._full[self._turns[i + 1]]
        return exchange(self._full[self._turns[i]], self.axis, left, right, into, self._label)

    def multiply(self, weight: Tensor, product: Product) -> Tensor:
        n, size, out = self.x.shape[0], self.axis.size, None
        for rank, part in self._parts():
            mine = product(part, weight)
            if out is None:
                out = mine.new_empty((size * n, *mine.shape[1:]))
            out[rank * n : (rank + 1) * n] = mine
        assert out is not None
        return out

    def _parts(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (rank, its x), own first, each once it has arrived and the next is in flight."""
        for i, rank in enumerate(self._turns):
            if i == self._here:
                self._coming.wait()
                self._here += 1
                self._coming = self._pass_on(i)
            yield rank, self._full[rank]

    def gathered(self) -> Tensor:
        for _ in self._parts():
            pass
        return self._full.flatten(0, 1)


class Ring(OverlapMethod):
    """Parts as messages: gathered around the ring, scattered directly to their owners."""

    def start_all_gather(self, x: Tensor, label: Label | None) -> Gathering:
        gathering = _RingGathering(x, self.axis, label)
        gathering.start()
        return gathering

    def matmul_reduce_scatter(
        self, x: Tensor, weight: Tensor, product: Product, label: Label | None
    ) -> tuple[Tensor, Handle]:
        rank, size = self.axis.rank, self.axis.size
        n = x.shape[0] // size
        parts, flying = None, []
        for i, owner in enumerate([*self.axis.following, rank], 1):
            mine = product(x[owner * n : (owner + 1) * n], weight)
            if parts is None:
                parts = mine.new_empty((size, *mine.shape))
            if owner == rank:
                parts[rank] = mine
            else:
                source = (rank - i) % size
                flying.append(exchange(mine, self.axis, owner, source, parts[source], label))
        assert parts is not None
        out = torch.empty_like(parts[0])

        def finish() -> None:
            for handle in flying:
                handle.wait()
            if self.axis.on_gpu(out) and (out.is_meta or not available.why_not()):
                _sum_by_kernel(parts, out)
            else:
                sum_of_parts(parts, out)

        return out, Handle(finish=finish)


def _sum_by_kernel(parts: Tensor, out: Tensor) -> None:
    """Compute sum_of_parts in one launch; nothing for meta tensors, as it allocates no memory."""
    if not out.is_meta:
        from mpu.kernels import sum_of_parts as kernel

        kernel.sum_of_parts(parts, out)
