# SPDX-License-Identifier: Apache-2.0
"""Recognise of which kind a difference is: a sum that is missing, a flipped bit, another order, ...

Each function here looks at the two whole tensors, or at what single ranks have of the other side's,
and returns a clause for the verdict, or "".
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.compare.first_difference import TOLERANCE, Difference
from tools.compare.join import Key, Side, distance

SURE = 50.0  # times the tolerance: as near as that a guess is taken for right
SORTED = 1e-4  # sorted draws of as many values as a tensor has are farther apart
EPS = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7}


@dataclass(frozen=True)
class Kind:
    """A kind in a few words, and the clause that says it of this case."""

    name: str
    text: str


def kind_of(found: Difference, one: Side, other: Side) -> Kind | None:
    """Return the kind of a difference, or None where none fits."""
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
        count = int((a.isfinite() & ~b.isfinite()).sum())
        return Kind("not finite", f"{count} of {b.numel()} values are not finite")
    near = _near(a, b)
    for look in (
        _carried,
        _flipped,
        _summed,
        _missing,
        _scaled,
        _rounded,
        _dropped,
        _update,
        _moved,
    ):
        if kind := look(found, one, other, near):
            return kind
    return _order(a, b) or (_drawn(a, b) if found.key.group == "parameter" else None)


Near = Callable[[Tensor, Tensor], bool]


def _near(a: Tensor, b: Tensor) -> Near:
    """Return what says whether two tensors are the same, by the dtype."""
    names = [str(x.dtype).removeprefix("torch.") for x in (a, b)]
    limit = max(TOLERANCE.get(name, 0.0) for name in names)
    limit = min(SURE * limit, 0.05)

    def near(x: Tensor, y: Tensor) -> bool:
        return bool(x.any()) and distance(x.double(), y.double()) <= limit

    return near


def _of_numbers(found: Difference) -> Kind | None:
    if isinstance(found.one, float) and isinstance(found.other, float) and found.one:
        ratio = found.other / found.one
        how = (
            f"it is {ratio:.6g} times the other" if abs(ratio - 1) > 1e-6 else "in its last digits"
        )
        return Kind("another number", how)
    return None


def _of_shapes(a: Sequence[int], b: Sequence[int], other: Side) -> Kind:
    size = other.sizes["tp"]
    unlike = [(n, m) for n, m in zip(a, b, strict=False) if n != m]
    if len(a) == len(b) and len(unlike) == 1 and unlike[0][0] == size * unlike[0][1]:
        return Kind("a shard", "a shard in place of the full tensor")
    return Kind("another shape", f"the shapes are {list(a)} and {list(b)}")


def _of_batch(a: Tensor, b: Tensor, first: int, name: str) -> Kind:
    """Say which samples of the batch differ, and whether they are others or in another order.

    first: the number of the batch's first sample. name: tokens, labels, loss_mask or position_ids.
    """
    rows = [i for i in range(min(len(a), len(b))) if not torch.equal(a[i], b[i])]
    samples = _numbers([first + i for i in rows])
    if name in ("loss_mask", "position_ids") and a.shape == b.shape:
        what = "loss counts or not" if name == "loss_mask" else "position is another"
        count, many = int((a != b).sum()), "s" * (len(rows) > 1)
        return Kind("a mask", f"the {what} at {count} tokens of sample{many} {samples}")
    ours = {tuple(row.flatten().tolist()) for row in a}
    theirs = [tuple(b[i].flatten().tolist()) for i in rows]
    if rows and all(row in ours for row in theirs):
        return Kind("another order", f"the same samples in another order, samples {samples}")
    where = [int((a[i] != b[i]).sum()) for i in rows]
    if len(rows) == 1 and where[0] <= 2:
        at = (a[rows[0]] != b[rows[0]]).nonzero()[0].tolist()
        values = (int(x[rows[0]][tuple(at)]) for x in (a, b))
        numbers = " and ".join(map(str, values))
        return Kind("a token", f"sample {samples}, token {at[0]}: {numbers}")
    return Kind("other samples", f"other tokens in samples {samples}")


def _numbers(values: Sequence[int]) -> str:
    """Write a few numbers: 3; 0 to 3; 1, 4 and 6."""
    if len(values) > 2 and list(values) == list(range(values[0], values[-1] + 1)):
        return f"{values[0]} to {values[-1]}"
    shown = [str(v) for v in values[:4]] + ["..."] * (len(values) > 4)
    return ", ".join(shown[:-1]) + f" and {shown[-1]}" if len(shown) > 1 else "".join(shown)


BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def _flipped(found: Difference, one: Side, other: Side, near: Near) -> Kind | None:
    a, b = found.one, found.other
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


def _missing(found: Difference, one: Side, other: Side, near: Near) -> Kind | None:
    """Ranks that should have the same: do their parts add up to it?"""
    joined = found.joined_tensors[1]
    if joined is None or len(joined.replicas) < 2 or joined.distances == 0:
        return None
    parts = [x.double() for x in joined.replicas]
    a, n = found.one.double(), len(joined.replicas)
    if near(a, torch.stack(parts).sum(0)):
        return Kind("a missing sum", f"a sum over tp is missing: what the {n} ranks have adds up")
    if near(a, torch.stack(parts).mean(0)):
        return Kind("a missing sum", f"each of the {n} ranks of tp has a part of a mean")
    over = "of tp" if found.key.group == "activation" or found.key.kind == "own gradient" else ""
    wrong = [i for i, x in enumerate(parts) if not near(a, x)]
    if 0 < len(wrong) < n:
        which = f"only on rank {_numbers(wrong)} {over}".strip()
        return Kind("one rank", f"{which}, of {n} that should be equal")
    return Kind("replicas", f"the {n} ranks {over}".strip() + " differ, which should have the same")


def _carried(found: Difference, one: Side, other: Side, near: Near) -> Kind | None:
    """Of a collective: does it return what the rank gave, without the others'?"""
    key = found.key
    if key.group != "collective" or key.kind != "returned":
        return None
    mine = found.parts[1][0]
    for part in other.parts.get(key._replace(kind="taken"), []):
        at = (part.rank, part.entry["micro_batch"])
        if at != (mine.rank, mine.entry["micro_batch"]):
            continue
        given, b, ranks = part.values(), found.other, mine.entry["ranks"]
        if len(given) == len(ranks) * len(b):
            given = given.chunk(len(ranks))[ranks.index(mine.rank)]
        if given.shape == b.shape and near(given, b) and mine.entry["verb"] != "all_gather":
            over = mine.entry["axis"]
            text = f"a sum over {over} is missing: it returns what this rank gave"
            return Kind("a missing sum", text)
    return None


def _summed(found: Difference, one: Side, other: Side, near: Near) -> Kind | None:
    """Of a gradient that is summed over ranks: over which axes was it added, and over which not?"""
    key = found.key
    if key.group != "parameter" or key.kind != "gradient":
        return None
    return axes_of_sum(key, found.tensor, other, near)


def axes_of_sum(key: Key, tensor: str, side: Side, near: Near) -> Kind | None:
    """Find the sum of ranks' own gradients that a rank's summed gradient is."""
    every = {part.rank: part for part in side.parts.get(key._replace(kind="own gradient"), [])}
    for part in side.parts[key]:
        count = math.prod(part.entry["local"])
        mine = every.get(part.rank)
        if mine is None or part.entry["bytes"] != mine.entry["bytes"] or not count:
            continue
        value = part.values().double().flatten()
        sums = ("tp",) if "tp" in part.entry["sums"] else ()
        # ranks of ep have other experts: of the same ones are those that hold the same pieces
        same = [p for p in every.values() if p.entry["pieces"] == mine.entry["pieces"]]
        own = {p.rank: p for p in same}
        axes = [a for a in ("dp", "cp", *sums) if len({p.axes[a][0] for p in same}) > 1]
        full = tuple(axes)
        for some in _subsets(axes):
            total = torch.zeros_like(value)
            for peer in own.values():
                if all(peer.axes[a][0] == part.axes[a][0] for a in part.axes if a not in some):
                    total += peer.values().double().flatten()
            for times, words in _factors(full, part.axes):
                if (some != full or times != 1) and near(value, times * total):
                    return Kind("a sum over axes", _shortened(some, full, words))
    return None


def _subsets(axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for count in range(len(axes), -1, -1):
        yield from itertools.combinations(axes, count)


def _factors(full: Sequence[str], axes: Mapping[str, Sequence[int]]) -> Iterator[tuple[float, str]]:
    yield 1.0, ""
    for axis in full:
        size = axes[axis][1]
        yield float(size), f"and {size} times, as if added over {axis} twice"
        yield 1.0 / size, f"and divided by {size}, the ranks of {axis}"


def _shortened(some: Sequence[str], full: Sequence[str], words: str) -> str:
    left = [axis for axis in full if axis not in some]
    over = f"it is added over {' and '.join(some)}" if some else "it is this rank's own alone"
    if left:
        over = f"a sum is missing: {over}, and not over {' and '.join(left)}"
    return f"{over} {words}".strip()


def _scaled(found: Difference, one: Side, other: Side, near: Near) -> Kind | None:
    a, b = found.one.double(), found.other.double()
    if not a.any() or not b.any():
        return Kind("zero", "it is zero") if a.any() else None
    scale = float((a * b).sum() / a.square().sum())
    if scale == 0 or not near(b, scale * a) or abs(scale - 1) < 64 * EPS.get(found.one.dtype, 0):
        return None
    if distance(b, scale * a) > 1e-2 * abs(scale - 1):
        return None
    sizes = other.sizes if math.prod(other.sizes.values()) > 1 else one.sizes
    for size in sizes.values():
        if size > 1 and abs(scale - size) < 1e-3 * size:
            axes = " or ".join(n for n, m in sizes.items() if m == size)
            return Kind("a sum twice", f"it is {size} times the other: added over {axes} twice")
        if size > 1 and abs(scale * size - 1) < 1e-3:
            axes = " or ".join(n for n, m in sizes.items() if m == size)
            text = f"it is 1/{size} of the other: divided by the ranks of {axes}, or not added"
            return Kind("divided", text)
    return Kind("a factor", f"it is {scale:.6g} times the other")


def _rounded(found: Difference, one: Side, other: Side, near: Near) -> Kind | None:
    a, b = found.one, found.other
    for kind in (torch.bfloat16, torch.float16, torch.float32):
        if a.dtype.is_floating_point and torch.finfo(kind).eps > torch.finfo(a.dtype).eps:
            for x, y, who in ((a, b, "it"), (b, a, "the other")):
                if torch.equal(x.to(kind).to(y.dtype), y):
                    name = str(kind).removeprefix("torch.")
                    return Kind("a rounding", f"{who} is the same tensor rounded to {name}")
    return None


def _dropped(found: Difference, one: Side, other: Side, near: Near) -> Kind | None:
    a, b = found.one.double(), found.other.double()
    dropped = (b == 0) & (a != 0)
    share = float(dropped.double().mean())
    remaining = ~dropped & (a != 0)
    if not 0.005 < share < 0.95 or not remaining.any():
        return None
    if dropped.dim() > 1 and (samples := dropped.flatten(1).all(1)).sum() * dropped[0].numel() == (
        dropped.sum()
    ):
        return Kind("zero", f"it is zero in {int(samples.sum())} of {len(samples)} rows")
    ratio = b[remaining] / a[remaining]
    middle = float(ratio.median())
    if float((ratio - middle).abs().median()) > 1e-3 * abs(middle):
        return None
    again = f", the others are {middle:.4g} times as large" if abs(middle - 1) > 1e-3 else ""
    return Kind("a dropout", f"{share:.0%} of its elements are zero{again}: another random draw")


def _update(found: Difference, one: Side, other: Side, near: Near) -> Kind | None:
    """Of a weight after the step: how does its change differ?"""
    key = found.key
    if key.group != "parameter" or key.phase != "after" or key.kind not in ("weight", "master"):
        return None
    before = key._replace(phase="before")
    before_update = [side.parameter(before).get(found.tensor) for side in (one, other)]
    if None in before_update:
        return None
    was = [w.values.double() for w in before_update if w is not None]
    a, b = found.one.double() - was[0], found.other.double() - was[1]
    if not a.any():
        return Kind("an update", "only one side's update changes it")
    if not b.any():
        return Kind("an update", "its update does not change it")
    scale = float((a * b).sum() / a.square().sum())
    if distance(b, scale * a) < 0.02 * max(abs(scale - 1), 0.02) and abs(scale - 1) > 1e-4:
        return Kind("an update", f"its update is {scale:.6g} times the other: the learning rate")
    rest = b - a
    if was[0].any():
        decay = float((rest * was[0]).sum() / was[0].square().sum())
        if distance(rest, decay * was[0]) < 0.1:
            return Kind("an update", f"the updates differ by {decay:.4g} of the weight: the decay")
    return Kind("an update", f"its update differs by {distance(a, b):.2g} of its norm")


def _moved(found: Difference, one: Side, other: Side, near: Near) -> Kind | None:
    """Whether the same values are there at other places."""
    a, b = found.one, found.other
    if found.key.group == "activation" and a.dim() >= 3:
        for dim, what in ((1, "positions"), (0, "samples")):
            if moved := _shift(a, b, dim):
                return Kind("another order", f"the same values at other {what}, moved by {moved}")
    if not near(a, b) and distance(*(x.double().flatten().sort().values for x in (a, b))) < SORTED:
        return Kind("another order", "the same values in another order: cut or joined wrongly")
    return None


def _shift(a: Tensor, b: Tensor, dim: int) -> int:
    size = a.shape[dim]
    for by in [*range(1, min(size, 5)), *range(-4, 0), size // 2]:
        if 0 < abs(by) < size:
            low, high = max(by, 0), size + min(by, 0)
            x, y = a.narrow(dim, low - by, high - low), b.narrow(dim, low, high - low)
            if x.any() and distance(x, y) < 1e-6:
                return by
    return 0


def _order(a: Tensor, b: Tensor) -> Kind | None:
    """Whether a difference is as small as that of sums in another order."""
    if a.dtype != b.dtype or a.dtype not in EPS:
        return None
    error, eps = distance(a, b), EPS[a.dtype]
    if error <= 32 * eps:
        share = float((a != b).double().mean())
        return Kind(
            "another order of sums",
            f"as far apart as rounding goes, in {share:.0%} of the elements: the same function, by "
            "another order of its operations",
        )
    return None


def _drawn(a: Tensor, b: Tensor) -> Kind | None:
    x, y = a.double().flatten(), b.double().flatten()
    x, y = x - x.mean(), y - y.mean()
    if len(x) < 32 or not x.any() or not y.any():
        return None
    sizes = float(x.norm() / y.norm())
    alike = float((x * y).sum() / (x.norm() * y.norm()))
    if 0.5 < sizes < 2 and abs(alike) < 0.2:
        return Kind("another draw", "nothing of it is alike but its size: another random draw")
    return None


def region_of(found: Difference) -> str:
    """Say to which samples, positions or features a difference is confined, or ""."""
    a, b = found.one, found.other
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape != b.shape:
        return ""
    if found.key.group != "activation" or a.dim() < 3:
        return ""
    limit = TOLERANCE.get(str(a.dtype).removeprefix("torch."), 0.0)
    off = (a.double() - b.double()).abs() > limit * float(a.double().abs().max())
    if found.error < limit:
        off = a != b
    if not off.any():
        return ""
    places = []
    for dim, what in ((0, "sample"), (1, "position"), (a.dim() - 1, "feature")):
        rest = [d for d in range(a.dim()) if d != dim]
        at = off.any(rest[0]) if len(rest) == 1 else off.flatten().view(off.shape).amax(rest)
        hit = at.nonzero().flatten().tolist()
        if 0 < len(hit) < a.shape[dim] and len(hit) <= 0.75 * a.shape[dim]:
            places.append(f"{what}{'s' * (len(hit) > 1)} {_numbers(hit)}")
    return f"only at {', '.join(places)}" if places else ""
