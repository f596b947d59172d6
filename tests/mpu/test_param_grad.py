# SPDX-License-Identifier: Apache-2.0
"""mpu's layers with gradients in `param.grad` and an optimizer of torch's, without training/."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from mpu.context import LayerContext
from mpu.gradients import use
from mpu.grid import Grid
from mpu.launch import Launch
from mpu.layers.embedding import VocabParallelEmbedding
from mpu.layers.experts import GroupedLinear
from mpu.layers.fused import RMSNorm
from mpu.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpu.param import Region, draw_normal, placement_of
from mpu.param_grad import ParamGrad
from tests.sampling import sampled

ROOT = Path(__file__).resolve().parents[2]
S, B, H, V = 8, 4, 12, 16
DRAWN = ("embedding.weight", "up.weight", "down.weight")


class Net(nn.Module):
    """embedding -> norm -> column -> row, and a scale by ordinary autograd code."""

    def __init__(self, ctx: LayerContext) -> None:
        super().__init__()
        self.ctx = ctx
        self.embedding = VocabParallelEmbedding(V, H, ctx=ctx)
        self.norm = RMSNorm(H, ctx=ctx)
        self.up, self.down = (
            ColumnParallelLinear(H, 2 * H, ctx=ctx), RowParallelLinear(2 * H, H, ctx=ctx),
        )  # fmt: skip
        self.scale = ctx.replicated_parameter((H,), Region.SEQUENCE_PARALLEL)
        for name, param in self.named_parameters():
            if name in DRAWN:
                draw_normal(param, [name], 0.3, seed=3)
            else:
                nn.init.ones_(param)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        y = self.down(torch.tanh(self.up(self.norm(x))))
        return y * use(self.scale, self.ctx.sink)


def tokens_of(micro_batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(micro_batch)
    return torch.randint(V, (B, S), generator=generator)  # [b, s]


def train(comm, tp: int, sp: bool, steps: int, micro_batches: int) -> list[dict]:
    """Return each step's gradients, as rectangles of the whole tensors, and the last weights."""
    grid, kind = comm.grid(tp), torch.float64
    ctx = LayerContext(grid, sp, kind, kind, sink=ParamGrad(kind))
    model, each = Net(ctx), B // grid.dp.size
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        for i in range(micro_batches):
            rows = tokens_of(10 * step + i)[grid.dp.rank * each :][:each]
            y = model(rows)
            target = torch.linspace(-1, 1, S * H, dtype=kind).view(S, 1, H)
            part = target.chunk(grid.tp.size)[grid.tp.rank] if ctx.sp else target
            (y - part).square().sum().div(B * S).backward()
        ctx.sink.finish_grad_sync(model, grid)
        found.append(parts(model, lambda p: p.grad))
        optimizer.step()
    return [*found, parts(model, lambda p: p)]


def parts(model: nn.Module, value) -> dict:
    found = {}
    for name, param in model.named_parameters():
        (piece,) = placement_of(param).pieces([name])
        local = value(param).detach().narrow(piece.dim, piece.local, piece.size)
        found[name] = (piece.dim, piece.start, local.numpy().copy())
    return found


@pytest.mark.parametrize(
    "size, tp, sp", sampled([(4, 2, True), (2, 2, True), (2, 2, False), (2, 1, False)], 2)
)
def test_gradients_are_those_of_one_rank(world, size, tp, sp):
    (one,) = world(1).run(train, 1, False, 3, 2)
    for rank in world(size).run(train, tp, sp, 3, 2):
        for mine, whole in zip(rank, one, strict=True):
            for name, (dim, start, local) in mine.items():
                want = torch.from_numpy(whole[name][2]).narrow(dim, start, local.shape[dim])
                error = (torch.from_numpy(local) - want).abs().max() / abs(whole[name][2]).max()
                assert error < 1e-12, (name, error)


class Plain(nn.Module):
    """Modules of torch's own around two of mpu's: tied, shared, frozen, unused, and one that only
    the first row of the batch uses, so that one data-parallel rank has its gradient.
    """

    def __init__(self, ctx: LayerContext) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.ctx, kind = ctx, ctx.dtype

        def own(module: nn.Module) -> nn.Module:
            return ctx.replicated(module.to(kind), Region.SEQUENCE_PARALLEL)

        self.embedding, self.norm = own(nn.Embedding(V, H)), own(nn.LayerNorm(H))
        self.shared, self.first = own(nn.Linear(H, H)), own(nn.Linear(H, H, bias=False))
        self.frozen, self.unused = own(nn.Linear(H, H)), own(nn.Linear(H, H))
        self.frozen.requires_grad_(False)
        self.up, self.down = (
            ColumnParallelLinear(H, 2 * H, ctx=ctx, bias=True),
            RowParallelLinear(2 * H, H, ctx=ctx),
        )
        for name in ("up.weight", "down.weight"):
            draw_normal(self.get_parameter(name), [name], 0.3, seed=3)
        nn.init.zeros_(self.up.bias)
        self.down.weight.requires_grad_(False)
        self.alpha = nn.ParameterList([nn.Parameter(torch.full((H,), 0.5, dtype=kind))])
        own(self.alpha)
        self.head = nn.Linear(H, V, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: torch.Tensor, row: int) -> torch.Tensor:
        part = tokens.t().chunk(self.ctx.tp.size)[self.ctx.tp.rank] if self.ctx.sp else tokens.t()
        x = self.shared(self.norm(self.embedding(part)))  # [s/t, b, h]
        x = self.frozen(self.down(torch.tanh(self.up(x)))) * self.alpha[0]
        if row == 0:
            x = x + torch.cat([self.first(x[:, :1]), torch.zeros_like(x[:, 1:])], 1)
        return self.head(self.shared(x))  # [s/t, b, v]


def train_plain(comm, tp: int, sp: bool, memory: bool, to_none: bool) -> list[dict]:
    grid, kind = comm.grid(tp, memory=memory), torch.float64
    ctx = LayerContext(grid, sp, kind, kind, sink=ParamGrad(kind))
    model, each = Plain(ctx), B // grid.dp.size
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    found = []
    for step in range(3):
        for i in range(2):
            rows = tokens_of(10 * step + i)[grid.dp.rank * each :][:each]
            target = torch.linspace(-1, 1, S * V, dtype=kind).view(S, 1, V)
            part = target.chunk(grid.tp.size)[grid.tp.rank] if ctx.sp else target
            (model(rows, grid.dp.rank) - part).square().sum().div(B * S).backward()
        ctx.sink.finish_grad_sync(model, grid)
        assert model.frozen.weight.grad is None and model.down.weight.grad is None
        assert step or model.unused.weight.grad is None
        found.append(parts(model, lambda p: torch.zeros_like(p) if p.grad is None else p.grad))
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    return [*found, parts(model, lambda p: p)]


@pytest.mark.parametrize("size, tp, sp, memory, to_none", [
    pytest.param(2, 2, True, False, True, marks=pytest.mark.prove), (2, 2, False, True, True),
    pytest.param(2, 1, False, False, False, marks=pytest.mark.prove), (4, 2, True, True, False),
])  # fmt: skip
def test_modules_of_torch_have_the_gradients_of_one_rank(world, size, tp, sp, memory, to_none):
    (one,) = world(1).run(train_plain, 1, False, False, to_none)
    assert abs(one[0]["first.weight"][2]).max() > 0 and not one[0]["unused.weight"][2].any()
    for rank in world(size).run(train_plain, tp, sp, memory, to_none):
        for mine, whole in zip(rank, one, strict=True):
            for name, (dim, start, local) in mine.items():
                want = torch.from_numpy(whole[name][2]).narrow(dim, start, local.shape[dim])
                largest = max(abs(whole[name][2]).max(), 1e-30)
                assert (torch.from_numpy(local) - want).abs().max() / largest < 1e-12, name


class Small(nn.Module):
    """A module of the case's between two of mpu's layers."""

    def __init__(self, ctx: LayerContext, make, drawn: bool = True) -> None:
        super().__init__()
        self.up, self.down = ColumnParallelLinear(H, H, ctx=ctx), RowParallelLinear(H, H, ctx=ctx)
        torch.manual_seed(0)
        self.own = make()
        for weight in (self.up.weight, self.down.weight) if drawn else ():
            draw_normal(weight, [str(tuple(weight.shape))], 0.3, seed=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self.down(self.up(x)))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(H))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def of_rank(comm) -> nn.Module:
    torch.manual_seed(comm.rank)
    return nn.Linear(H, H)


def mistake(comm, case: str) -> str:
    """Return what a program with this mistake is told, "" if nothing."""
    grid, sink = comm.grid(1 if case == "values of dp" else 2), ParamGrad()
    ctx = LayerContext(grid, True, sink=sink)
    make = {
        "nn.Linear": lambda: nn.Linear(H, H), "nn.LayerNorm": lambda: nn.LayerNorm(H),
        "nn.Parameter": Scale, "values of tp": lambda: of_rank(comm),
        "values of dp": lambda: of_rank(comm),
    }.get(case, lambda: ctx.replicated(nn.Linear(H, H), Region.SEQUENCE_PARALLEL))  # fmt: skip
    torch.manual_seed(comm.rank)
    x = torch.randn(S // grid.tp.size, B, H)
    try:
        if case == "not connected":
            alone = Grid(2, 2, launch=Launch(comm.rank, 2, comm.rank, 2))
            ctx = LayerContext(alone, True, sink=sink)
        model = Small(ctx, make, drawn=case != "never drawn")
        if case == "experts":
            model.experts = GroupedLinear(2, H, (H,), ctx=ctx)
            nn.init.ones_(model.experts.weight)
        if case == "other parameters" and comm.rank:
            model.more = nn.Linear(H, H)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            model(x).square().sum().backward()
            if case == "step first":
                optimizer.step()
            if case == "own step first":
                with torch.no_grad():
                    [param.sub_(param.grad, alpha=0.1) for param in model.parameters()]
                optimizer.zero_grad()
                continue
            if case == "sparse" and comm.rank:
                model.own.bias.grad = model.own.bias.grad.to_sparse()
            asked = comm.grid(1) if case == "another grid" else grid
            by = ParamGrad() if case == "another sink" else sink
            by.finish_grad_sync(model, asked)
            if case == "twice":
                sink.finish_grad_sync(model, grid)
            optimizer.step()
            if case == "no zero_grad":
                continue
            if case == "no zero_grad of torch's":
                for param in (model.up.weight, model.down.weight):
                    param.grad = None
                continue
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    except ValueError as error:
        return str(error)
    return ""


SAYS = {
    "nn.Linear": "own.weight: its gradient differs among the ranks of tp, though it should be",
    "nn.LayerNorm": "own.weight: its gradient differs among the ranks of tp",
    "nn.Parameter": "own.weight: its gradient differs among the ranks of tp",
    "values of tp": "own.weight: its values differ among the ranks of tp, which all hold it: init",
    "values of dp": "own.weight: its values differ among the ranks of dp_cp, which all hold it",
    "not connected": "the 2 ranks of tp are not connected: call Grid.connect",
    "never drawn": "a weight of shape [6, 12] is used before it has values: initialize",
    "step first": "the optimizer would step before the gradients were summed over the ranks: call",
    "own step first": "a weight of shape [12, 6] was changed before the gradients were summed over",
    "twice": "finish_grad_sync was called, but no gradient has been added since",
    "no zero_grad": "a weight of shape [12]: a gradient would be added to the sum of the previous",
    "no zero_grad of torch's": "a weight of shape [12]: a gradient would be added to the sum",
    "another grid": "up was built with another grid than finish_grad_sync was given",
    "another sink": "up was built with another sink: make its LayerContext with sink=",
    "sparse": "own.bias has a sparse gradient, which cannot be summed",
    "other parameters": "finish_grad_sync got models with different parameters on the ranks",
    "experts": "experts.weight is placed on the axis ep, which this run does not have, so its",
    "none": "",
}


def mistakes(comm) -> dict[str, str]:
    comm.grid(1), comm.grid(2)
    return {case: mistake(comm, case) for case in SAYS}


def test_a_mistake_is_one_sentence_on_every_rank(world):
    for told in world(2).run(mistakes):
        for case, says in SAYS.items():
            assert told[case].startswith(says) and bool(told[case]) == bool(says), (
                case,
                told[case],
            )
            assert "\n" not in told[case]


def test_a_gradient_that_was_summed_before_is_warned_of(world):
    assert world(2).run(warned) == [["scale: its gradients are summed over ranks that all"], []]


def warned(comm) -> list[str]:
    grid = comm.grid(2)
    ctx = LayerContext(grid, sink=(sink := ParamGrad()))
    model = nn.Module()
    model.scale = ctx.replicated_parameter((H,), Region.TENSOR_PARALLEL)  # where it is whole
    nn.init.ones_(model.scale)
    use(model.scale, sink).sum().backward()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        sink.finish_grad_sync(model, grid)
    return [str(each.message)[:51] for each in seen]


@pytest.mark.prove
def test_the_example_prints_the_same_losses_on_two_ranks(free_port):
    example = str(ROOT / "examples/two_layers.py")
    port = str(free_port())
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]

    def losses(*words: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, *words, example], capture_output=True, text=True, check=True,
            timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        return re.findall(r"loss (\S+)", done.stdout)

    one, two = losses(), losses(*torchrun)
    assert len(one) == 5 and float(one[-1]) < float(one[0]) / 50
    assert [float(loss) for loss in two] == pytest.approx([float(loss) for loss in one], abs=2e-6)
