# SPDX-License-Identifier: Apache-2.0
"""What a host without GPUs can do, as a probe measured it: matmuls, passes, collectives, Python.

Each rate is measured with as many threads as a rank has while the other cores do the same, so that
memory and clock are shared as in a run. benchmarks/plan_cpu.py measures them; no number here comes
from a run that is predicted.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Points = Sequence[Sequence[float]]  # (bytes, seconds), ascending


class Product(NamedTuple):
    """A matmul of a linear layer: forward x w^T, dgrad dy w, or wgrad dy^T x added to a gradient.

    m, n: of the result; k is summed over.
    """

    kind: str
    dtype: str
    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    @property
    def key(self) -> str:
        return " ".join(map(str, self))


class HostError(ValueError):
    """A rate that is asked for and was not measured: the text names it."""


@dataclass(frozen=True)
class Rates:
    """What a rank of so many threads does.

    products: seconds by Product.key. calls: seconds of each number, by "name dtype": of csrc's
    kernels, of "update", the global norm and the optimizer, and of "glue", all else that a layer
    does with each number of its hidden states. layer, micro_batch, step, step_layer: Python's
    seconds of F and B of a layer, for a micro-batch, for a step, and for each layer in a step.
    """

    products: Mapping[str, float]
    calls: Mapping[str, float]
    layer: float
    micro_batch: float
    step: float
    step_layer: float
    cache: dict[str, float] = field(default_factory=dict)

    def product(self, asked: Product) -> float:
        """Return a matmul's seconds: measured, else by the rate of the nearest one measured."""
        if asked.key in self.products:
            return self.products[asked.key]
        if asked.key not in self.cache:
            near = [Product(a, b, *map(int, rest)) for a, b, *rest in map(str.split, self.products)]
            near = [p for p in near if (p.kind, p.dtype) == (asked.kind, asked.dtype)]
            if not near:
                raise HostError(f"no product of {asked.kind} {asked.dtype} was measured")

            def distance(p: Product) -> float:
                return sum(abs(math.log(a / b)) for a, b in zip(p[2:], asked[2:], strict=True))

            best = min(near, key=distance)
            self.cache[asked.key] = self.products[best.key] * asked.flops / best.flops
        return self.cache[asked.key]

    def call(self, name: str, dtype: str, numbers: float) -> float:
        """Return the seconds of one of csrc's kernels on so many numbers."""
        return self.calls[f"{name} {dtype}"] * numbers


@dataclass(frozen=True)
class Host:
    """Cores, what ranks of 1 and more threads do, and what transfers among ranks take.

    rates: by a rank's threads. transfers: (bytes that a rank sends, seconds) by "verb ranks".
    context: by --cp-comm-type, what attention of a layer and micro-batch takes beyond that of
    one rank: seconds, and seconds for each number of queries and key. sharing: by ranks that
    outnumber the cores, how much longer they take than if sharing a core cost nothing.
    """

    cores: int
    rates: Mapping[int, Rates]
    transfers: Mapping[str, Points]
    context: Mapping[str, Sequence[float]] = field(default_factory=dict)
    sharing: Mapping[str, float] = field(default_factory=dict)

    def slower(self, ranks: int) -> float:
        """Return what sharing costs so many ranks: 1 where each has a core."""
        if ranks <= self.cores or not self.sharing:
            return 1.0
        return self.sharing[min(self.sharing, key=lambda n: abs(math.log(int(n) / ranks)))]

    def threads(self, ranks: int) -> int:
        """Return the threads of a rank, as pretrain_llama.py shares the cores."""
        return max(1, self.cores // ranks)

    def of(self, ranks: int) -> Rates:
        """Return what each of so many ranks does while none of them waits for a core."""
        threads = self.threads(ranks)
        return self.rates[max(t for t in self.rates if t <= threads)]

    def transfer(self, verb: str, size: int, sent: float) -> float:
        """Return the seconds of a core that a collective, or message, takes of each of its ranks.

        size: ranks of its axis. sent: bytes that leave a rank. It was measured with nothing beside
        it; ranks that share a core took turns, so the time of each is its share.
        """
        known = sorted(int(key.split()[1]) for key in self.transfers if key.split()[0] == verb)
        if not known:
            raise HostError(f"no {verb} was measured")
        near = min(known, key=lambda n: abs(math.log(n / size)))
        seconds = interpolate(self.transfers[f"{verb} {near}"], sent)
        return seconds / max(1.0, near / self.cores)


def interpolate(points: Points, at: float) -> float:
    """Return the value at a place: straight lines between points, the last one's slope beyond."""
    if len(points) == 1 or at <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if at <= x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    (x0, y0), (x1, y1) = points[-2:]
    return y1 + max(0.0, (y1 - y0) / (x1 - x0)) * (at - x1)
