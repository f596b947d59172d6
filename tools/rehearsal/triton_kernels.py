# SPDX-License-Identifier: Apache-2.0
"""Stand in for Triton's launches and for memory that GPUs share: each launch is recorded, not run.

What a launch costs is in kernel_costs.py. Memory of other ranks is seen as views of this
rank's own: it has no values, and takes no room here.
"""

import importlib.util
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from mpu.kernels import available
from mpu.torch_private import TorchLacks, symmetric_memory
from tools.rehearsal.events import Launch
from tools.rehearsal.kernel_costs import cost_of
from tools.rehearsal.order import Finding
from tools.rehearsal.record import Recorder

FAR = 1 << 58  # between the addresses of two ranks' memory


class Shared:
    """What torch's rendezvous returns."""

    def __init__(self, own: Tensor, rank: int, size: int) -> None:
        self.own = own
        start = own.data_ptr()
        self.buffer_ptrs = [start + (r - rank) * FAR for r in range(size)]
        self.rank = rank

    def get_buffer(
        self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, offset: int = 0
    ) -> Tensor:
        """Return a rank's memory."""
        flat = self.own[offset : offset + torch.Size(sizes).numel() * dtype.itemsize]
        view = flat.view(dtype).view(sizes)
        view.weft_address = self.buffer_ptrs[rank] + offset  # type: ignore[attr-defined]
        return view


def install(recorder: Recorder, rank: int) -> None:
    """Replace them, for the whole process, where Triton is installed."""

    def rendezvous(own: Tensor, group: Any) -> Shared:
        return Shared(own, group.ranks.index(rank), len(group.ranks))

    with suppress(TorchLacks):
        memory = symmetric_memory()
        memory.empty, memory.rendezvous = torch.empty, rendezvous
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime.jit import JITFunction

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        name, where = kernel.fn.__name__, recorder.where()
        cost = cost_of(name, given)
        recorder.check_layout(f"triton::{name}", given, where)
        tensors = {key: x for key, x in given.items() if isinstance(x, Tensor)}
        written = [x for key, x in tensors.items() if key in cost.written]
        read = [x for k, x in tensors.items() if k not in cost.written or k in cost.adds]
        for key, x in tensors.items():
            if x.device.type != recorder.device:
                born, lines = recorder.birthplace(x), recorder.lines()
                what = f"{name} is given {key} in host memory"
                recorder.found.append(Finding("device", where.place, what, born, (born, *lines)))
        # products are timed by the dtype of their operands, which come first
        named = written if written and not cost.flops else list(tensors.values())
        uses = recorder.uses(read, written, where, recorder.stream)
        recorder.chain()
        recorder.events.append(
            Launch(
                f"triton::{name}",
                recorder.stream,
                tuple(tuple(x.shape) for x in tensors.values()),
                str(named[0].dtype).removeprefix("torch."),
                *uses[:2],
                bytes=cost.bytes,
                flops=cost.flops,
                where=where,
                spans=uses[2],
                dtypes=tuple(str(x.dtype).removeprefix("torch.") for x in tensors.values()),
                arguments=len(given),
            )
        )

    JITFunction.run = run
    kernels: Any = available
    kernels.launch = lambda: None  # nothing is compiled, so nothing is found missing
