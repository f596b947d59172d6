# SPDX-License-Identifier: Apache-2.0
"""What a Triton kernel requires of its arguments and costs, written above the kernel.

    @declared(passes("x", "y"), x="whole same", y="whole same")
    @triton.jit
    def swiglu_forward_kernel(x, y, width, LANES: tl.constexpr):

The words of an argument are those of mpu/kernels/by_address.py. A rehearsal checks and times each
launch by what stands here, and tests count a launch's bytes in the interpreter.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mpu.kernels.by_address import Requirements
from mpu.kernels.launch import Kernel


class Cost(NamedTuple):
    """Of one launch. bytes: read and written, of those that must move once: not of a tile or a
    weight that is read again, nor of flags and tables of some hundred bytes. written: the arguments
    that it writes. adds: those of them that it reads, too.
    """

    bytes: int
    flops: float = 0.0
    written: tuple[str, ...] = ()
    adds: tuple[str, ...] = ()


CostOf = Callable[[Mapping[str, Any]], Cost]  # of a launch's arguments, by name


class Declared(NamedTuple):
    """What a kernel requires, and what a launch with given arguments costs."""

    requires: Requirements
    cost: CostOf


def declared(cost: CostOf, **requires: str) -> Callable[[Any], Kernel]:
    """Declare a kernel's cost, and by argument what it requires."""

    def declare(jitted: Any) -> Kernel:
        file = jitted.fn.__module__.replace(".", "/") + ".py"
        words: dict[str | int, tuple[str, ...]] = {
            name: tuple(each.split()) for name, each in requires.items()
        }
        return Kernel(jitted, Declared(Requirements(words, file), cost))

    return declare


def passes(read: str, written: str) -> CostOf:
    """Return the cost of one pass over some arguments, each once, where it is given."""
    names, wrote = (*read.split(), *written.split()), tuple(written.split())

    def cost(given: Mapping[str, Any]) -> Cost:
        tensors = [given[name] for name in names if given[name] is not None]
        return Cost(sum(x.nbytes for x in tensors), 0.0, wrote)

    return cost
