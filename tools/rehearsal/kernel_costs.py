# SPDX-License-Identifier: Apache-2.0
"""What each kernel reads, writes and multiplies: declared here, for plans and rehearsals.

A kernel is named as its function is. Bytes are those that must move once: of x, w and y, not of a
tile or a weight that is read again. Flags and tables are left out: some hundred bytes a launch.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Cost(NamedTuple):
    """Of one launch. bytes: read and written. written: the arguments that it writes. adds: those
    of them that it reads, too.
    """

    bytes: int
    flops: float
    written: tuple[str, ...] = ()
    adds: tuple[str, ...] = ()


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


def _softmax_stats(a: Mapping[str, Any]) -> Cost:
    """Logits are read once; three numbers a row are written."""
    n, size = a["n"], a["rows"].element_size()
    return Cost(n * (a["real"] * size + 8 + 3 * 4), 0.0, ("out",))


def _softmax_gradient(a: Mapping[str, Any]) -> Cost:
    """Logits are read, and their gradient is written over them."""
    n, width = a["rows"].shape
    return Cost(n * ((a["real"] + width) * a["rows"].element_size() + 8 + 2 * 4), 0.0, ("rows",))


def _adamw(a: Mapping[str, Any]) -> Cost:
    """Four numbers are read and three written, and the weight where it is narrower."""
    narrow = 0 if a["weight"] is None else a["weight"].element_size()
    written = ("master", "exp_avg", "exp_avg_sq", "weight")
    return Cost(a["n"] * (7 * a["master"].element_size() + narrow), 0.0, written, written[:3])


def _pass(a: Mapping[str, Any], read: str, written: str) -> Cost:
    """Each of these arguments once, where it is given; `written` of them are written."""
    wrote = tuple(written.split())
    tensors = [a[name] for name in (*read.split(), *wrote) if a[name] is not None]
    return Cost(sum(x.nbytes for x in tensors), 0.0, wrote)


def _norm_forward(a: Mapping[str, Any]) -> Cost:
    return _pass(a, "x added w", "h y inverse" if a["ADD"] else "y inverse")


def _norm_backward(a: Mapping[str, Any]) -> Cost:
    return _pass(a, "h w inverse dy dh", "dx parts")


def _fold(a: Mapping[str, Any]) -> Cost:
    """The parts, and the gradient: it is read, too, where something was added before."""
    once = _pass(a, "parts", "main")
    if a["FRESH"]:
        return once
    return once._replace(bytes=once.bytes + a["main"].nbytes, adds=("main",))


def _rope(a: Mapping[str, Any]) -> Cost:
    """q and k are read and written, v where it is copied; the angles are read."""
    moved = sum(a[name].nbytes for name in ("q", "k") + ("v",) * a["COPY"])
    return Cost(2 * moved + a["cos"].nbytes + a["sin"].nbytes, 0.0, ("out",))


def _max_logits(a: Mapping[str, Any]) -> Cost:
    """Queries and keys are read once, and each pair that looks is multiplied. Documents, whose
    lengths are on the device, count as equally long.
    """
    (b, heads, s, d), (groups, keys) = a["q"].shape, a["k"].shape[1:3]
    documents = a["documents"]
    length = s / documents
    far = min(a["window"], length)  # keys of the last query
    if a["CAUSAL"]:
        pairs = documents * far * (length - (far - 1) / 2)
    else:  # a triangle above the diagonal has a window of 1
        pairs = s * (s + 1) / 2 if a["window"] == 1 else s * keys
    moved = b * (heads * s + groups * keys) * d * a["q"].element_size()
    return Cost(moved, 2.0 * b * heads * d * pairs, ("noted",), ("noted",))


def _row_scales(a: Mapping[str, Any]) -> Cost:
    """Numbers are read once."""
    size = a["x"].element_size()
    return Cost(a["n"] * a["k"] * size + a["out"].numel(), 0.0, ("out",))


def _encode(a: Mapping[str, Any]) -> Cost:
    """Numbers and scales are read, rows are written, with scales in fp32 where they are requested.
    """
    moved = a["n"] * a["k"] * a["x"].element_size() + a["n"] * a["blocks"]
    wide = 0 if a["wide"] is None else a["wide"].nbytes
    return Cost(moved + a["out"].numel() + wide, 0.0, ("out", "wide"))


def _rows(a: Mapping[str, Any]) -> Cost:
    """Numbers are read once, or twice where a tile has not all that share a scale."""
    moved = a["n"] * a["k"] * a["x"].element_size() * (1 if a["WHOLE"] else 2)
    wide = 0 if a["wide"] is None else a["wide"].nbytes
    return Cost(moved + a["out"].numel() + wide, 0.0, ("out", "wide"))


COSTS: dict[str, Callable[[Mapping[str, Any]], Cost]] = {
    "all_gather_matmul_kernel": _all_gather_matmul,
    "matmul_scatter_kernel": _matmul_scatter,
    "reduce_kernel": _reduce,
    "softmax_stats_kernel": _softmax_stats,
    "softmax_gradient_kernel": _softmax_gradient,
    "adamw_kernel": _adamw,
    "max_logits_kernel": _max_logits,
    "row_scales_kernel": _row_scales,
    "encode_kernel": _encode,
    "rows_kernel": _rows,
    "raise_flags_kernel": lambda a: Cost(0, 0.0),
    "wait_flags_kernel": lambda a: Cost(0, 0.0),
    "norm_forward_kernel": _norm_forward,
    "norm_forward_long_kernel": _norm_forward,
    "norm_backward_kernel": _norm_backward,
    "norm_backward_long_kernel": _norm_backward,
    "fold_kernel": _fold,
    "sum_of_parts_kernel": lambda a: _pass(a, "parts", "out"),
    "rope_kernel": _rope,
    "swiglu_forward_kernel": lambda a: _pass(a, "x", "y"),
    "swiglu_backward_kernel": lambda a: _pass(a, "x dy", "dx"),
}
