# SPDX-License-Identifier: Apache-2.0
"""A kernel that keeps some SMs busy for a while, as a collective of NCCL does. It needs triton."""

import torch
import triton
import triton.language as tl

from mpu.kernels.declared import Cost, declared


@triton.jit
def clock():  # type: ignore[no-untyped-def]
    """Return the GPU's nanoseconds."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], tl.int64, False, 1)


@declared(lambda _: Cost(0))
@triton.jit
def hog_kernel(out, nanoseconds, NOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Spin for so long; with 32 warps of it an SM has room for little else."""
    begin = NOW()
    now = begin
    while now - begin < nanoseconds:
        now = NOW()
    tl.store(out + tl.program_id(0), now - begin)


def hog(sms: int, seconds: float, device: torch.device) -> None:
    """Keep `sms` SMs busy, on the current stream."""
    out = torch.empty(sms, dtype=torch.int64, device=device)
    hog_kernel.launch((sms,), out, int(seconds * 1e9), clock, num_warps=32)
