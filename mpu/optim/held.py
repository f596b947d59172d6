# SPDX-License-Identifier: Apache-2.0
"""What an optimizer and its weights keep on a rank from step to step: tensors, and their bytes."""

from torch import Tensor

from mpu.optim.optimizer import Optimizer


def held(optimizer: Optimizer) -> dict[str, list[Tensor | None]]:
    """Return the tensors that a rank keeps from step to step, by kind."""
    buckets = optimizer.sink.buckets
    return {
        "parameters": [
            *(t for b in buckets for t in (b.param_shard, b.weights)),
            *(t for b in buckets if b.float8 is not None for t in b.float8.kept()),
        ],
        "gradients": [t for b in buckets for t in (b.grad_shard, b.grad)],
        "masters": [*optimizer.masters],
        "moments": [*optimizer.moments()],
    }


def memory(optimizer: Optimizer) -> dict[str, int]:
    """Return the bytes that a rank keeps from step to step, each live storage counted once."""
    optimizer.sink.wait_for_weights()  # rows of float8 then have their memory
    kinds, seen = held(optimizer), set[int]()
    bytes_of = dict.fromkeys(kinds, 0)
    for kind, tensors in kinds.items():
        for storage in (t.untyped_storage() for t in tensors if t is not None):
            bytes_of[kind] += storage.nbytes() * (storage.data_ptr() not in seen)
            seen.add(storage.data_ptr())
    return bytes_of
