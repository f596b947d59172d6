# SPDX-License-Identifier: Apache-2.0
"""Replace what a rank on a CPU calls besides torch: the native library and shared memory.

Both use addresses, which fake tensors do not have. A call of the library is recorded as a launch,
such as `weft::norm_forward`, with the tensors that it reads and writes (`CALLS`). Memory shared by
ranks is a tensor of the kind `shared memory`, whose flags are always set. To record a run on real
tensors (`real`) the same functions also call the library.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from forecast.rehearsal.events import Launch
from forecast.rehearsal.group import Distributed
from forecast.rehearsal.patches import Patches
from forecast.rehearsal.record import Recorder
from mpu.comm import p2p, symmetric, workspace
from mpu.comm.transport import Axis, Handle
from mpu.layers import fused

SHARED = "shared memory"
CALLS = {  # function of csrc: which of its tensor arguments it reads, and which it writes
    "norm_forward": ((0, 1, 2), (3, 4, 5)),
    "norm_backward": ((0, 1, 2, 3, 4, 6), (5, 6)),
    "swiglu_forward": ((0,), (1,)),
    "swiglu_backward": ((0, 1), (2,)),
    "rope": ((0, 1, 2), (3,)),
    "softmax_stats": ((0,), (1, 2)),
    "softmax_gradient": ((0, 1, 2, 3), (0,)),
    "attention_forward": ((0, 1, 2), (3, 4)),
    "attention_backward": ((0, 1, 2, 3, 4, 5), (6,)),
    "block_forward": ((0, 1, 2), (3, 4)),
    "block_backward": ((0, 1, 2, 3, 4, 5), (6, 7, 8)),
    "copy": ((0,), (1,)),
}
# number of matmuls of an [s, keys] matrix per head of attention; a causal one computes half of each
PRODUCTS = {"forward": 2, "backward": 5}


class Host:
    """Replacements of mpu's functions that bypass torch. real: tensors have memory."""

    def __init__(self, recorder: Recorder, real: bool = False) -> None:
        self.recorder, self.real = recorder, real

    def install(self, patches: Patches, network: Distributed) -> None:
        """Install the replacements. network: records collectives through shared memory."""
        begin = workspace.Workspace.begin

        def begun(space: workspace.Workspace, part_bytes: int) -> workspace.Epoch:
            network.through_memory()
            return begin(space, part_bytes)

        patches.replace(workspace.Workspace, "begin", begun)
        patches.everywhere(fused.call, self.call(fused.call))
        patches.everywhere(symmetric.copy, self.copy)
        patches.replace(p2p.SendQueue, "put", put)
        patches.replace(workspace, "SymmetricBuffer", self.buffer)

    def call(self, native: Callable[..., None]) -> Callable[..., None]:
        """Return the replacement of mpu.layers.fused.call, `native`."""

        def call(name: str, dtype: torch.dtype, *args: Tensor | int | float | None) -> None:
            if self.real:
                native(name, dtype, *args)
            tensors = [a for a in args if a is None or isinstance(a, Tensor)]
            self.launched(name, tensors, flops(name, args))

        return call

    def copy(self, to: Tensor, x: Tensor) -> None:
        """Replace mpu.comm.symmetric.copy."""
        plain = to.dtype == x.dtype and to.is_contiguous() and x.is_contiguous()
        if not plain or x.nbytes < symmetric.LARGE:
            to.copy_(x)
            return
        if self.real:
            symmetric._library().weft_copy(to.data_ptr(), x.data_ptr(), x.nbytes)
        self.launched("copy", [x, to])

    def launched(self, name: str, args: Sequence[Tensor | None], flops: float = 0.0) -> None:
        """Record a call of the library, unless the recorder is paused."""
        recorder = self.recorder
        if recorder.paused:
            return
        where = recorder.where()
        reads, writes = CALLS[name]
        read, written = (
            [x for i in places if (x := args[i]) is not None] for places in (reads, writes)
        )
        tensors = [x for x in args if x is not None]
        recorder.check_layout(f"weft::{name}", dict(enumerate(args)), where)
        found = recorder.uses(read, written, where, recorder.stream)
        kinds = tuple(str(t.dtype).removeprefix("torch.") for t in tensors)
        recorder.events.append(
            Launch(
                op=f"weft::{name}",
                stream=recorder.stream,
                shapes=tuple(tuple(t.shape) for t in tensors),
                dtype=kinds[0],
                read=found[0],
                written=found[1],
                bytes=sum(x.nbytes for i in {*reads, *writes} if (x := args[i]) is not None),
                flops=flops,
                where=where,
                spans=found[2],
                dtypes=kinds,
            )
        )

    def buffer(self, axis: Axis, nbytes: int, timeout: timedelta, ranks: int = 0) -> Any:
        """Replace mpu.comm.symmetric.SymmetricBuffer."""
        recorder = self.recorder
        paused, recorder.paused = recorder.paused, True
        made = (
            symmetric.SymmetricBuffer(axis, nbytes, timeout, ranks)
            if self.real
            else FakeBuffer(axis, nbytes)
        )
        recorder.paused = paused
        recorder.number(made.data, kind=SHARED)
        return made


def flops(name: str, args: Sequence[Tensor | int | float | None]) -> float:
    """Return the FLOPs of a call of csrc/attention.h with these arguments, 0 for any other."""
    kind, _, way = name.partition("_")
    q = args[0]
    if kind not in ("attention", "block") or not isinstance(q, Tensor):
        return 0.0
    if kind == "attention":  # q [s, b, a, d]
        return float(PRODUCTS[way] * q.shape[0] * q.numel())
    _, _, keys, *_, causal = [a for a in args if isinstance(a, int)][:7]
    return float(PRODUCTS[way] * keys * q.numel() * (2 - causal))


class FakeBuffer:
    """Shared memory of a rank without peers: every flag is set, every wait returns at once."""

    def __init__(self, axis: Axis, nbytes: int) -> None:
        self.axis, self.rank, self.size = axis, axis.rank, axis.size
        lines = 4 + self.size + self.size * self.size
        control = -(-lines * symmetric.LINE // 4096) * 4096
        self.data = torch.empty(control + nbytes, dtype=torch.uint8)[control:]

    def ready(self, epoch: int) -> bool:
        """Return True: every rank has signalled."""
        return True

    def _nothing(self, *args: Any) -> None:
        """Neither signal nor wait."""

    signal = signal_all = wait = wait_all = close = wait_closed = barrier = refuse_fork = _nothing


def put(send_queue: p2p.SendQueue, handle: Handle) -> None:
    """Replace SendQueue.put: wait for each message at once, without the queue's thread.

    The thread frees a message once its peer has received it, at a moment that varies between runs.
    Schedules do not deadlock with blocking sends (mpu/pipeline/simulate.py).
    """
    handle.wait()
