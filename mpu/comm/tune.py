# SPDX-License-Identifier: Apache-2.0
"""Find out, by trying, which path each matmul of a run should take: `auto` of mpu/comm/overlap.py.

    measure    seconds of a layer's forward and backward over each path, on this rank
    tune       all layers, and of every rank the slowest: the same numbers everywhere
    choose     the fastest path of each, `none` unless another is faster by more than noise

What is timed is what runs: the functions that the linear layers call, with the weight gradient
under the scatter and all waits. Only the numbers in x and w are made up.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from mpu.comm.collectives import barrier, gather_bytes
from mpu.comm.overlap import all_gather_matmul, matmul_reduce_scatter
from mpu.comm.paths import Auto, key
from mpu.grid import Axis

MARGIN = 0.01  # of the time of `none`: less is noise
BUDGET = 10.0  # seconds for all layers together, as far as LEAST repetitions allow
LEAST, MOST = 3, 20  # repetitions
Times = dict[str, dict[str, float]]  # {matmul: {path: seconds}}


@dataclass(frozen=True)
class Projection:
    """The two matmuls of a linear layer, as one rank makes them.

    column: x [rows, k] of every rank is gathered, and multiplied with w [width, k]. Else x [t rows,
    k] is multiplied, and the sum over the ranks scattered to [rows, width].
    """

    column: bool
    rows: int
    k: int
    width: int
    dtype: torch.dtype

    @property
    def forward(self) -> str:
        """Name the forward matmul as Auto looks it up."""
        op = "gather" if self.column else "scatter"
        return key(op, self.rows, self.k, self.width, self.dtype)

    @property
    def backward(self) -> str:
        """Name the one of backward that makes dx; it decides for all of backward."""
        op = "scatter" if self.column else "gather"
        return key(op, self.rows, self.width, self.k, self.dtype)


def measure(
    projection: Projection, paths: Sequence[str], axis: Axis, device: torch.device, budget: float
) -> dict[str, tuple[float, float]]:
    """Return the least seconds of forward and of backward over each path, on this rank.

    The paths take turns, so that whatever else the machine does falls on all of them; all ranks
    begin a run together and do as many. The global random state is left alone.
    """
    p, size = projection, axis.size
    random = torch.Generator(device).manual_seed(0)

    def draw(rows: int, width: int) -> torch.Tensor:
        return torch.randn(rows, width, generator=random, dtype=p.dtype, device=device)

    x = draw(p.rows if p.column else size * p.rows, p.k).requires_grad_()
    w = draw(p.width, p.k).requires_grad_()
    dy = draw(size * p.rows if p.column else p.rows, p.width)

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def once(name: str) -> tuple[float, float]:
        path = Auto(axis, {p.forward: name, p.backward: name})
        barrier(axis, device)
        begin = now()
        y = all_gather_matmul(x, [w], path)[0] if p.column else matmul_reduce_scatter(x, w, path)
        forward = now() - begin
        barrier(axis, device)
        begin = now()
        torch.autograd.grad(y, (x, w), dy)
        return forward, now() - begin

    def all_of_them() -> list[tuple[float, float]]:
        return [once(name) for name in paths]

    all_of_them()  # memory, caches and connections
    begin = now()
    rounds = [all_of_them()]
    took = gather_bytes(json.dumps(now() - begin).encode(), axis, device)
    count = int(budget / max(json.loads(seconds) for seconds in took))
    rounds += [all_of_them() for _ in range(min(max(count, LEAST), MOST) - 1)]
    return {
        name: (min(f for f, _ in runs), min(b for _, b in runs))
        for name, runs in zip(paths, zip(*rounds, strict=True), strict=True)
    }


Measure = Callable[
    [Projection, Sequence[str], Axis, torch.device, float], dict[str, tuple[float, float]]
]


def tune(
    projections: Iterable[Projection],
    paths: Sequence[str],
    axis: Axis,
    world: Axis,
    device: torch.device,
    measure: Measure = measure,
) -> Times:
    """Measure this rank's layers, equal ones once, and return the times of all ranks' matmuls: of
    the ranks that make one, the slowest. Every rank of the world calls it and gets the same.

    projections: the same over `axis`; stages of a pipeline have their own.
    """
    distinct, mine = list(dict.fromkeys(projections)), Times()
    for p in distinct:
        for path, seconds in measure(p, paths, axis, device, BUDGET / len(distinct)).items():
            for name, spent in zip((p.forward, p.backward), seconds, strict=True):
                times = mine.setdefault(name, {})
                times[path] = times.get(path, 0.0) + spent  # two layers may share a matmul
    every = [json.loads(text) for text in gather_bytes(json.dumps(mine).encode(), world, device)]
    slowest = Times()
    for theirs in every:
        for name, times in theirs.items():
            for path, spent in times.items():
                so_far = slowest.setdefault(name, {})
                so_far[path] = max(spent, so_far.get(path, 0.0))
    return slowest


def choose(times: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """Return the path of each matmul: the fastest, where it beats `none` by more than MARGIN."""
    choices = {}
    for name, spent in times.items():
        best = min(spent, key=lambda path: spent[path])
        choices[name] = best if spent[best] < (1 - MARGIN) * spent["none"] else "none"
    return choices
