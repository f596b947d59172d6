# SPDX-License-Identifier: Apache-2.0
"""Compare two recorded steps, tensor by tensor in the order of the step, up to a difference.

    batch -> weights and state before -> forward -> loss -> backward, each weight's own gradient
    when it is complete -> sums over ranks -> gradient norm -> learning rate -> weights after

The tolerance between two layouts (docs/numerics.md) is equal bits, or a distance that depends on
the dtype, plus the growth during the step of the distance of the weights with which it begins.
Distances are computed in fp64. The batch and the weights with which both sides begin a run have
equal bits in any layout.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tools.compare.join import JoinedTensor, Key, Part, Side, distance

# how much a tensor may differ, relative to its norm, where sums have another order
TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
# times the distance of the weights: how far a step's tensors, and its loss and norm, may be apart
GROWS, GROWS_ALL = 120.0, 20.0
FLOOR = 1e-4  # a tensor's norm counts as at least this fraction of the largest of its kind
WEIGHTS = ("weight", "master")
# settings that change bits, according to numerics.md; every other setting keeps them
OF_THE_LAYOUT = (
    "parallel.tensor_model_parallel_size", "parallel.sequence_parallel",
    "parallel.context_parallel_size", "parallel.cp_comm_type", "parallel.world_size",
    "batch.micro_batch_size",
    "parallel.rank_order", "parallel.num_distributed_optimizer_instances",
    "parallel.zero_reduce_each_microbatch", "parallel.tp_comm_overlap",
)  # fmt: skip


def after_rounding(gradient: float) -> float:
    """Return the relative distance of two updates of Adam whose gradients nearly agree.

    gradient: the relative distance of the gradients. An early update is the sign of each element:
    an error e flips it where an element is smaller than e, which are a fraction of about e of the
    elements, and all elements whose gradient is mere rounding.
    """
    return 2 * math.sqrt(gradient)


@dataclass(frozen=True)
class Allowed:
    """The allowed differences of two sides.

    exact: bits must be equal. begins: bits of the state with which the step begins must be equal,
    as both sides have loaded it, or drawn it. distances: otherwise {name: relative distance that a
    weight may have at the beginning}; "": of all others.
    """

    exact: bool
    begins: bool = True
    distances: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Difference:
    """The first quantity that differs."""

    key: Key
    one: Any  # whole tensor of the first side, or a number
    other: Any  # the same of the second side
    error: float
    # of both sides: they have the line and the module
    parts: tuple[list[Part], list[Part]] = field(default_factory=lambda: ([], []))
    tensor: str = ""  # the canonical name of a parameter's tensor
    replicas: bool = False  # the tp ranks of the other side differ among themselves, and should not
    joined_tensors: tuple[JoinedTensor | None, JoinedTensor | None] = (None, None)

    @property
    def site(self) -> str:
        """Return file:line of the program where the tensor was an input or output."""
        for parts in self.parts[::-1]:
            for part in parts:
                if part.entry.get("site"):
                    return str(part.entry["site"])
        return ""


@dataclass
class Comparison:
    """The result of a comparison: the first difference, or None; and the number of comparisons.

    errors: the largest relative distance by kind of tensor, where bits may differ. weights: {name:
    relative distance of a weight after the step}.
    """

    first: Difference | None
    compared: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    left_out: list[Key] = field(default_factory=list)


def compare(one: Side, other: Side, allowed: Allowed, to_end: bool = False) -> Comparison:
    """Return the first difference between two sides. to_end: measure the later tensors, too."""
    found = Comparison(None)
    comparer = _Comparer(one, other, allowed, found)
    for step in STEPS:
        for difference in step(comparer):
            found.first = found.first or difference
            if not to_end:
                return found
    return found


class _Comparer:
    """Compares two sides within their tolerances, and counts the comparisons."""

    def __init__(self, one: Side, other: Side, allowed: Allowed, found: Comparison) -> None:
        self.one, self.other, self.allowed, self.found = one, other, allowed, found
        self.sizes: dict[tuple[str, str], float] = {}  # the largest norm of a kind
        self.dtypes = {one.dtype, other.dtype}  # a gradient is as exact as these
        self.begin = _Far()  # of the weights with which the step begins
        self.gradient = _Far()
        self.gradients: dict[str, float] = {}  # relative distances of single ones
        # of sizes that may be right on these layouts: reported if nothing else differs
        self.unplaced: list[Difference] = []

    def limit(self, *tensors: Tensor, begin: float | None = None) -> float:
        """Return the relative tolerance of tensors whose bits may differ.

        begin: the tolerance beyond that of the dtype; None: the growth during the step of the
        distance of the weights with which it begins.
        """
        dtypes = {str(x.dtype).removeprefix("torch.") for x in tensors} | self.dtypes
        more = GROWS * self.begin.share if begin is None else begin
        return max(TOLERANCE.get(dtype, 0.0) for dtype in dtypes) + more

    def unlike(
        self, key: Key, a: Tensor, b: Tensor, exact: bool, begin: float | None = None
    ) -> float:
        """Return the relative distance of two tensors if it is not allowed, else 0.

        begin: see `limit`.
        """
        self.found.compared += 1
        if exact:
            return 0.0 if same_bits(a, b) else max(distance(a, b), 1e-300)
        norm, kind = float(a.double().norm()), (key.kind or key.group, key.phase)
        self.sizes[kind] = max(self.sizes.get(kind, 0.0), norm if norm == norm else 0.0)
        error = distance(a, b, FLOOR * self.sizes[kind])
        self.note(kind[0], error)
        return error if not error <= self.limit(a, b, begin=begin) else 0.0

    def differ(
        self,
        key: Key,
        one: JoinedTensor,
        other: JoinedTensor,
        exact: bool,
        tensor: str = "",
        begin: float | None = None,
        parts: tuple[list[Part], list[Part]] | None = None,
    ) -> Iterator[Difference]:
        """Yield the difference of two whole tensors, if there is one: between the sides, between
        the replicas of the other side, or a part that no rank of the other side has. parts: if not
        all of the key.
        """
        error = self.unlike(key, one.values, other.values, exact, begin)
        limit = 0.0 if exact else self.limit(other.values, begin=begin)
        replicas = not error and other.distances > limit >= one.distances
        if error or replicas or other.missing:
            far = other.distances if replicas else error
            yield Difference(
                key, one.values, other.values, far, parts or self.pair(key), tensor=tensor,
                replicas=replicas, joined_tensors=(one, other),
            )  # fmt: skip

    def note(self, kind: str, error: float) -> None:
        """Record the largest distance of a kind."""
        self.found.errors[kind] = max(error, self.found.errors.get(kind, 0.0))

    def keys(self, chosen: Callable[[Key], bool]) -> Iterator[Key]:
        """Yield the keys that both sides have, in the order of the step; record the others."""
        every = dict.fromkeys([*self.one.parts, *self.other.parts])
        both = [k for k in every if k in self.one.parts and k in self.other.parts and chosen(k)]
        self.found.left_out += [k for k in every if chosen(k) and k not in both]
        yield from sorted(both, key=lambda k: self.one.order[k])

    def pair(self, key: Key) -> tuple[list[Part], list[Part]]:
        """Return both sides' parts of a key."""
        return self.one.parts[key], self.other.parts[key]


class _Far:
    """The distance of all tensors of a kind together."""

    def __init__(self) -> None:
        self.off = self.size = 0.0

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add a pair."""
        if a.shape == b.shape:
            self.off += float((a.double() - b.double()).nan_to_num(0.0).square().sum())
            self.size += float(a.double().nan_to_num(0.0).square().sum())

    @property
    def share(self) -> float:
        """Return the distance of all, relative to their norm."""
        return math.sqrt(self.off / self.size) if self.size else 0.0


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same bits; zeros of either sign are the same."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if torch.equal(a, b):
        return True
    both = a.isnan() & b.isnan() if a.is_floating_point() else torch.zeros(())
    return bool(both.any()) and torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))


def _batch(comparer: _Comparer) -> Iterator[Difference]:
    names = ("samples", "tokens of a sample", "first sample")
    sizes = ((side.rows, side.length, side.first) for side in (comparer.one, comparer.other))
    for name, a, b in zip(names, *sizes, strict=True):
        if a != b:
            yield Difference(Key("batch", "", name), a, b, error=float("inf"))
    for key in comparer.keys(lambda k: k.group == "batch"):
        one, other = comparer.one.activation(key), comparer.other.activation(key)
        assert one is not None and other is not None
        yield from comparer.differ(key, one, other, True)


def _parameters(
    comparer: _Comparer, kinds: tuple[str, ...] | None, when: str, exact: bool
) -> Iterator[Difference]:
    """Compare parameters of some kinds, or of all others that hold the optimizer's state."""
    known = ("weight", "master", "own gradient", "gradient")
    keys = comparer.keys(
        lambda k: k.group == "parameter" and k.phase == when
        and (k.kind in kinds if kinds else k.kind not in known)
    )  # fmt: skip
    for key in keys:
        yield from _of_parameter(
            comparer, key, exact, comparer.one.parameter, comparer.other.parameter
        )


def _of_parameter(
    comparer: _Comparer,
    key: Key,
    exact: bool,
    read: Callable[[Key], Mapping[str, JoinedTensor]],
    read_other: Callable[[Key], Mapping[str, JoinedTensor]],
) -> Iterator[Difference]:
    ours, theirs = read(key), read_other(key)
    for name, one in ours.items():
        other = theirs.get(name)
        if other is None:
            continue
        begin = _begin(comparer, key, name, one)
        if not exact:
            _note(comparer, key, name, one.values, other.values)
        yield from comparer.differ(key, one, other, exact, tensor=name, begin=begin)


def _begin(comparer: _Comparer, key: Key, name: str, one: JoinedTensor) -> float | None:
    """Return a weight's tolerance beyond that of its dtype; None if the key is not of weights."""
    if key.kind not in WEIGHTS:
        return None
    distances = comparer.allowed.distances
    begin = distances.get(name, distances.get("", 0.0))
    if key.phase == "before":
        return begin
    was = comparer.one.parameter(key._replace(phase="before")).get(name)
    moved = 1.0 if was is None else distance(was.values, one.values)
    gradient = max(comparer.gradient.share, min(comparer.gradients.get(name, 0.0), 1.0))
    return begin + after_rounding(gradient) * moved


def _note(comparer: _Comparer, key: Key, name: str, a: Tensor, b: Tensor) -> None:
    """Record distances of weights and gradients, on which later tolerances depend."""
    if key.kind in WEIGHTS and key.phase == "before":
        comparer.begin.add(a, b)
    elif key.kind in WEIGHTS:
        comparer.found.weights[name] = distance(a, b)
    elif key.kind == "gradient":
        comparer.gradient.add(a, b)
        comparer.gradients[name] = distance(a, b)


def _before(comparer: _Comparer) -> Iterator[Difference]:
    yield from _of_one_side(comparer, "weight", "before")
    exact = comparer.allowed.exact or comparer.allowed.begins
    for kinds in (("master",), ("weight",), None):
        yield from _parameters(comparer, kinds, "before", exact)


def _of_one_side(comparer: _Comparer, kind: str, when: str = "") -> Iterator[Difference]:
    """Yield a difference for each parameter of which only one side has a tensor of a kind."""
    of = ("parameter", kind, when)
    for key in _alone(comparer, lambda k: (k.group, k.kind, k.phase) == of):
        here, there = (key in side.parts for side in (comparer.one, comparer.other))
        yield Difference(key, here, there, float("inf"), tensor=key.name)


def _alone(comparer: _Comparer, chosen: Callable[[Key], bool]) -> list[Key]:
    """Return the keys that only one side has."""
    ours, theirs = comparer.one.parts, comparer.other.parts
    return [k for k in {**ours, **theirs} if chosen(k) and not (k in ours and k in theirs)]


def _activations(comparer: _Comparer, keys: list[Key]) -> Iterator[Difference]:
    for key in keys:
        if key.group == "collective":
            yield from _by_rank(comparer, key)
        elif key.group == "parameter":
            side = comparer.one.own_total, comparer.other.own_total
            yield from _of_parameter(comparer, key, comparer.allowed.exact, *side)
        else:
            yield from _activation(comparer, key)


def _activation(comparer: _Comparer, key: Key) -> Iterator[Difference]:
    stages = [{part.entry["stage"] for part in parts} for parts in comparer.pair(key)]
    if not key.name and stages[0] != stages[1]:  # the model itself, whose stages differ
        comparer.found.left_out.append(key)
        return
    one = comparer.one.activation(key)
    other = comparer.other.activation(key, None if one is None else one.values.shape)
    if one is not None and other is not None and one.values.shape != other.values.shape:
        again = comparer.one.activation(key, other.values.shape)  # neither has all of it
        one = again if again is not None else one
    if one is None or other is None:
        placed = comparer.other.activation(key) is not None  # but no joined ranks have the shape
        if one is not None and comparer.other.sizes["tp"] > 1 and placed:
            pair = comparer.pair(key)
            a, b = (some[0].entry["shape"] for some in pair)
            found = Difference(key, a, b, float("inf"), pair)
            if a[-1:] in (b[-1:], [comparer.other.sizes["tp"] * n for n in b[-1:]]):
                yield found
            else:  # neither the full tensor nor a shard of it, as where a block carries both
                comparer.unplaced.append(found)
        elif len(stages[0]) == 1:
            yield from _by_rank(comparer, key)
        else:  # the model itself, whose stages have different outputs
            comparer.found.left_out.append(key)
        return
    yield from comparer.differ(key, one, other, comparer.allowed.exact)


def _by_rank(comparer: _Comparer, key: Key) -> Iterator[Difference]:
    """Compare each rank's tensors, if the sides have the same ranks: those of a collective, or
    those that have no places in the batch, such as the rows of an expert.
    """
    ours, theirs = (
        {(p.rank, p.entry["micro_batch"]): p for p in parts} for parts in comparer.pair(key)
    )
    if comparer.one.sizes != comparer.other.sizes or ours.keys() != theirs.keys():
        comparer.found.left_out.append(key)
        return
    for at, part in ours.items():
        one, other = JoinedTensor(part.values()), JoinedTensor(theirs[at].values())
        exact, pair = comparer.allowed.exact, ([part], [theirs[at]])
        yield from comparer.differ(key, one, other, exact, parts=pair)


def _forward(comparer: _Comparer) -> Iterator[Difference]:
    kinds = ("activation", "collective")
    keys = list(comparer.keys(lambda k: k.group in kinds and k.phase == "forward"))
    alone = set(_alone(comparer, _runs))
    order = {**comparer.other.order, **comparer.one.order}
    for key in sorted([*keys, *alone], key=lambda k: order[k]):
        if key not in alone:
            yield from _activations(comparer, [key])
            continue
        parts = (comparer.one.parts.get(key, []), comparer.other.parts.get(key, []))
        yield Difference(key, bool(parts[0]), bool(parts[1]), error=float("inf"), parts=parts)


def _runs(key: Key) -> bool:
    """Return whether a key is the first output of a module: in any layout each module has one."""
    output = key.group == "activation" and key.kind == "output" and key.phase == "forward"
    return output and bool(key.name) and key.call == 1 and not key.item


def _number(name: str, alone: bool = True) -> Callable[[_Comparer], Iterator[Difference]]:
    """Return a function that compares a number. alone: also if only one side has it."""

    def step(comparer: _Comparer) -> Iterator[Difference]:
        key, a, b = (
            Key("number", "", name),
            comparer.one.numbers.get(name),
            comparer.other.numbers.get(name),
        )
        if a is None or b is None:
            if a != b and alone:
                yield Difference(key, a, b, error=float("inf"))
            return
        one, other = (torch.tensor(v, dtype=torch.float64) for v in (a, b))
        exact = comparer.allowed.exact or "rate" in name
        error = 0.0 if exact and same_bits(one, other) else distance(one, other)
        comparer.note(name, error)
        limit = comparer.limit(begin=GROWS_ALL * comparer.begin.share)
        if error > (0.0 if exact else limit):
            yield Difference(key, a, b, error=error)

    return step


def _backward(comparer: _Comparer) -> Iterator[Difference]:
    """Compare gradients of activations and weights in their order, with recomputed forwards."""
    kinds = ("activation", "collective")
    keys = list(comparer.keys(lambda k: k.group in kinds and k.phase != "forward"))
    own = list(comparer.keys(lambda k: k.group == "parameter" and k.kind == "own gradient"))

    def when(key: Key) -> tuple[Any, ...]:
        if key.group != "parameter":
            return comparer.one.order[key]
        at = comparer.one.ready.get(key.name)
        return comparer.one.order[key] if at is None else (0, *at[1:])  # as if of micro-batch 0

    yield from _activations(comparer, sorted([*keys, *own], key=when))


def _sums(comparer: _Comparer) -> Iterator[Difference]:
    yield from _of_one_side(comparer, "gradient")  # a frozen weight has none
    yield from _parameters(comparer, ("gradient",), "", comparer.allowed.exact)


def _unplaced(comparer: _Comparer) -> Iterator[Difference]:
    yield from comparer.unplaced


def _after(comparer: _Comparer) -> Iterator[Difference]:
    for kinds in (None, ("master",), ("weight",)):  # in the order of an update
        yield from _parameters(comparer, kinds, "after", comparer.allowed.exact)


STEPS = (
    _batch, _before, _forward, _number("auxiliary loss", alone=False), _number("loss"), _backward,
    _sums, _number("factor of the mask"), _number("gradient norm"), _number("learning rate"),
    _number("decoupled learning rate"), _after, _unplaced,
)  # fmt: skip


def allowed(one: Mapping[str, Any], other: Mapping[str, Any]) -> Allowed:
    """Return the allowed differences of two runs, from all their settings by dotted name."""
    unlike = [name for name in OF_THE_LAYOUT if one.get(name) != other.get(name)]
    zero = "parallel.zero_stage"
    each = [side.get("parallel.zero_reduce_each_microbatch") for side in (one, other)]
    if any(each) and one.get(zero) != other.get(zero):
        unlike.append(zero)
    if "parallel.world_size" in unlike:  # only the number of pipeline ranks may differ
        stages = "parallel.pipeline_model_parallel_size"
        ranks = [side.get("parallel.world_size", 1) // side.get(stages, 1) for side in (one, other)]
        if ranks[0] == ranks[1]:
            unlike.remove("parallel.world_size")
    return Allowed(not unlike)
