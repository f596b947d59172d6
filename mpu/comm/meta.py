# SPDX-License-Identifier: Apache-2.0
"""A transport that sends nothing: meta tensors of any layout run in one process."""

from collections.abc import Callable

import torch
from torch import Tensor

from mpu.comm.collectives import ProcessGroupTransport
from mpu.comm.transport import Axis

Answers = Callable[[bytes, Axis], list[bytes]]


def alike(data: bytes, axis: Axis) -> list[bytes]:
    """Return `data` as the answer of every rank."""
    return [data] * axis.size


class MetaTransport(ProcessGroupTransport):
    """Handles shapes only: a model of meta tensors runs any layout in one process.

    A trace receives each collective and message with the verb and dtype that a process group would
    use; the same memory is allocated. gpu: the tensors represent GPU tensors. answers: the result
    of `gather_bytes`, given this rank's bytes and the axis.
    """

    sends = False

    def __init__(self, gpu: bool = False, answers: Answers = alike) -> None:
        super().__init__(None)
        self.gpu, self.answers = gpu, answers

    def on_gpu(self, x: Tensor) -> bool:
        """Return whether the run's tensors are on GPUs."""
        return self.gpu

    def adds(self, x: Tensor, out: Tensor) -> bool:
        """Return whether the sum needs no buffer: on CPU the ranks add in shared memory."""
        return not self.gpu or super().adds(x, out)

    def gather_bytes(self, data: bytes, axis: Axis, device: torch.device | None) -> list[bytes]:
        """Return the bytes that `answers` gives for the ranks."""
        return self.answers(data, axis)
