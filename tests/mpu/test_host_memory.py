# SPDX-License-Identifier: Apache-2.0
"""Page-locked memory of large tensors, beside a stand-in that rounds as torch's allocator does."""

from types import SimpleNamespace

import pytest
import torch

from mpu.activation_offload import HostCopies, Stored
from mpu.host_memory import ALIGN, HostMemory, power_of_two, slab_bytes
from mpu.optim import offload
from training.checkpoint import stage

MB = 1 << 20


@pytest.fixture
def locked(monkeypatch):
    """Let pin_memory lock the next power of two, as CachingHostAllocator.h; nothing is allocated.

    Returns a list, to which the locked bytes of each tensor are added.
    """
    found, empty, zeros = [], torch.empty, torch.zeros

    def counted(make):
        def call(*size, pin_memory=False, dtype=None, **more):
            if not pin_memory:
                return make(*size, dtype=dtype, **more)
            made = empty(*size, dtype=dtype, device="meta")
            found.append(power_of_two(max(1, made.nbytes)))
            return made

        return call

    monkeypatch.setattr(torch, "empty", counted(empty))
    monkeypatch.setattr(torch, "zeros", counted(zeros))
    return found


@pytest.mark.parametrize("sizes", [
    [160 * MB] * 100, [33_000 * MB // 40 + 12] * 40, [2_101_346_304, *[234_881_024] * 31],
    [5 * MB + 8] * 900, [4096] * 2000,
], ids=["buckets", "pieces", "embedding", "vectors", "tiny"])  # fmt: skip
def test_tensors_lock_little_more_than_they_are(locked, sizes):
    memory = HostMemory(True, sum(sizes))
    for size in sizes:
        assert memory.empty((size // 4,), torch.float32).nbytes == size // 4 * 4
    memory.empty((2,), torch.float64)  # what nobody counted takes little
    assert sum(locked) == memory.nbytes
    assert sum(locked) <= 1.1 * sum(sizes) + slab_bytes(max(sizes))
    assert len(locked) <= len(sizes) // 4 + 8  # each takes cudaHostAlloc some time


def test_what_offloads_and_saves_takes_memory_by_slabs(locked):
    """Before, each bucket and each activation locked the next power of two of its own."""
    device = SimpleNamespace(type="cuda")
    count = 41_943_040 + 1_000_000  # elements of a bucket: fp32 of 172 MB
    on_gpu = [SimpleNamespace(shape=(count,), dtype=t, is_cuda=True, device=device)
              for t in (torch.float32, torch.bfloat16)]  # fmt: skip
    host = offload.HostMemory(True)
    for _ in range(24):
        for like in on_gpu:
            host.zeros(like.shape, like.dtype)
    assert sum(locked) < 1.1 * 24 * count * 6 + (1 << 30)
    locked.clear()
    carrier = HostCopies.__new__(HostCopies)
    carrier.device, carrier._pool, carrier.host_bytes = device, {}, 0
    carrier._host = HostMemory(True)
    activations = [Stored(torch.empty(35 * MB, dtype=torch.bfloat16, device="meta"))] * 40
    for each in activations:
        carrier._buffer(each)
    assert carrier.host_bytes == 40 * 72 * MB  # the next size
    assert sum(locked) < 1.1 * carrier.host_bytes + (1 << 30)
    assert stage.HostMemory is HostMemory


def test_tensors_do_not_overlap_and_begin_aligned(monkeypatch):
    empty = torch.empty
    plain = lambda *size, pin_memory=False, **more: empty(*size, **more)  # noqa: E731
    monkeypatch.setattr(torch, "empty", plain)
    memory, tensors = HostMemory(True), []
    for i in range(60):
        tensors.append(memory.zeros((i % 7 + 1, 33), (torch.float32, torch.bfloat16)[i % 2]))
        tensors[-1].fill_(i)
    assert all((x == i).all() for i, x in enumerate(tensors))
    first = tensors[0].untyped_storage().data_ptr()
    assert all((x.data_ptr() - first) % ALIGN == 0 for x in tensors)
    assert len({x.untyped_storage().data_ptr() for x in tensors}) == 1 == len(memory._slabs)


def test_on_a_cpu_each_tensor_has_memory_of_its_own():
    memory = HostMemory(False)
    a, b = memory.zeros((3, 2), torch.float64), memory.empty((5,), torch.bfloat16)
    assert a.tolist() == [[0, 0]] * 3 and b.shape == (5,) and memory.nbytes == 0
    assert a.untyped_storage().nbytes() == 48 and b.untyped_storage().nbytes() == 10
