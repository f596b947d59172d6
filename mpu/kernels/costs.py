# SPDX-License-Identifier: Apache-2.0
"""What each kernel reads, writes and multiplies: declared here, for plans and rehearsals.

A kernel is named as its function is. Bytes are those that must move once: of x, w and y, not of a
tile that is read again. Flags and tables are left out: some hundred bytes a launch.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Cost(NamedTuple):
    """Of one launch. bytes: read and written. written: the arguments that it writes."""

    bytes: int
    flops: float
    written: tuple[str, ...] = ()


def cost_of(kernel: str, given: Mapping[str, Any]) -> Cost:
    """Return the cost of a launch with these arguments. Raises KeyError for a kernel unknown."""
    return COSTS[kernel](given)


def _all_gather_matmul(a: Mapping[str, Any]) -> Cost:
    """Own rows go to WORLD - 1 ranks; rows of all ranks meet the weight."""
    m, n, k, world, size = a["m"], a["n"], a["k"], a["WORLD"], a["x"].element_size()
    pushed = 2 * (world - 1) * m * k * size if a["PUSHERS"] else 0
    multiplied = (world * m * k + n * k) * size + world * m * n * a["y"].element_size()
    return Cost(pushed + multiplied, 2.0 * world * m * n * k, ("y",))


def _matmul_scatter(a: Mapping[str, Any]) -> Cost:
    """Rows of all ranks meet the weight; each rank's are written where it reads them."""
    m, n, k, world, size = a["m"], a["n"], a["k"], a["WORLD"], a["x"].element_size()
    wire = a["WIRE"].primitive_bitwidth // 8
    return Cost((world * m * k + n * k) * size + world * m * n * wire, 2.0 * world * m * n * k)


def _reduce(a: Mapping[str, Any]) -> Cost:
    """The parts of all ranks are added up."""
    m, n, out = a["m"], a["n"], a["out"]
    wire = a["WIRE"].primitive_bitwidth // 8
    return Cost(m * n * (a["WORLD"] * wire + out.element_size()), 0.0, ("out",))


COSTS: dict[str, Callable[[Mapping[str, Any]], Cost]] = {
    "all_gather_matmul_kernel": _all_gather_matmul,
    "matmul_scatter_kernel": _matmul_scatter,
    "reduce_kernel": _reduce,
    "raise_flags_kernel": lambda a: Cost(0, 0.0),
    "wait_flags_kernel": lambda a: Cost(0, 0.0),
}
