# SPDX-License-Identifier: Apache-2.0
"""mpu's layers with gradients in `param.grad` and an optimizer of torch's, without training/."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from mpu.context import LayerContext
from mpu.gradients import use
from mpu.layers.embedding import VocabParallelEmbedding
from mpu.layers.fused import RMSNorm
from mpu.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpu.param import Region, draw_normal, placement_of
from mpu.param_grad import ParamGrad

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


@pytest.mark.parametrize("size, tp, sp", [(2, 2, True), (2, 2, False), (2, 1, False), (4, 2, True)])
def test_gradients_are_those_of_one_rank(world, size, tp, sp):
    (one,) = world(1).run(train, 1, False, 3, 2)
    for rank in world(size).run(train, tp, sp, 3, 2):
        for mine, whole in zip(rank, one, strict=True):
            for name, (dim, start, local) in mine.items():
                want = torch.from_numpy(whole[name][2]).narrow(dim, start, local.shape[dim])
                error = (torch.from_numpy(local) - want).abs().max() / abs(whole[name][2]).max()
                assert error < 1e-12, (name, error)


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
