# SPDX-License-Identifier: Apache-2.0
"""Multiply while the bytes move: all-gather-matmul, matmul-reduce-scatter, and their gradients.

    all_gather_matmul       y_i = gather(x) w_i^T    x [n, ..., k], w_i [o_i, k] -> [t n, ..., o_i]
    matmul_reduce_scatter   y = scatter(sum x w^T)   x [t n, ..., k], w [o, k] -> [n, ..., o]

Each is the other's gradient with respect to x; the gradient of w needs gather(x), or gather(dy):

                            forward               backward
    all_gather_matmul       gather x | matmul     gather x again | dgrad | scatter dx | wgrad
    matmul_reduce_scatter   matmul | scatter      gather dy | dgrad | wgrad

    a | b: b runs while a is on its way. Only the shard of x is saved.

How the parts travel is a path (mpu/comm/paths.py): the reference, messages, or shared memory.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mpu.comm.paths import Path


class Weights(Protocol):
    """Where the weights of a matmul come from, and where their gradients go."""

    @property
    def deferring(self) -> bool:
        """True where `put` keeps work for later."""

    def take(self, weight: Any) -> Tensor:
        """Return the weight, whole."""

    def give_back(self, weight: Any) -> None:
        """Say that it is not needed for now."""

    def put(self, work: Callable[[], None], kept: Sequence[Tensor] = ()) -> None:
        """Run a weight gradient, now or later; it holds `kept` until then."""

    def add(self, weight: Any, x: Tensor, dy: Tensor) -> None:
        """Add dy^T x to the weight's gradient: x [rows, i], dy [rows, o]."""


class _Autograd:
    """Plain tensors: their gradients go back to autograd."""

    deferring = False

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.grads: list[Tensor | None] = [None] * len(weights)
        self._place = {id(w): i for i, w in enumerate(weights)}

    def take(self, weight: Tensor) -> Tensor:
        return weight

    def give_back(self, weight: Tensor) -> None:
        pass

    def put(self, work: Callable[[], None], kept: Sequence[Tensor] = ()) -> None:
        work()

    def add(self, weight: Tensor, x: Tensor, dy: Tensor) -> None:
        self.grads[self._place[id(weight)]] = dy.t() @ x


def all_gather_matmul(
    x: Tensor, weights: Sequence[Tensor], path: Path, layer: Weights | None = None
) -> tuple[Tensor, ...]:
    """Return gather(x) w^T for each w: x [n, ..., k], w [o, k] -> [t n, ..., o].

    layer: who keeps the weights; without one their gradients are autograd's.
    """
    return AllGatherMatmul.apply(x, path, layer, *weights)


def matmul_reduce_scatter(
    x: Tensor, weight: Tensor, path: Path, layer: Weights | None = None
) -> Tensor:
    """Return this rank's rows of the sum over ranks of x w^T: x [t n, ..., k], w [o, k] -> [n, ...,
    o].
    """
    return MatmulReduceScatter.apply(x, path, layer, weight)


class AllGatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        f: Any, x: Tensor, path: Path, layer: Weights | None, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        layer = layer or _Autograd(weights)
        f.path, f.layer, f.weights = path, layer, weights
        f.save_for_backward(x)  # the shard
        gathering = path.of("gather", x, sum(len(w) for w in weights)).gather(x)
        out = gathering.multiply([layer.take(w) for w in weights])
        gathering.close()
        for weight in weights:
            layer.give_back(weight)
        return tuple(out)

    @staticmethod
    def backward(f: Any, *dys: Tensor) -> Any:
        #   Before:  gather x -> dgrad -> wait -> scatter dx -> wait -> wgrad
        #   Now:     [gather x | dgrad] -> [scatter dx | wgrad]
        path, layer, weights = f.path, f.layer, f.weights
        (x,) = f.saved_tensors
        way = path.of("scatter", dys[0], x.shape[-1])
        again = None if layer.deferring else way.gather_again(x)
        dx, scattering = way.multiply_scatter(dys, [layer.take(w).t() for w in weights])
        for weight in weights:
            layer.give_back(weight)

        def wgrad() -> None:
            gathering = again or way.gather_again(x)
            whole = gathering.whole()
            for weight, dy in zip(weights, dys, strict=True):
                layer.add(weight, _flat(whole), _flat(dy))
            gathering.close()

        layer.put(wgrad, (x, *dys))
        scattering.wait()
        return dx, None, None, *getattr(layer, "grads", [None] * len(weights))


class MatmulReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(f: Any, x: Tensor, path: Path, layer: Weights | None, weight: Tensor) -> Tensor:
        layer = layer or _Autograd([weight])
        f.path, f.layer, f.weight = path, layer, weight
        f.save_for_backward(x)
        scatters = path.of("scatter", x, len(weight))
        y, scattering = scatters.multiply_scatter([x], [layer.take(weight)])
        layer.give_back(weight)
        scattering.wait()
        return y

    @staticmethod
    def backward(f: Any, dy: Tensor) -> Any:
        path, layer, weight = f.path, f.layer, f.weight
        (x,) = f.saved_tensors
        gathers = path.of("gather", dy, x.shape[-1])
        gathering = gathers.gather(dy)
        (dx,) = gathering.multiply([layer.take(weight).t()])
        layer.give_back(weight)
        once = not layer.deferring
        if not once:  # a deferred wgrad keeps the shard
            gathering.close()

        def wgrad() -> None:
            arrived = gathering if once else gathers.gather_again(dy)
            layer.add(weight, _flat(x), _flat(arrived.whole()))
            arrived.close()

        layer.put(wgrad, (x, dy))
        return dx, None, None, *getattr(layer, "grads", [None])


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
