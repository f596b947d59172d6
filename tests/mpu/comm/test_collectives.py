# SPDX-License-Identifier: Apache-2.0
"""Collectives against their definitions: every dtype, async or not, staged by the host or not."""

from dataclasses import replace

import pytest
import torch

from mpu.comm.all_to_all import all_to_all
from mpu.comm.collectives import (
    ProcessGroupTransport,
    all_gather,
    all_reduce,
    all_reduce_in_order,
    gather_bytes,
    group_of,
    reduce_scatter,
    sum_in_order,
)
from mpu.comm.meta import MetaTransport
from mpu.comm.p2p import exchange
from mpu.comm.transport import Axis, Transport

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def contribution(rank: int, shape: tuple, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def verbs(comm, staged: bool) -> None:
    axis = comm.grid().world
    axis = replace(axis, transport=ProcessGroupTransport(group_of(axis), staged))
    n = axis.size
    for dtype in DTYPES:
        parts = [contribution(r, (2 * n, 3), dtype) for r in range(n)]
        mine = parts[axis.rank]
        in_order = parts[0]
        wide = parts[0].float() if dtype == torch.bfloat16 and n > 2 else parts[0]
        for part in parts[1:]:
            wide = wide + part
        in_order = wide.to(dtype)
        for async_op in (False, True):
            out, handle = all_gather(mine, axis, async_op)
            handle.wait()
            assert torch.equal(out, torch.cat(parts))
            out, handle = reduce_scatter(mine, axis, async_op)
            handle.wait()
            handle.wait()  # a second wait does nothing
            assert torch.equal(out, in_order[2 * axis.rank : 2 * axis.rank + 2])
            out, handle = all_to_all(mine, axis, async_op)
            handle.wait()
            own = slice(2 * axis.rank, 2 * axis.rank + 2)
            assert torch.equal(out, torch.cat([part[own] for part in parts]))
            out, handle = all_reduce(mine.clone(), axis, async_op)
            handle.wait()
            torch.testing.assert_close(out, in_order, rtol=2e-2, atol=2e-2)
        odd = mine.reshape(-1)[: 2 * n + 1].clone()  # does not divide by the axis
        assert torch.equal(all_reduce_in_order(odd, axis), in_order.reshape(-1)[: 2 * n + 1])
        if dtype != torch.bfloat16 or n == 2:  # few numbers: summed in their own dtype
            assert torch.equal(sum_in_order(mine, axis), in_order)
        assert torch.equal(mine, contribution(axis.rank, (2 * n, 3), dtype)), "an input changed"
        strided = mine.t().contiguous().t()  # not contiguous
        assert torch.equal(all_gather(strided, axis)[0], torch.cat(parts))
        assert torch.equal(all_to_all(strided, axis)[0], all_to_all(mine, axis)[0])
    words = [b"", b"\x00\xff", b"x" * 1000]
    assert gather_bytes(words[axis.rank % 3], axis) == [words[r % 3] for r in range(n)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
def test_verbs(world, size, staged):
    world(size).run(verbs, staged)


class Heard:
    """A trace that keeps the verbs, and what is sent for each."""

    def __init__(self) -> None:
        self.verbs: list[tuple[str, int]] = []

    def issued(self, verb, axis, tensor, sent, is_async, label):
        self.verbs.append((verb, sent))
        return self

    def waiting(self):
        pass

    def waited(self):
        self.verbs.append(("waited", 0))


def traced(comm, meta: bool) -> list:
    """Return the shapes, and what a trace heard of each verb, for real tensors or their shapes."""
    heard = Heard()
    axis = replace(comm.grid().world, trace=heard)
    if meta:
        axis = replace(axis, transport=MetaTransport())
    x = torch.ones(4 * axis.size, 3, device="meta" if meta else "cpu")
    shapes = []
    for verb in (all_gather, reduce_scatter, all_reduce, all_to_all):
        out, handle = verb(x, axis, True)
        handle.wait()
        shapes.append(tuple(out.shape))
    right, left = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    exchange(x, axis, right, left, torch.empty_like(x)).wait()
    shapes += [tuple(sum_in_order(x, axis).shape), tuple(all_reduce_in_order(x, axis).shape)]
    return [shapes, heard.verbs]


def test_shapes_travel_as_tensors_do(world):
    for real, shapes in zip(world(2).run(traced, False), world(2).run(traced, True), strict=True):
        assert real == shapes and len(real[1]) == 16


def test_one_rank_needs_no_group():
    x = torch.randn(3, 2)
    for verb in (all_gather, reduce_scatter, all_reduce, all_to_all):
        out, handle = verb(x, Axis("tp"), True)
        handle.wait()
        assert out is x
    assert gather_bytes(b"a", Axis("tp")) == [b"a"]


def test_a_transport_without_an_all_to_all_is_named():
    other = type("Pigeons", (Transport,), {name: None for name in Transport.__abstractmethods__})
    axis = Axis("cp", 0, 2, (0, 1), other())
    with pytest.raises(TypeError, match="Pigeons has no all-to-all"):
        all_to_all(torch.ones(4), axis)
