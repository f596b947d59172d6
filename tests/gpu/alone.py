# SPDX-License-Identifier: Apache-2.0
"""One process that plays a rank of a tp axis on its own: for compiling and for timing kernels.

Every address of a peer lies in this process's own memory, and every flag that a peer would raise is
set already. So the overlap kernels run, or are compiled, exactly as between ranks, and wait for
nobody. What they compute of the peers' rows is of no use.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mpu.comm.collectives import ProcessGroupTransport
from mpu.comm.transport import Axis

HOPPER = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
FAR = 2**31 - 1  # an epoch that no run reaches


@contextmanager
def as_rank(rank: int, size: int, device: torch.device) -> Iterator[Any]:
    """Yield the CudaWorkspace of a rank whose peers are this process too."""
    from mpu.comm import symmetric_cuda

    def empty(nbytes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(nbytes, dtype=dtype, device=device)

    def rendezvous(memory: Tensor, group: Any) -> Any:
        def get_buffer(rank: int, sizes: tuple[int], dtype: torch.dtype, first: int) -> Tensor:
            return memory[first : first + sizes[0]]

        return SimpleNamespace(buffer_ptrs=[memory.data_ptr()] * size, get_buffer=get_buffer)

    lone = SimpleNamespace(empty=empty, rendezvous=rendezvous)
    axis = Axis("tp", rank, size, tuple(range(size)), ProcessGroupTransport(None))
    with (
        mock.patch.object(symmetric_cuda, "symmetric_memory", lambda: lone),
        mock.patch.object(symmetric_cuda, "gather_bytes", lambda data, *about: [data] * size),
        mock.patch.object(torch.cuda, "synchronize", _synchronize(device)),
        mock.patch.object(torch.cuda, "Stream", _stream(device)),
    ):
        yield symmetric_cuda.CudaWorkspace(axis, device, timedelta(seconds=20))


def _synchronize(device: torch.device) -> Any:
    """Return torch.cuda.synchronize, or nothing where there is no GPU."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda *about: None


def _stream(device: torch.device) -> Any:
    """Return torch.cuda.Stream, or what stands for it where there is no GPU."""
    return torch.cuda.Stream if device.type == "cuda" else lambda *about, **more: None


def raise_all(workspace: Any) -> None:
    """Set every flag of this process's memory, so that no wait lasts."""
    memory = workspace.memory
    memory.own[: memory.control].view(torch.int32).fill_(FAR)


class _Driver:
    """What Triton asks of a GPU's driver before it launches: here there is no GPU."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """What a stretch of code would launch. keys: of the kernels, in the order of first use.

    mine: how many of them this worker has compiled, or found in Triton's cache on disk.
    """

    def __init__(self) -> None:
        self.keys: dict[str, int] = {}
        self.mine = 0


@contextmanager
def compiling(
    worker: int = 0, workers: int = 1, capability: int = 90, really: bool = True
) -> Iterator[Compiled]:
    """Compile what is launched inside instead of launching it, on any machine.

    Of `workers` processes that run the same code each compiles its share of the kernels. Triton
    keeps them on disk, where a later launch on a GPU of that capability finds them. really: False
    only counts them.
    """
    import triton
    from triton.runtime import jit
    from triton.runtime.driver import driver

    from mpu.kernels import all_gather_matmul, matmul_reduce_scatter
    from mpu.kernels.launch import Kernel

    seen = Compiled()

    def skip(*, key: str, repr: str, **more: Any) -> bool:
        name = f"{repr} {key}"
        number = seen.keys.setdefault(name, len(seen.keys))
        mine = really and number % workers == worker
        seen.mine += mine
        return not mine

    def warm(kernel: Kernel, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        kernel.jitted.run(*args, grid=grid, warmup=True, **named)

    active = driver._active
    driver.set_active(_Driver(capability))
    with (
        mock.patch.object(Kernel, "launch", warm),
        mock.patch.object(triton.knobs.runtime, "jit_cache_hook", skip),
        # what Triton 3.6 would write of each kernel for the hook has no text for a jitted constant
        mock.patch.object(jit, "serialize_specialization_data", lambda *about: ""),
        mock.patch.object(torch.cuda, "get_device_properties", lambda device: HOPPER),
        mock.patch.object(all_gather_matmul, "check_device", lambda x: None),
        mock.patch.object(matmul_reduce_scatter, "check_device", lambda x: None),
    ):
        try:
            yield seen
        finally:
            driver._active = active
