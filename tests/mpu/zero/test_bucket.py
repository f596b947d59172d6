# SPDX-License-Identifier: Apache-2.0
"""One bucket's step: ready after every use, closed while it is summed, no memory afterwards."""

import pytest
import torch
from torch import nn

from mpu.comm.transport import Axis
from mpu.zero.bucket import LiveBytes, ParamAndGradBucket
from mpu.zero.bucket_layout import BLOCK, ParamEntry, make_buckets, sharing_of
from mpu.zero.reduce import Reduction


def make(comm, stage: int, axes: tuple[Axis, ...] = ()) -> ParamAndGradBucket:
    """Two parameters, one of them used twice."""
    grid = comm.grid()
    params = {"a": nn.Parameter(torch.ones(3)), "b": nn.Parameter(torch.full((2, 2), 2.0))}
    names = tuple(axis.name for axis in axes)
    entries = [ParamEntry(name, p.numel(), 0, ()) for name, p in params.items()]
    shared = {"tp": sharing_of("tp", comm.size, comm.size, stage)}
    (layout,) = make_buckets([e._replace(axes=names) for e in entries], 10**9, shared)
    how = Reduction(stage, grid.dp_cp, grid.dp_cp_replicate, torch.float32, torch.float32)
    return ParamAndGradBucket(layout, params, 3, how, axes, {}, LiveBytes())


def life(comm, stage: int, each: bool) -> dict:
    bucket = make(comm, stage)
    main, live, seen = bucket._main, bucket._live, []
    bucket.begin_step(2, each)
    for k in range(2):
        if not main:
            bucket.open_grad()
        seen.append((len(main), live.now > 0, bucket.is_ready))
        for _, param, _ in bucket.params:
            if not k or each:
                main[param].zero_()
            main[param].add_(1.0 + comm.rank)
        for use in range(3):
            assert not bucket.is_ready, use
            bucket.register_grad_ready()
        assert bucket.is_ready == (each or k == 1)
        if bucket.is_ready:
            bucket.start_grad_sync()
            seen.append((len(main), live.now > 0, bucket.rounds))
    bucket.wait()
    seen.append((len(main), live.now > 0, bucket.rounds))
    try:
        bucket.register_grad_ready()
    except AssertionError as error:
        seen.append(str(error))
    return {"seen": seen, "sum": bucket.grad_shard.tolist(), "owned": list(bucket.owned()),
            "bytes": (live.now, live.peak), "part": (bucket.low, bucket.high)}  # fmt: skip


@pytest.mark.parametrize("stage, each", [(0, False), (1, False), (2, False), (2, True), (3, True)])
def test_a_bucket_leaves_when_all_its_uses_are_ready(world, stage, each):
    late = "a parameter gave a gradient after its bucket was sent"
    for rank, found in enumerate(world(2).run(life, stage, each)):
        comes = stage >= 2  # whole gradients come and go
        opened, closed = (2, comes, False), (0 if comes else 2, comes)
        left = [(*closed, 1), opened, (*closed, 0)] if each else [opened, (*closed, 0)]
        assert found["seen"] == [opened, *left, (closed[0], False, 0), late]
        at_once = comes * (1 + each)  # gradients come in while those before travel
        assert found["bytes"] == (0, 2 * BLOCK * 4 * at_once)
        sums = [0.0] * (2 * BLOCK)
        sums[0:4], sums[BLOCK : BLOCK + 3] = [6.0] * 4, [6.0] * 3  # (1 + 2) twice
        low, high = found["part"]
        assert (low, high) == ((rank * BLOCK, (rank + 1) * BLOCK) if stage else (0, 2 * BLOCK))
        assert found["sum"] == sums[low:high]
        whole = [("b", 0, 4, 0), ("a", BLOCK, BLOCK + 3, BLOCK)]
        assert found["owned"] == ([whole[rank]] if stage else whole)


def apart(comm) -> tuple:
    bucket = make(comm, 3, (comm.grid().dp_cp,))
    bucket.begin_step(5, each=True)
    rounds = bucket.rounds
    bucket.waiting = 0
    return rounds, bucket.sharded, bucket.weights is not None, bucket.is_ready


def test_a_bucket_with_extra_axes_leaves_once_at_the_end_and_keeps_its_weights(world):
    assert set(world(2).run(apart)) == {(1, False, True, False)}
