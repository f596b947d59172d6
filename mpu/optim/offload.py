# SPDX-License-Identifier: Apache-2.0
"""Keep masters and optimizer state in host memory, and update there (`--optimizer-cpu-offload`).

Gradients are copied down, the host updates, and new weights are copied up. The buckets overlap:

    down stream    gradient 0 | gradient 1 | gradient 2
    host                        update 0   | update 1   | update 2
    up stream                                weights 0  | weights 1 | weights 2

The host waits for the gradients, so an offloaded step synchronises with the device. On a CPU
device the same code makes plain copies.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpu.host_memory import ALIGN, HostMemory
from mpu.optim.interface import StateHome, Updater


class Offload(StateHome):
    """Masters and state in host memory, updated by the host. For each bucket the host has its
    gradient, its master and the rounded master. Gradients are in the accumulation dtype on both.
    """

    def __init__(self, gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        self._gradients, self.weights = list(gradients), list(weights)
        device = gradients[0].device
        many = sum(
            2 * g.nbytes + w.nbytes * (w.dtype != g.dtype) + 3 * ALIGN
            for g, w in zip(gradients, weights, strict=True)
        )
        host = HostMemory(device.type == "cuda", many)
        self.gradients = [host.zeros(tuple(g.shape), g.dtype) for g in gradients]
        self.masters = [host.zeros(tuple(g.shape), g.dtype) for g in gradients]
        self._rounded = [
            master if w.dtype == master.dtype else host.zeros(tuple(w.shape), w.dtype)
            for master, w in zip(self.masters, weights, strict=True)
        ]
        self._scalars = host.zeros((2,), torch.float64)
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        if device.type == "cuda":
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.masters_from_weights()

    def together(self) -> list[list[int]]:
        """Return the groups of buckets that are updated together: here each bucket is its own."""
        return [[i] for i in range(len(self.gradients))]

    def update(
        self, updaters: Sequence[Sequence[Updater]], factor: Tensor, found_inf: Tensor
    ) -> None:
        """Step updaters[i] on bucket i's host tensors for every i, and copy the weights up.

        Work queued on the current stream after this uses the new weights.
        """
        down, up = self._streams or (None, None)
        arrived = []
        if down:
            down.wait_stream(torch.cuda.current_stream(down.device))
        with torch.cuda.stream(down):
            both = torch.stack([factor.double(), found_inf.double()])
            self._scalars.copy_(both, non_blocking=True)
            for gradient, host in zip(self._gradients, self.gradients, strict=True):
                host.copy_(gradient, non_blocking=True)
                arrived.append(down.record_event() if down else None)
        for i, (here, event) in enumerate(zip(updaters, arrived, strict=True)):
            if event:
                event.synchronize()
            for updater in here:
                updater.step(self._scalars[0], self._scalars[1].float())
            with torch.cuda.stream(up):  # gradient i came after every use of the old weights
                self._send(i)
        if up:
            torch.cuda.current_stream(up.device).wait_stream(up)

    def round(self, changed: Sequence[int]) -> None:
        """Copy the weights of the changed buckets up again."""
        for i in changed:
            self._send(i)

    def _send(self, i: int) -> None:
        """Round master i on the host, so that only weights are copied, and start the copy up."""
        if self._rounded[i] is not self.masters[i]:
            self._rounded[i].copy_(self.masters[i])
        self.weights[i].copy_(self._rounded[i], non_blocking=True)

    def weights_from_masters(self) -> None:
        """Round the masters into the weights, after masters were loaded."""
        for i in range(len(self.masters)):
            self._send(i)

    def loaded(self) -> None:
        """Resume from a checkpoint, which has no masters if the weights have their dtype."""
        if all(w.dtype == m.dtype for w, m in zip(self.weights, self.masters, strict=True)):
            self.masters_from_weights()
