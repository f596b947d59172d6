# SPDX-License-Identifier: Apache-2.0
"""Declare a Triton kernel's requirements on its arguments and its cost, above the kernel.

    @declared(passes("x", "y"), x="whole same", y="whole same")
    @triton.jit
    def swiglu_forward_kernel(x, y, width, LANES: tl.constexpr):

The keywords for an argument are those of mpu/kernels/by_address.py. A rehearsal checks and times
each launch by its declaration, and tests count a launch's bytes in the interpreter.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mpu.kernels.by_address import Requirements
from mpu.kernels.launch import Kernel


class Cost(NamedTuple):
    """The cost of one launch. bytes: the minimum of bytes read and written, without repeated reads
    of a tile or a weight, and without flags and tables of a few hundred bytes. written: the
    arguments that it writes. adds: those of them that it also reads.
    """

    bytes: int
    flops: float = 0.0
    written: tuple[str, ...] = ()
    adds: tuple[str, ...] = ()


CostOf = Callable[[Mapping[str, Any]], Cost]  # takes a launch's arguments by name


class Declared(NamedTuple):
    """A kernel's requirements, and a function that returns the cost of a launch."""

    requires: Requirements
    cost: CostOf


def declared(cost: CostOf, **requires: str) -> Callable[[Any], Kernel]:
    """Declare a kernel's cost, and its requirements by argument."""

    def declare(jitted: Any) -> Kernel:
        file = jitted.fn.__module__.replace(".", "/") + ".py"
        words: dict[str | int, tuple[str, ...]] = {
            name: tuple(each.split()) for name, each in requires.items()
        }
        return Kernel(jitted, Declared(Requirements(words, file), cost))

    return declare


def passes(read: str, written: str) -> CostOf:
    """Return the cost function of one pass over some arguments, each moved once unless None."""
    names, wrote = (*read.split(), *written.split()), tuple(written.split())

    def cost(given: Mapping[str, Any]) -> Cost:
        tensors = [given[name] for name in names if given[name] is not None]
        return Cost(sum(x.nbytes for x in tensors), 0.0, wrote)

    return cost
