# SPDX-License-Identifier: Apache-2.0
"""Replace Triton's launches, which are recorded and not run, and memory shared by GPUs.

A kernel declares the cost of a launch (mpu/kernels/declared.py). Memory of other ranks is
represented by views of this rank's own: it has no values here, and takes no memory.
"""

import importlib.util
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from forecast.rehearsal.events import Launch
from forecast.rehearsal.order import Finding
from forecast.rehearsal.record import Recorder
from mpu.kernels import available
from mpu.layers import fused_gpu, softmax_rows
from mpu.layers.fused_gpu import DTYPES, on_triton
from mpu.torch_private import TorchLacks, symmetric_memory

FAR = 1 << 58  # distance between the addresses of two ranks' memory


class Shared:
    """Replaces the result of symmetric memory's rendezvous."""

    def __init__(self, own: Tensor, rank: int, size: int) -> None:
        self.own = own
        start = own.data_ptr()
        self.buffer_ptrs = [start + (r - rank) * FAR for r in range(size)]
        self.rank = rank

    def get_buffer(
        self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, offset: int = 0
    ) -> Tensor:
        """Return a rank's memory as a tensor."""
        flat = self.own[offset : offset + torch.Size(sizes).numel() * dtype.itemsize]
        view = flat.view(dtype).view(sizes)
        view.weft_address = self.buffer_ptrs[rank] + offset  # type: ignore[attr-defined]
        return view


def install(recorder: Recorder, rank: int) -> None:
    """Replace both, for the whole process; Triton's launches only if it is installed."""

    def rendezvous(own: Tensor, group: Any) -> Shared:
        return Shared(own, group.ranks.index(rank), len(group.ranks))

    with suppress(TorchLacks):
        memory = symmetric_memory()
        memory.empty, memory.rendezvous = torch.empty, rendezvous
    if importlib.util.find_spec("triton") is None:
        return
    from mpu.kernels.launch import Kernel

    def asked(*tensors: Tensor, accumulate: torch.dtype | None = None) -> bool:
        taken = on_triton(*tensors, accumulate=accumulate)
        kinds = {x.dtype for x in tensors}  # if several: the model mixes dtypes on purpose
        alike = len(kinds) == 1 and kinds <= {*DTYPES}
        if not taken and alike and tensors[0].is_cuda and not recorder.paused:
            given = ", ".join(f"{x.dtype} of strides {x.stride()}" for x in tensors)
            what = "torch's operations run instead of a Triton kernel, which needs contiguous "
            what += "tensors of one dtype and sums in float32 (float64 for float64), but got "
            what += f"{given}" + (f", summed in {accumulate}" if accumulate else "")
            born, lines = recorder.birthplace(tensors[-1]), recorder.lines()
            recorder.found.append(Finding("stand-in", lines[0], what, born, (born, *lines)))
        return taken

    layers: list[Any] = [fused_gpu, softmax_rows]
    for module in layers:
        module.on_triton = asked

    def launch(kernel: Kernel, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        given = dict(zip(kernel.arg_names, args, strict=False)) | named
        name, where, told = kernel.fn.__name__, recorder.where(), kernel.declared
        cost = told.cost(given)
        recorder.check_layout(f"triton::{name}", given, where, told.requires)
        tensors = {key: x for key, x in given.items() if isinstance(x, Tensor)}
        written = [x for key, x in tensors.items() if key in cost.written]
        read = [x for k, x in tensors.items() if k not in cost.written or k in cost.adds]
        for key, x in tensors.items():
            if x.device.type != recorder.device:
                born, lines = recorder.birthplace(x), recorder.lines()
                what = f"{name} got {key} in host memory"
                recorder.found.append(Finding("device", where.place, what, born, (born, *lines)))
        # matmuls are timed by the dtype of their operands, which come first
        first = (written if written and not cost.flops else list(tensors.values()))[0]
        uses = recorder.uses(read, written, where, recorder.stream)
        recorder.chain()
        recorder.events.append(
            Launch(
                f"triton::{name}",
                recorder.stream,
                tuple(tuple(x.shape) for x in tensors.values()),
                str(first.dtype).removeprefix("torch."),
                *uses[:2],
                bytes=cost.bytes,
                flops=cost.flops,
                where=where,
                spans=uses[2],
                dtypes=tuple(str(x.dtype).removeprefix("torch.") for x in tensors.values()),
                arguments=len(given),
            )
        )

    own: Any = Kernel
    own.launch = launch
    kernels: Any = available
    kernels.launch = lambda: None  # nothing is compiled, so nothing is found missing
