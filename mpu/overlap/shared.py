# SPDX-License-Identifier: Apache-2.0
"""Overlap in memory that the ranks of one host share: parts are multiplied where they lie.

The parts lie one behind the other, so that one matmul takes them all. On a CPU there is nothing to
hide but a late rank, and a matmul in parts costs more than the whole. A scatter is a matmul, then
the transport's reduce-scatter, which sums as under `none`.
"""

from torch import Tensor

from mpu.comm.transport import Axis, Label
from mpu.comm.workspace import Turn, Workspace
from mpu.overlap.method import Gathering, NoOverlap


class _SharedGathering(Gathering):
    """Each rank writes its part where all see it."""

    def __init__(self, x: Tensor, axis: Axis, workspace: Workspace, label: Label | None) -> None:
        super().__init__(x, axis)
        self._copy: Tensor | None = None

        def call() -> Turn:
            self._turn = workspace.begin(x.nbytes)
            self._turn.complete = self._save
            self._turn.put(x)
            return self._turn

        self._handle = axis.start("all_gather", x, call, (x,), None, async_op=True, label=label)

    def whole(self) -> Tensor:
        self._handle.wait()
        if self._copy is not None:
            return self._copy
        shape = (self.axis.size * self.x.shape[0], *self.x.shape[1:])
        return self._turn.whole(shape, self.x.dtype)

    def close(self) -> None:
        self._turn.close()
        self._turn.complete = self._turn.close  # else turn and gathering keep each other, and x

    def _save(self) -> None:
        """Copy what a later turn is about to overwrite."""
        self._copy = self.whole().clone()
        self._turn.close()


class Symmetric(NoOverlap):
    """Gathers are read in place; scatters go by the axis' transport."""

    def __init__(self, axis: Axis, workspace: Workspace) -> None:
        super().__init__(axis)
        self.workspace = workspace

    def all_gather(self, x: Tensor, label: Label | None) -> Gathering:
        return _SharedGathering(x, self.axis, self.workspace, label)
