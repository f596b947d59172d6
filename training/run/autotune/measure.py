# SPDX-License-Identifier: Apache-2.0
"""Measure which overlap method each matmul of a run should take: --tp-comm-overlap auto.

    measure    seconds of a layer's forward and backward by each method, on this rank
    tune       the same for all layers; every rank gets the slowest rank's seconds
    choose     the fastest method of each, "none" unless another is faster by more than noise

The timed layers are linear layers of the run's shapes on random numbers, with the weight gradient
under the scatter, all casts and all waits.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mpu.comm.collectives import barrier, gather_bytes
from mpu.context import LayerContext
from mpu.gradients import GradientSink, WeightGradientQueue
from mpu.layers.linear import ColumnParallelLinear, Recipe, RowParallelLinear, use_overlap
from mpu.overlap.choices import OverlapMap, key

MARGIN = 0.01  # fraction of the plain method's time: a smaller gain is noise
BUDGET = 10.0  # seconds for all layers together, as far as LEAST repetitions allow
LEAST, MOST = 3, 20  # repetitions
Times = dict[str, dict[str, float]]  # {matmul: {method: seconds}}
Spent = dict[str, tuple[float, float]]  # {method: seconds of forward, of backward}


@dataclass(frozen=True)
class Projection:
    """The two matmuls of a linear layer on one rank, with t ranks of tensor parallelism.

    Without sequence parallelism t is 1 here, and nothing is gathered.
    """

    # gather x [rows, k] of every rank, then multiply with w [width, k]; else multiply x [t rows, k]
    # and reduce-scatter to [rows, width]
    column: bool
    rows: int
    k: int
    width: int
    dtype: torch.dtype
    recipe: Recipe | None = None  # the layer's; None: the plain one

    @property
    def forward(self) -> str:
        """Return the key by which Auto looks up the forward matmul."""
        return self._key("gather" if self.column else "scatter", self.k, self.width)

    @property
    def backward(self) -> str:
        """Return the key of the dgrad matmul; its method is used for all of backward."""
        return self._key("scatter" if self.column else "gather", self.width, self.k)

    def _key(self, op: str, k: int, width: int) -> str:
        length, dtype = (self.recipe or Recipe()).row(k, self.dtype)
        return key(op, self.rows, length, width, dtype)


def measure(
    projection: Projection, methods: Sequence[str], ctx: LayerContext, budget: float
) -> Spent:
    """Return the least seconds of forward and of backward by each method, on this rank.

    The methods alternate, so that other load on the machine affects all of them, and every second
    turn has the opposite order, since the previous run leaves its data in the caches. All ranks
    start each run together and make the same number of runs. The global random state is unchanged.
    """
    p, size, axis, device = projection, ctx.tp.size, ctx.tp, ctx.device
    parts = size if ctx.sp else 1
    random = torch.Generator(device).manual_seed(0)
    ctx = replace(
        ctx, dtype=p.dtype, sink=GradientSink(ctx.accumulate), queue=WeightGradientQueue()
    )
    layer: ColumnParallelLinear | RowParallelLinear
    if p.column:
        layer = ColumnParallelLinear(p.k, p.width * size, ctx=ctx, recipe=p.recipe)
    else:
        layer = RowParallelLinear(p.k * size, p.width, ctx=ctx, recipe=p.recipe)
    layer.weight.data.normal_(generator=random)

    def draw(rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, generator=random, dtype=p.dtype, device=device)

    x = draw(p.rows if p.column else parts * p.rows, p.k).requires_grad_()
    dy = draw(parts * p.rows if p.column else p.rows, p.width)

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def once(name: str) -> tuple[float, float]:
        use_overlap(layer, OverlapMap("auto", {p.forward: name, p.backward: name}))
        barrier(axis, device)
        begin = now()
        y = layer(x)
        forward = now() - begin
        barrier(axis, device)
        begin = now()
        torch.autograd.grad(y, x, dy)
        return forward, now() - begin

    def turn(i: int) -> dict[str, tuple[float, float]]:
        return {name: once(name) for name in methods[:: -1 if i % 2 else 1]}

    turn(0)  # warms up memory, caches and connections
    begin = now()
    turns = [turn(1)]
    took = gather_bytes(json.dumps(now() - begin).encode(), axis, device)
    count = int(budget / max(json.loads(seconds) for seconds in took))
    turns += [turn(i) for i in range(2, min(max(count, LEAST), MOST) + 1)]
    return {
        name: (min(each[name][0] for each in turns), min(each[name][1] for each in turns))
        for name in methods
    }


Measure = Callable[[Projection, Sequence[str], LayerContext, float], Spent]


def tune(
    projections: Iterable[Projection],
    methods: Sequence[str],
    ctx: LayerContext,
    measure: Measure = measure,
) -> Times:
    """Measure this rank's layers; return each matmul's times, those of its slowest rank.

    Equal layers are measured once. Every rank of the world calls this and gets the same result.
    projections: the same over ctx.tp; stages of a pipeline have their own.
    """
    distinct, mine = list(dict.fromkeys(projections)), Times()
    for p in distinct:
        for method, seconds in measure(p, methods, ctx, BUDGET / len(distinct)).items():
            for name, spent in zip((p.forward, p.backward), seconds, strict=True):
                times = mine.setdefault(name, {})
                times[method] = times.get(method, 0.0) + spent  # two layers may share a matmul
    found = gather_bytes(json.dumps(mine).encode(), ctx.grid.world, ctx.device)
    most = Times()
    for theirs in map(json.loads, found):
        for name, times in theirs.items():
            for method, spent in times.items():
                so_far = most.setdefault(name, {})
                so_far[method] = max(spent, so_far.get(method, 0.0))
    return most


def choose(times: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """Return the method of each matmul: the fastest, where it beats "none" by more than MARGIN."""
    choices = {}
    for name, spent in times.items():
        best = min(spent, key=lambda method: spent[method])
        choices[name] = best if spent[best] < (1 - MARGIN) * spent["none"] else "none"
    return choices
