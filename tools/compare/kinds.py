# SPDX-License-Identifier: Apache-2.0
"""Recognise the kind of a difference: a missing sum, a flipped bit, another order, ...

Each function here looks at the two whole tensors, or at the single ranks' parts of the other one.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.compare.first_difference import TOLERANCE, Difference
from tools.compare.join import INSIDE, Side, distance

SURE = 50.0  # times the tolerance: a guess that is as near as that is accepted
ADDING = ("tp", "cp")  # axes over which a module's outputs may be summed
EPS = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7}


@dataclass(frozen=True)
class Kind:
    """A kind in a few words, and a clause that describes this case."""

    name: str
    text: str


def kind_of(found: Difference, one: Side, other: Side, names: tuple[str, str]) -> Kind | None:
    """Return the kind of a difference, or None if none fits. names: of the sides."""
    a, b = found.one, found.other
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return _of_numbers(found)
    if found.key.group == "batch":
        return _of_batch(a, b, one.first, found.key.name)
    if (joined := found.joined_tensors[1]) is not None and joined.missing:
        return Kind("a part that no rank holds", joined.missing)
    if a.shape != b.shape:
        return _of_shapes(a.shape, b.shape, other)
    if not torch.equal(a.isfinite(), b.isfinite()):
        counts = [int((~x.isfinite()).sum()) for x in (a, b)]
        side = counts[1] >= counts[0]
        text = f"{counts[side]} of {b.numel()} values of {names[side]} are not finite"
        return Kind("not finite", text)
    near = _near(a, b, one, other)
    return (
        _flipped(a, b)
        or _missing(found, near)
        or _scaled(found, one, other, near)
        or _shifted(found, other, near)
        or _rounded(a, b)
        or _order(a, b)
    )


Near = Callable[[Tensor, Tensor], bool]


def _near(a: Tensor, b: Tensor, one: Side, other: Side) -> Near:
    """Return a function that compares two tensors, with a tolerance by their or the runs' dtype."""
    names = [str(x.dtype).removeprefix("torch.") for x in (a, b)] + [one.dtype, other.dtype]
    limit = max(TOLERANCE.get(name, 0.0) for name in names)
    limit = min(SURE * limit, 0.05)

    def near(x: Tensor, y: Tensor) -> bool:
        return bool(x.any()) and distance(x.double(), y.double()) <= limit

    return near


def _of_numbers(found: Difference) -> Kind | None:
    if isinstance(found.one, float) and isinstance(found.other, float) and found.one:
        if not math.isfinite(found.one) or not math.isfinite(found.other):
            return Kind("not finite", "one of them is not finite")
        ratio = found.other / found.one
        how = (
            f"it is {ratio:.6g} times the other" if abs(ratio - 1) > 1e-6 else "in its last digits"
        )
        auxiliary = found.key.name == "auxiliary loss"
        return Kind("an auxiliary loss" if auxiliary else "another number", how)
    return None


def _of_shapes(a: Sequence[int], b: Sequence[int], other: Side) -> Kind:
    size = other.sizes["tp"]
    unlike = [(n, m) for n, m in zip(a, b, strict=False) if n != m]
    if len(a) == len(b) and len(unlike) == 1 and unlike[0][0] == size * unlike[0][1]:
        return Kind("a shard", "a shard in place of the full tensor")
    return Kind("another shape", f"the shapes are {list(a)} and {list(b)}")


def _of_batch(a: Tensor, b: Tensor, first: int, name: str) -> Kind:
    """Return which samples of the batch differ, and whether they are others or in another order.

    first: the number of the batch's first sample. name: tokens, labels, loss_mask or position_ids.
    """
    rows = [i for i in range(min(len(a), len(b))) if not torch.equal(a[i], b[i])]
    samples = _numbers([first + i for i in rows])
    ours = {tuple(row.flatten().tolist()) for row in a}
    if rows and all(tuple(b[i].flatten().tolist()) in ours for i in rows):
        return Kind("another order", f"the same samples in another order, samples {samples}")
    return Kind("other samples", f"other {name} in samples {samples}")


def _numbers(values: Sequence[int]) -> str:
    """Return a few numbers as text: 3; 0 to 3; 1, 4 and 6."""
    if len(values) > 2 and list(values) == list(range(values[0], values[-1] + 1)):
        return f"{values[0]} to {values[-1]}"
    shown = [str(v) for v in values[:4]] + ["..."] * (len(values) > 4)
    return ", ".join(shown[:-1]) + f" and {shown[-1]}" if len(shown) > 1 else "".join(shown)


BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def _flipped(a: Tensor, b: Tensor) -> Kind | None:
    if a.dtype != b.dtype or a.element_size() not in BITS:
        return None
    unlike = (a != b).nonzero()
    if not 1 <= len(unlike) <= 3 or a.numel() < 8:
        return None
    at = tuple(unlike[0].tolist())
    width = BITS[a.element_size()]
    x, y = (int(each[at].clone().view(width)) for each in (a, b))
    flipped = (x ^ y) & (1 << 8 * a.element_size()) - 1
    place = f"element {list(at)}: {a[at].item():.9g} and {b[at].item():.9g}"
    if len(unlike) == 1 and flipped.bit_count() == 1:
        bit = flipped.bit_length() - 1
        return Kind("a flipped bit", f"one bit is flipped, bit {bit} of {place}")
    few = f"{len(unlike)} of {a.numel()} elements differ" if len(unlike) > 1 else "one differs"
    return Kind("a few elements", f"{few}, {place}")


def _missing(found: Difference, near: Near) -> Kind | None:
    """Return the kind if ranks differ that should be equal, such as parts of a missing sum."""
    joined = found.joined_tensors[1]
    if joined is None or len(joined.replicas) < 2 or joined.distances == 0:
        return None
    parts = [x.double() for x in joined.replicas]
    a, n = found.one.double(), len(joined.replicas)
    if near(a, torch.stack(parts).sum(0)):
        return Kind("a missing sum", f"a sum over tp is missing: the parts of the {n} ranks add up")
    if near(a, torch.stack(parts).mean(0)):
        return Kind("a missing sum", f"each of the {n} ranks of tp has a part of a mean")
    over = "of tp" if found.key.group == "activation" or found.key.kind == "own gradient" else ""
    wrong = [i for i, x in enumerate(parts) if not near(a, x)]
    if 0 < len(wrong) < n:
        which = f"only on rank {_numbers(wrong)} {over}".strip()
        return Kind("one rank", f"{which}, of {n} that should be equal")
    return Kind("replicas", f"the {n} ranks {over}".strip() + " differ, but should be equal")


def _scaled(found: Difference, one: Side, other: Side, near: Near) -> Kind | None:
    x = found.one
    a, b = x.double(), found.other.double()
    if not a.any() or not b.any():
        return Kind("zero", "it is zero") if a.any() else None
    scale = float((a * b).sum() / a.square().sum())
    if scale == 0 or not near(b, scale * a) or abs(scale - 1) < 64 * EPS.get(x.dtype, 0):
        return None
    if distance(b, scale * a) > 1e-2 * abs(scale - 1):
        return None
    sizes = other.sizes if math.prod(other.sizes.values()) > 1 else one.sizes
    if found.key.group != "parameter":  # only ranks of these add activations
        sizes = {name: size for name, size in sizes.items() if name in ADDING}
    inside = any(part.entry.get("region") == INSIDE for part in found.parts[1][:1])
    for size in sizes.values():
        axes = " or ".join(n for n, m in sizes.items() if m == size)
        more, less = abs(scale - size) < 1e-3 * size, abs(scale * size - 1) < 1e-3
        times = f"it is {f'{size} times' if more else f'1/{size} of'} the other"
        if size == 1 or not (more or less):
            continue
        if inside:  # a rank's own features: nothing is added
            return Kind("a local size", f"{times}, as if by a size of one rank of {axes}")
        if more:
            return Kind("a sum twice", f"{times}: added over {axes} twice")
        return Kind("divided", f"{times}: divided by the ranks of {axes}, or not added")
    return Kind("a factor", f"it is {scale:.6g} times the other")


def _shifted(found: Difference, other: Side, near: Near) -> Kind | None:
    """Return the kind if an activation [samples, positions, ...] is off by a constant vector."""
    size = other.sizes["tp"]
    if found.key.group != "activation" or found.one.dim() < 3 or size == 1:
        return None
    off = found.other.double() - found.one.double()
    if off.shape[0] * off.shape[1] == 1 or not near(off, off[:1, :1].expand_as(off)):
        return None
    text = f"it is off by the same vector at every token, as if {size} ranks of tp each add a bias"
    return Kind("a bias of each rank", f"{text} before a sum: add it once, after the sum")


def _rounded(a: Tensor, b: Tensor) -> Kind | None:
    for kind in (torch.bfloat16, torch.float16, torch.float32):
        if a.dtype.is_floating_point and torch.finfo(kind).eps > torch.finfo(a.dtype).eps:
            for x, y, who in ((a, b, "it"), (b, a, "the other")):
                if torch.equal(x.to(kind).to(y.dtype), y):
                    name = str(kind).removeprefix("torch.")
                    return Kind("a rounding", f"{who} is the same tensor rounded to {name}")
    return None


def _order(a: Tensor, b: Tensor) -> Kind | None:
    """Return the kind if a difference is as small as that of sums in another order."""
    if a.dtype != b.dtype or a.dtype not in EPS:
        return None
    error, eps = distance(a, b), EPS[a.dtype]
    if error <= 32 * eps:
        share = float((a != b).double().mean())
        return Kind(
            "another order of sums",
            f"the difference is as small as rounding, in {share:.0%} of the elements: the same "
            "function, with operations in another order",
        )
    return None
