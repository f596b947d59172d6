# SPDX-License-Identifier: Apache-2.0
"""When and in which order buckets leave, and what happens to parameters without a gradient."""

import pytest
import torch
from torch import nn

from mpu.comm.transport import Axis
from mpu.gradients import use
from mpu.grid import Grid
from mpu.optim.adam import AdamW
from mpu.optim.interface import Group
from mpu.optim.optimizer import Optimizer
from mpu.param import Placement, PlacementError
from mpu.zero.bucket_layout import ZeroConfig
from mpu.zero.param_and_grad_buffer import ParamAndGradBuffer
from tests.model.twin import gathered

GROUPS = {"vector": Group(AdamW(), 0.1)}


class Toy(nn.Module):
    """Four weights used in order; `plain` goes by autograd's own .grad; `idle` is never used."""

    def __init__(self, sink: ParamAndGradBuffer, tp: Axis | None = None) -> None:
        super().__init__()
        self.sink = sink
        for i in range(4):
            self.register_parameter(f"w{i}", nn.Parameter(torch.full((3,), 1.0 + i)))
        self.plain = nn.Parameter(torch.tensor([2.0]))
        self.idle = nn.Parameter(torch.tensor([5.0]))
        self.tied = self.w0  # used twice
        if tp is not None:
            self.w3.placement = Placement((3,), axis=tp, reduce_axes=(tp,))

    def forward(self, x):
        for w in (self.w0, self.w1, self.w2, self.w3, self.tied):
            x = x * use(w, self.sink)
        return (x * self.plain).sum()


class Spy:
    """Stands for Axis.trace: writes down every collective, between the marks of the test."""

    def __init__(self):
        self.events, self.labels = [], []

    def issued(self, verb, axis, tensor, nbytes, async_op, label=None):
        self.events.append((verb, tensor.numel()))
        self.labels.append(label)


def order_on_the_wire(comm) -> dict:
    grid = comm.grid()
    spy = Spy()
    grid.traced(spy)
    try:
        sink = ParamAndGradBuffer(grid, torch.float32, ZeroConfig(bucket_size=1))
        toy = Toy(sink)
        sink.attach(toy)
        sink.begin_step(micro_batches=2)
        done = sink.register_grad_ready
        sink.register_grad_ready = lambda p: (spy.events.append("done"), done(p))
        for _ in range(2):
            spy.events.append("micro-batch")
            toy(torch.tensor([1.0, 2.0, 3.0]) * (comm.rank + 1)).backward()
        spy.events.append("finish")
        sink.finish_grad_sync()
    finally:
        grid.traced(None)
    grads = {name: sink.main[p].tolist() for name, p in toy.named_parameters()}
    return {"events": spy.events, "grads": grads}


def test_sums_ties_idle_and_plain_parameters(world):
    toy = Toy(ParamAndGradBuffer(Grid(), torch.float32))
    names = ("w0", "w1", "w2", "w3")
    for result in world(2).run(order_on_the_wire):
        grads, w = result["grads"], {n: getattr(toy, n).detach() for n in names}
        x = torch.tensor([1.0, 2.0, 3.0]) * (1 + 2) * 2  # two ranks, two micro-batches
        product = x * w["w0"] ** 2 * w["w1"] * w["w2"] * w["w3"] * 2.0
        for n in names:
            want = product / w[n] * (2 if n == "w0" else 1)
            torch.testing.assert_close(torch.tensor(grads[n]), want)
        torch.testing.assert_close(torch.tensor(grads["plain"]), (product / 2.0).sum().view(1))
        assert grads["idle"] == [0.0]


def sums_of(comm, level: int, each: bool, overlap: bool) -> dict:
    """Two micro-batches at a level; return the global sums, whole."""
    grid = comm.grid()
    sink = ParamAndGradBuffer(
        grid, torch.float32, ZeroConfig(level, 1, overlap, True, reduce_each_micro_batch=each)
    )
    toy = Toy(sink)
    del toy.plain
    toy.plain = 2.0
    sink.attach(toy)
    list(sink.fill())
    Optimizer(toy, sink, grid, GROUPS)
    for _ in range(2):  # in the second step gathers run ahead
        sink.begin_step(micro_batches=2)
        for _ in range(2):
            toy(torch.tensor([1.0, 2.0, 3.0]) * (comm.rank + 1)).backward()
        sink.finish_grad_sync()
    found = {name: grad.tolist() for name, grad in gathered(sink.buckets, "grad_shard").items()}
    assert sink.live.now == 0, "a buffer outlives the step"
    assert level < 2 or sink.live.peak > 0
    assert (sink.gatherer is not None) == (level == 3)
    if level == 3:
        assert sink.gatherer.peak > 0 and toy.w1.isnan().all()
        assert not sink.gatherer.unsharded, "weights outlive the step"
    return found


@pytest.mark.parametrize("level", range(4))
def test_idle_and_tied_parameters_at_every_level(world, level):
    """idle, defined last, is in the first bucket to leave and never done: it holds all up."""
    w = torch.arange(1.0, 5.0)
    for each, overlap in ((False, True), (True, True), (True, False)):
        for found in world(2).run(sums_of, level, each and level >= 2, overlap):
            product = torch.tensor([1.0, 2.0, 3.0]) * 3 * 2 * w.prod() * w[0] * 2.0
            for i in range(4):
                want = product / w[i] * (2 if i == 0 else 1)
                torch.testing.assert_close(torch.tensor(found[f"w{i}"]), want)
            assert found["idle"] == [0.0]


def used_plainly(comm) -> str:
    sink = ParamAndGradBuffer(comm.grid(), torch.float32, ZeroConfig(3))
    toy = Toy(sink)
    sink.attach(toy)
    list(sink.fill())
    sink.begin_step()
    toy(torch.ones(3)).backward()
    try:
        sink.finish_grad_sync()
    except RuntimeError as error:
        return str(error)
    return ""


def test_plain_autograd_on_a_sharded_weight_is_refused(world):
    for said in world(2).run(used_plainly):
        assert said.startswith("plain was used in plain autograd") and "mpu.gradients.use" in said


def labels_of(comm, stage: int) -> list[tuple[str, object]]:
    """Return (phase, who) of each collective of a step, buckets by number."""
    grid, spy = comm.grid(tp=2), Spy()
    grid.traced(spy)
    try:
        sink = ParamAndGradBuffer(grid, torch.float32, ZeroConfig(stage, 1))
        toy = Toy(sink, grid.tp)
        del toy.plain
        toy.plain = 2.0
        sink.attach(toy)
        list(sink.fill())
        optimizer = Optimizer(toy, sink, grid, GROUPS)
        spy.labels.clear()  # of what ranks told one another there
        sink.begin_step()
        toy(torch.tensor([1.0, 2.0, 3.0])).backward()
        sink.finish_grad_sync()
        optimizer.step(1e-3)
    finally:
        grid.traced(None)
    number = {id(bucket): i for i, bucket in enumerate(sink.buckets)}
    return [(label.phase, number.get(id(label.who), label.who)) for label in spy.labels]


@pytest.mark.parametrize("stage", range(4))
def test_every_collective_of_a_step_says_who_asks(world, stage):
    for found in world(4).run(labels_of, stage):
        phases = {phase: [who for at, who in found if at == phase] for phase, _ in found}
        assert set(phases.pop("grad sum")) == set(range(2 if stage == 3 else 5))
        assert set(phases.pop("norm")) == {"optimizer"}
        kept = [[], [4, 3, 2, 1, 0], [4, 3, 2, 1, 0], [1]][stage]  # whole between steps
        assert phases.pop("update", []) == kept
        assert set(phases.pop("gather", [])) == ({0} if stage == 3 else set())
        assert not phases


class Mistaken(nn.Module):
    """A layer whose own code forgets what the sink asks of it."""

    def __init__(self, sink: ParamAndGradBuffer) -> None:
        super().__init__()
        self.held = nn.Parameter(torch.ones(3))
        self.inner = nn.Linear(3, 1, bias=False)
        self.inner.weight.requires_grad_(False)
        sink.attach(self)
        list(sink.fill())
        self.later = nn.Parameter(torch.ones(2))


def mistakes(comm) -> list[str]:
    said = []
    for level, what in (
        (0, lambda sink, own: sink.register_grad_ready(own.inner.weight)),
        (0, lambda sink, own: sink.main_grad(own.inner.weight)),
        (1, lambda sink, own: use(own.later, sink)),
        (3, lambda sink, own: (sink.acquire(own.held), sink.finish_grad_sync())),
        (0, lambda sink, own: [sink.register_grad_ready(own.held) for _ in range(2)]),
    ):
        config = ZeroConfig(level, 1, overlap_grad_reduce=True)
        own = Mistaken(sink := ParamAndGradBuffer(comm.grid(), torch.float32, config))
        sink.begin_step(1)
        with pytest.raises(RuntimeError) as error:
            what(sink, own)
        said.append(str(error.value))
    return said


def test_a_layer_s_mistake_is_told_by_the_weight_s_name(world):
    for said in world(2).run(mistakes):
        for line, says in zip(
            said,
            ("inner.weight of Linear is frozen", "inner.weight of Linear is frozen",
             "later of Mistaken is used, but was not a parameter", "a use of held,",
             "held of Mistaken gave its gradient 2 times in 1 micro-batches"),
            strict=True,
        ):  # fmt: skip
            assert line.startswith(says), line


@pytest.mark.parametrize("size", [1, 0])
def test_parameters_of_two_dtypes_are_refused(size):
    """A bucket has one dtype: it would convert them."""
    toy = Toy(sink := ParamAndGradBuffer(Grid(), torch.float32, ZeroConfig(bucket_size=size)))
    toy.router = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    with pytest.raises(PlacementError, match="router is torch.bfloat16 and w0 is torch.float32"):
        sink.attach(toy)
