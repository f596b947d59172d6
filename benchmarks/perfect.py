# SPDX-License-Identifier: Apache-2.0
"""Run pretrain_llama.py without communication: ranks copy their own data instead of receiving.

    torchrun --nproc-per-node 2 benchmarks/perfect.py FLAGS OF pretrain_llama.py

The results are wrong; the time of a step is that with perfect communication. All matmuls and copies
are made. Only messages of MESSAGE elements or more are replaced, so the ranks still agree on the
loss and the norm.
"""

import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pretrain_llama  # noqa: E402
from mpu.comm import collectives  # noqa: E402
from training.run.process import as_process  # noqa: E402

MESSAGE = 4096


def main(flags: list[str]) -> int:
    """Replace the process group's collectives, then train."""
    gather, exchange, reduce = collectives._all_gather, dist.all_to_all_single, dist.all_reduce

    def gathered(out: Tensor, x: Tensor, **how: Any) -> Any:
        if x.numel() < MESSAGE:
            return gather(out, x, **how)
        for part in out.view(-1, x.numel()):
            if part.data_ptr() != x.data_ptr():
                part.copy_(x.view(-1))

    def exchanged(out: Tensor, x: Tensor, **how: Any) -> Any:
        if x.numel() < MESSAGE:
            return exchange(out, x, **how)
        out.copy_(x)

    def reduced(x: Tensor, **how: Any) -> Any:
        return reduce(x, **how) if x.numel() < MESSAGE else None

    collectives._all_gather = gathered
    dist.all_to_all_single, dist.all_reduce = exchanged, reduced
    return pretrain_llama.main([*flags, "--no-shared-memory"])


if __name__ == "__main__":
    as_process(lambda: main(sys.argv[1:]), None)
