# SPDX-License-Identifier: Apache-2.0
"""A replicated weight whose gradient is not what its Placement says is named in the first step."""

import pytest
import torch
from torch import nn

from mpu.context import LayerContext
from mpu.gradients import use
from mpu.grid import Grid
from mpu.param import PlacementError, Region, tie
from mpu.zero.bucket_layout import ZeroConfig
from mpu.zero.gradient_check import STEPS, GradientCheck, sketch
from mpu.zero.param_and_grad_buffer import ParamAndGradBuffer

# name: (region, the gradient's factor on tp rank r, in step i)
RIGHT = {
    "whole": (Region.REPLICATED, lambda r, i: 1.0),
    "part": (Region.TENSOR_PARALLEL, lambda r, i: 1.0 + r),
    "late": (Region.REPLICATED, lambda r, i: float(i > 1)),
}
SEEN = 1e-3  # by how much a rank's gradient may be off before it must be noticed, in fp32


class Toy(nn.Module):
    def __init__(self, ctx: LayerContext, weights: dict) -> None:
        super().__init__()
        self.ctx, self.weights = ctx, weights
        for name, (region, _) in weights.items():
            self.register_parameter(name, ctx.replicated_parameter((40, 50), region))

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        r = self.ctx.tp.rank
        parts = [
            (use(getattr(self, name), self.ctx.sink) * x).sum() * of(r, step)
            for name, (_, of) in self.weights.items()
        ]
        return torch.stack(parts).sum()


def steps_of(comm, wrong: list[str], stage: int, steps: int, dp: int) -> dict:
    """Train on a toy; return the warnings, the error, whether the check ended, and the sums."""
    grid = comm.grid(tp=2)
    assert grid.dp.size == dp
    weights = dict(RIGHT)
    if "missing" in wrong:
        weights["missing"] = (Region.REPLICATED, lambda r, i: 1.0 + SEEN * r)
    if "twice" in wrong:
        weights["twice"] = (Region.TENSOR_PARALLEL, lambda r, i: 1.0)
    sums, said = {}, []
    for checked in (True, False):
        sink = ParamAndGradBuffer(grid, torch.float32, ZeroConfig(stage))
        toy = Toy(LayerContext(grid, sink=sink), weights)
        if "unused" in wrong:
            toy.register_parameter("unused", toy.ctx.replicated_parameter((3,), Region.REPLICATED))
        sink.attach(toy)
        for _ in sink.fill():
            pass
        if checked:
            sink.check = GradientCheck(grid, said.append)
        error = ""
        for step in range(1, steps + 1):
            sink.begin_step()
            x = torch.randn(40, 50, generator=torch.Generator().manual_seed(grid.dp.rank + step))
            toy(x, step).backward()
            try:
                sink.finish_grad_sync()
            except PlacementError as found:
                error = str(found)
                break
        if checked:
            result = {"said": said, "error": error, "ended": sink.check is None}
        sums[checked] = [bucket.grad_shard.clone() for bucket in sink.buckets]
    result["same"] = bool(error) or all(map(torch.equal, sums[True], sums[False]))
    return result


STAGES = [0, 3]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.prove)])
@pytest.mark.parametrize("stage", STAGES)
def test_right_placements_pass_without_a_word_and_change_no_bit(world, size, stage):
    for found in world(size).run(steps_of, [], stage, 3, size // 2):
        assert found == {"said": [], "error": "", "ended": True, "same": True}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.prove)])
@pytest.mark.parametrize("stage", STAGES)
def test_a_missing_sum_is_an_error_on_every_rank(world, size, stage):
    for found in world(size).run(steps_of, ["missing"], stage, 1, size // 2):
        assert found["error"].startswith("missing: its gradient differs among the ranks of tp")
        assert "Region.TENSOR_PARALLEL" in found["error"] and not found["said"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_sum_of_equal_gradients_is_a_warning_on_rank_0(world, stage):
    first, second = world(2).run(steps_of, ["twice"], stage, 2, 1)
    (line,) = first["said"]
    assert line.startswith("twice: its gradients are summed over tp") and "fork-check" in line
    assert not second["said"] and first["ended"] and second["ended"] and first["same"]


def test_a_weight_without_a_gradient_is_told_and_the_check_ends(world):
    found = world(2).run(steps_of, ["unused"], 0, STEPS - 1, 1)[0]
    assert not found["ended"]
    found = world(2).run(steps_of, ["unused"], 0, STEPS, 1)[0]
    assert found["ended"] and found["same"]
    (line,) = found["said"]
    assert line.startswith("unused got no gradient in the first step")


@pytest.mark.parametrize("size", [1, 63, 5000])
def test_a_sketch_tells_how_far_gradients_are_apart(size):
    one = torch.randn(size, generator=torch.Generator().manual_seed(0))
    for scale in (1e-6, 1e-2, 1.0):
        other = one + scale * torch.randn(size, generator=torch.Generator().manual_seed(1))
        far, true = (sketch(one) - sketch(other))[:-1].norm(), (one - other).double().norm()
        assert 0.5 * true <= far <= 2 * true
    assert torch.equal(sketch(one), sketch(one.clone()))
    assert sketch(one)[-1] == pytest.approx(one.double().norm().item())


def test_a_tensor_that_nothing_would_train_is_refused():
    class Lists(nn.Module):
        def __init__(self, held: object) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.inner.held = held

    weight = nn.Parameter(torch.ones(2))
    for held in ([weight], {"a": (weight,)}, [nn.Linear(2, 2)], torch.ones(2, requires_grad=True)):
        with pytest.raises(PlacementError, match=r"^inner\.held: a tensor there requires a "):
            ParamAndGradBuffer(Grid()).attach(Lists(held))
    fine = Lists([torch.ones(2), 3])
    fine.known = [fine.inner, fine.inner.weight]
    ParamAndGradBuffer(Grid()).attach(fine)


def test_a_weight_is_tied_over_an_axis_once():
    grid = Grid()
    weight = LayerContext(grid).replicated_parameter((3, 2), Region.REPLICATED)
    tie(weight, grid.embd)
    with pytest.raises(PlacementError, match=r"shape \[3, 2\] is tied over embd twice"):
        tie(weight, grid.embd)
