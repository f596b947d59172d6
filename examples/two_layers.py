#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Weft's layers without its trainer: two layers on t tensor-parallel ranks, and torch's AdamW.

torchrun --nproc-per-node 2 examples/two_layers.py      docs/library.md explains it line by line
"""

import os
import sys
from datetime import timedelta

import torch
from torch import Tensor, nn

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from mpu.comm.collectives import sum_in_order  # noqa: E402
from mpu.context import LayerContext  # noqa: E402
from mpu.grid import Grid  # noqa: E402
from mpu.launch import Launch  # noqa: E402
from mpu.layers.fused import RMSNorm  # noqa: E402
from mpu.layers.linear import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from mpu.param import draw_normal  # noqa: E402
from mpu.param_grad import ParamGrad  # noqa: E402


class Layer(nn.Module):
    """x + down(relu(up(norm(x)))^2): hidden states [s/t, b, h], as each rank has them."""

    def __init__(self, h: int, ctx: LayerContext, name: str) -> None:
        super().__init__()
        self.norm = RMSNorm(h, ctx=ctx)
        self.up, self.down = (
            ColumnParallelLinear(h, 4 * h, ctx=ctx),
            RowParallelLinear(4 * h, h, ctx=ctx),
        )
        nn.init.ones_(self.norm.weight)
        draw_normal(self.up.weight, [f"{name}.up"], 0.1, seed=1)  # the same model on any layout
        draw_normal(self.down.weight, [f"{name}.down"], 0.1, seed=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))).square())


world, sink = Launch.from_env().world, ParamGrad()
grid = Grid(world, tp_size=world).connect(torch.device("cpu"), None, timedelta(minutes=5))
ctx = LayerContext(grid, sequence_parallel=True, sink=sink)
model = nn.Sequential(*(Layer(64, ctx, f"layers.{i}") for i in range(2)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.randn(32, 4, 64, generator=torch.Generator().manual_seed(2))  # [s, b, h], on every rank
y = x.roll(1, -1)
mine = slice(grid.tp.rank * 32 // world, (grid.tp.rank + 1) * 32 // world)  # this rank's part of s
for step in range(50):
    optimizer.zero_grad()
    loss = (model(x[mine]) - y[mine]).square().sum() / x.numel()  # a part of the whole loss
    loss.backward()
    sink.finish_grad_sync(model, grid)
    optimizer.step()
    total = sum_in_order(loss.detach(), grid.tp)
    if grid.rank == 0 and step % 10 == 9:
        print(f"step {step + 1}: loss {total.item():.6f}")
grid.close()
