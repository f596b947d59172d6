# SPDX-License-Identifier: Apache-2.0
"""One bucket's sum: its values at every ZeRO stage, and the collectives that make it, in order."""

import pytest
import torch

from mpu.comm.transport import Label
from mpu.zero.reduce import Reduction, sum_over_data, sum_over_extra_axes

LABEL = Label("a bucket", "grad sum")
N = 8
INSTANCES = [("reduce_scatter", "dp_cp_replicate"), ("all_gather", "dp_cp_replicate")]


class Spy:
    def __init__(self):
        self.events = []

    def issued(self, verb, axis, tensor, nbytes, async_op, label=None):
        assert label is LABEL
        self.events.append((verb, axis.name, tensor.dtype))


def mine(rank: int, micro_batch: int, dtype: torch.dtype) -> torch.Tensor:
    """Gradients that bf16 cannot hold: 1 + 2^-10 and so on."""
    return (torch.arange(N) + 1 + rank + 10 * micro_batch).to(dtype) * (1 + 2**-10)


def sums(comm, stage: int, instances: int, micro_batches: int, wire, main) -> dict:
    spy, dtype, waits = Spy(), torch.float32, []
    grid = comm.grid(instances=instances).traced(spy)  # this makes the axes anew
    how = Reduction(stage, grid.dp_cp_shard, grid.dp_cp_replicate, dtype, main or dtype, wire)
    part = N // grid.dp_cp_shard.size if stage else N
    shard = torch.zeros(part)
    try:
        for k in range(micro_batches):
            grad = mine(comm.rank, k, how.main_dtype)
            if not stage and how.main_dtype == dtype:
                shard = grad  # as a bucket's is
            last = k == micro_batches - 1
            steps = sum_over_data(grad, shard, how, LABEL, earlier=k > 0, last=last)
            for handle in steps:
                waits.append(len(spy.events))
                handle.wait()
    finally:
        grid.traced(None)
    low = grid.dp_cp_shard.rank * part if stage else 0
    wires = [str(dtype).removeprefix("torch.") for _, _, dtype in spy.events]
    events = [(verb, axis) for verb, axis, _ in spy.events]
    return {"sum": shard.tolist(), "low": low, "events": events, "waits": waits, "wires": wires}


def wanted(ranks: int, micro_batches: int, rounded: bool) -> torch.Tensor:
    total = torch.zeros(N)
    for k in range(micro_batches):
        for rank in range(ranks):
            grad = mine(rank, k, torch.float32)
            total += grad.bfloat16().float() if rounded else grad
    return total


@pytest.mark.parametrize(
    "stage, instances", [(0, 1), *((stage, i) for stage in (1, 2, 3) for i in (1, 2))]
)
def test_the_owner_has_the_sum_and_at_stage_0_everybody(world, stage, instances):
    rounds = 2 if stage >= 2 else 1
    for found in world(4).run(sums, stage, instances, rounds, None, None):
        axis = "dp_cp_shard" if instances == 2 else "dp_cp"
        once = [("reduce_scatter", axis)]
        if not stage:
            once.append(("all_gather", axis))
        assert found["events"] == once * rounds + (INSTANCES if instances == 2 else [])
        assert found["waits"] == list(range(1, len(found["events"]) + 1)), "two at a time"
        low, got = found["low"], torch.tensor(found["sum"])
        torch.testing.assert_close(got, wanted(4, rounds, False)[low : low + len(got)])


@pytest.mark.parametrize("wire, main", [(torch.bfloat16, None), (None, torch.bfloat16)])
def test_narrow_contributions_are_summed_wide(world, wire, main):
    for found in world(2).run(sums, 1, 1, 1, wire, main):
        assert found["wires"] == ["bfloat16"]
        low, got = found["low"], torch.tensor(found["sum"])
        assert torch.equal(got, wanted(2, 1, True)[low : low + len(got)])
        assert not torch.equal(got, wanted(2, 1, False)[low : low + len(got)])


def test_narrow_main_gradients_of_one_rank_become_its_sum(world):
    for found in world(1).run(sums, 0, 1, 1, None, torch.bfloat16):
        assert found["sum"] == wanted(1, 1, True).tolist() and not found["events"]


def extra(comm) -> tuple[list[float], list[str]]:
    grid, spy, grad = comm.grid(tp=2), Spy(), mine(comm.rank, 0, torch.float32)
    grid.traced(spy)
    try:
        sum_over_extra_axes(grad, (grid.tp,), LABEL)
    finally:
        grid.traced(None)
    return grad.tolist(), [axis for _, axis, _ in spy.events]


def test_extra_axes_are_summed_whole_on_every_rank(world):
    for rank, (found, axes) in enumerate(world(4).run(extra)):
        first = rank // 2 * 2
        assert found == (mine(first, 0, torch.float32) + mine(first + 1, 0, torch.float32)).tolist()
        assert set(axes) == {"tp"}
