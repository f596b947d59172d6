# SPDX-License-Identifier: Apache-2.0
"""The tracker names the module and the phase of all that runs, and what it takes and gives."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mpu.context import LayerContext
from mpu.gradients import GradientSink, run_deferred
from mpu.grid import Grid
from mpu.launch import Launch
from mpu.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpu.module_tracker import (
    BACKWARD,
    FORWARD,
    INPUT,
    MAIN_GRAD,
    OUTPUT,
    OUTPUT_GRAD,
    RECOMPUTE,
    WGRAD,
    ModuleTracker,
    path_of,
    site,
)
from mpu.recompute import recompute

S, B, H, F = 4, 2, 6, 8


class Block(nn.Module):
    def __init__(self, ctx):
        super().__init__()
        self.up = ColumnParallelLinear(H, (F,), ctx=ctx)
        self.down = RowParallelLinear(F, H, ctx=ctx)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Two(nn.Module):
    def __init__(self, ctx):
        super().__init__()
        self.first, self.second = Block(ctx), Block(ctx)

    def forward(self, x):
        return self.second(self.first(x))


def model_of():
    sink = GradientSink(torch.float64)
    grid = Grid(1, 1, launch=Launch(0, 1, 0, 1))
    ctx = LayerContext(grid, False, torch.float64, torch.float64, sink=sink)
    model = Two(ctx)
    for param in model.parameters():
        nn.init.normal_(param, generator=torch.Generator().manual_seed(1))
    return model, ctx, sink


class Matmuls(TorchDispatchMode):
    """Ask the tracker at every matmul."""

    def __init__(self, tracker):
        super().__init__()
        self.tracker, self.seen = tracker, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.rpartition("::")[2] in ("mm", "addmm", "addmm_", "bmm"):
            self.seen.append((self.tracker.phase, self.tracker.running()))
        return func(*args, **(kwargs or {}))


NAMES = ["first.up", "first.down", "second.up", "second.down"]


@pytest.mark.parametrize("deferred", [False, True])
def test_every_matmul_has_its_module_and_its_phase(deferred):
    model, ctx, sink = model_of()
    tracker = ModuleTracker(model, ctx.queue, sink)
    with Matmuls(tracker) as matmuls:
        y = model(torch.randn(S, B, H, dtype=torch.float64, requires_grad=True))
        if deferred:
            ctx.queue.defer()
        y.sum().backward()
        if deferred:
            assert not any(phase == WGRAD for phase, _ in matmuls.seen)
            run_deferred(ctx.queue.take())
    assert tracker.running() == "" and tracker.phase == FORWARD
    every = [(phase, name) for phase in (FORWARD, BACKWARD, WGRAD) for name in NAMES]
    assert Counter(matmuls.seen) == Counter(every)
    assert [name for phase, name in matmuls.seen if phase == BACKWARD] == NAMES[::-1]


def test_recomputation_is_a_phase_of_its_own():
    model, ctx, sink = model_of()
    tracker = ModuleTracker(model, ctx.queue, sink)
    with Matmuls(tracker) as matmuls:
        x = torch.randn(S, B, H, dtype=torch.float64, requires_grad=True)
        recompute(model.first, x).sum().backward()
    names = NAMES[:2]
    every = [(phase, name) for phase in (FORWARD, RECOMPUTE, BACKWARD, WGRAD) for name in names]
    assert Counter(matmuls.seen) == Counter(every)


def test_events_have_the_tensors_and_close_ends_them():
    model, ctx, sink = model_of()
    seen = []
    readers = dict.fromkeys((INPUT, OUTPUT, OUTPUT_GRAD, MAIN_GRAD), seen.append)
    put, ready = ctx.queue.put, sink.register_grad_ready
    tracker = ModuleTracker(model, ctx.queue, sink, readers)
    x = torch.randn(S, B, H, dtype=torch.float64, requires_grad=True)
    y = model(x)
    y.sum().backward()
    of = {(event.kind, event.name): event for event in seen}
    assert len(of) == len(seen) == 3 * 7 + 4  # seven modules, four weights
    assert of[INPUT, "first"].tensors[0] is x and of[OUTPUT, ""].tensors[0] is y
    assert of[INPUT, "second.up"].tensors[0] is of[OUTPUT, "first.down"].tensors[0]
    assert torch.equal(of[OUTPUT_GRAD, "second"].tensors[0], torch.ones_like(y))
    assert {event.phase for event in seen if event.kind == OUTPUT_GRAD} == {BACKWARD}
    for name, param in model.named_parameters():
        event = of[MAIN_GRAD, name]
        assert event.of is param and event.tensors[0] is sink.main[param]
    tracker.close()
    seen.clear()
    model(x).sum().backward()
    assert not seen and (ctx.queue.put, sink.register_grad_ready) == (put, ready)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_site_is_the_line_of_a_layer_and_not_of_what_carries_its_bytes(monkeypatch):
    model, ctx, sink = model_of()
    sites, add = [], sink.grad_slot
    monkeypatch.setattr(sink, "grad_slot", lambda param: sites.append(site()) or add(param))
    model(torch.randn(S, B, H, dtype=torch.float64)).sum().backward()
    assert len(sites) == 4
    for each in sites:
        assert each.use.startswith("mpu/layers/linear.py:") and each.function, each
    assert path_of(torch.__file__) == path_of(__file__) == ""
    assert path_of(__file__, __file__).endswith("tests/mpu/test_module_tracker.py")
