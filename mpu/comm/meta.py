# SPDX-License-Identifier: Apache-2.0
"""Run any layout in one process, without numbers: the process groups' verbs, which send nothing."""

from collections.abc import Callable

import torch
from torch import Tensor

from mpu.comm.collectives import ProcessGroupTransport
from mpu.comm.transport import Axis

Answers = Callable[[bytes, Axis], list[bytes]]


def alike(data: bytes, axis: Axis) -> list[bytes]:
    """Answer for ranks that say what this one says."""
    return [data] * axis.size


class MetaTransport(ProcessGroupTransport):
    """Carries shapes alone: a model of meta tensors runs any layout in one process.

    A trace receives each collective and message, with the verb, the dtype and the memory that a
    process group would take. gpu: the tensors stand for those of GPUs. answers: what the ranks of
    an axis say where this one says some bytes.
    """

    sends = False

    def __init__(self, gpu: bool = False, answers: Answers = alike) -> None:
        super().__init__(None)
        self.gpu, self.answers = gpu, answers

    def on_gpu(self, x: Tensor) -> bool:
        """Return whether the run's tensors are on GPUs."""
        return self.gpu

    def adds(self, x: Tensor, out: Tensor) -> bool:
        """Return whether the sum takes no memory: on a CPU ranks add in memory that they share."""
        return not self.gpu or super().adds(x, out)

    def gather_bytes(self, data: bytes, axis: Axis, device: torch.device | None) -> list[bytes]:
        """Return what the ranks say."""
        return self.answers(data, axis)
