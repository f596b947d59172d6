# SPDX-License-Identifier: Apache-2.0
"""Lay a rank's parameters out in flat buckets: how they are shared, and where each stands.

Pure arithmetic, the same on every data-parallel rank. One collective moves a bucket, and the
data-parallel ranks share it equally. Parameters stand in reverse definition order, which is about
the order in which backward finishes them, each at a multiple of BLOCK elements. A bucket's length
is a multiple of BLOCK times the number of ranks, so that a share is whole blocks. A bucket has

    stages 0 to 2   parameters of one pipeline chunk, until there are `size` elements
    stage 3         parameters of one transformer block, or neighbours outside of any block
    last            parameters whose gradient is summed over another axis too (tied embeddings over
                    the ends of a pipeline, norms under sequence parallelism), one bucket an axis
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from mpu.param import group_of, placement_of

BLOCK = 1024  # elements; also the unit of the global norm
SMALLEST, LARGEST = 1 << 21, 40_000_000  # elements of an automatic bucket


@dataclass(frozen=True)
class ZeroConfig:
    """How gradients and weights are shared among data-parallel ranks.

    bucket_size: elements a bucket, about; 0: automatic. overlap_grad_reduce: sum a bucket during
    backward; else all after it. overlap_param_gather: gather weights under the computation before
    them. reduce_each_micro_batch: sum after every micro-batch, not once a step (stages 2 and 3;
    other bits). grad_reduce_dtype: the dtype in which gradients travel. main_grads_dtype: the dtype
    of a rank's own sum over its micro-batches. None for either means the accumulation dtype.
    keep_unsharded: at stage 3 weights stay whole from their first use in a step to their last
    (pipelines, whose chunks take turns).
    """

    zero_stage: int = 0
    bucket_size: int = 0
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = False
    reduce_each_micro_batch: bool = False
    grad_reduce_dtype: torch.dtype | None = None
    main_grads_dtype: torch.dtype | None = None
    keep_unsharded: bool = False


class ParamEntry(NamedTuple):
    """One parameter of this rank.

    chunk: its pipeline chunk. axes: those beside dp_cp over which its gradient is summed. rows,
    scales: bytes of what it becomes, where it travels in float8 (mpu/zero/float8_gather.py).
    matrix: it has two dimensions. group: the group that the model puts it in, for the optimizer.
    """

    name: str
    numel: int
    chunk: int = 0
    axes: tuple[str, ...] = ()
    rows: int = 0
    scales: int = 0
    matrix: bool = False
    group: str = ""


def entries_of(
    named: Iterable[tuple[str, nn.Parameter]], chunk_of: Callable[[str], int] = lambda name: 0
) -> list[ParamEntry]:
    """Return a module's parameters as `make_buckets` takes them, in definition order.

    named: module.named_parameters(). chunk_of(name): the pipeline chunk of a parameter.
    """
    found = []
    for name, param in named:
        axes = tuple(axis.name for axis in placement_of(param).reduce_axes if axis.size > 1)
        how = getattr(param, "float8_rows", None)
        rows, scales = (how.nbytes, how.count) if how else (0, 0)
        chunk, matrix = chunk_of(name), param.dim() > 1
        found.append(
            ParamEntry(
                name=name,
                numel=param.numel(),
                chunk=chunk,
                axes=axes,
                rows=rows,
                scales=scales,
                matrix=matrix,
                group=group_of(param),
            )
        )
    return found


class BucketLayout(NamedTuple):
    """One bucket: (name, offset, numel) of its parameters, and its padded length in elements.

    rows, scales: sums of its parameters'; 0 unless it travels in float8. whole: its weights stay
    whole at stage 3. groups: those of its parameters.
    """

    params: tuple[tuple[str, int, int], ...]
    length: int
    axes: tuple[str, ...] = ()
    rows: int = 0
    scales: int = 0
    whole: bool = False
    groups: tuple[str, ...] = ()

    def wire(self, size: int) -> int:
        """Return the bytes of its weights on the wire; size: of an element that is not float8."""
        return self.length * (1 if self.scales else size)

    @property
    def by_use(self) -> bool:
        """Return whether its weights are gathered for each use at stage 3."""
        return not self.axes and not self.whole

    def runs(self) -> list[tuple[int, int, str]]:
        """Return [low, high) and group of each run of parameters of one group, padding included."""
        found: list[tuple[int, int, str]] = []
        for (_, start, _), group in zip(self.params, self.groups, strict=True):
            if found and found[-1][2] == group:
                continue
            if found:
                found[-1] = (found[-1][0], start, found[-1][2])
            found.append((start, self.length, group))
        return found


def automatic_size(largest: int) -> int:
    """Return a bucket's size: an eighth of the `largest` rank's elements, within bounds."""
    return max(SMALLEST, min(LARGEST, largest // 8))


def block_of(name: str) -> str:
    """Return the transformer block of a parameter ("layers.3"), or "" outside of any."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), -1)
    return ".".join(parts[: at + 1])


def make_buckets(
    entries: Sequence[ParamEntry], size: int, ranks: int, zero_stage: int = 0
) -> list[BucketLayout]:
    """Put parameters, given in definition order, into buckets, in the order of their sums.

    size: elements a bucket, about. ranks: the data-parallel ranks, over all of which a bucket is
    padded to whole blocks. At stage 0, and where gradients are summed over another axis, weights
    do not travel in float8.
    """
    by_block = zero_stage == 3
    plain = [entry._replace(rows=0, scales=0) for entry in entries]
    pairs = zip(entries, plain, strict=True)
    entries = [low if low.axes or not zero_stage else entry for entry, low in pairs]
    groups: list[list[ParamEntry]] = []
    apart: dict[tuple[str, ...], list[ParamEntry]] = {}
    latest: dict[str, list[ParamEntry]] = {}  # the group that a kind of parameters adds to
    whole = whole_beside(entries) if by_block else set()
    ordered = sorted(reversed(entries), key=lambda e: -e.chunk)
    for entry in ordered:
        if entry.axes:
            apart.setdefault(entry.axes, []).append(entry)
            continue
        kind = "whole" if entry.name in whole else "rows" if entry.scales and not by_block else ""
        group = latest.get(kind, [])
        other = group and group[-1].chunk != entry.chunk
        if by_block and kind != "whole":
            other = other or (group and block_of(group[-1].name) != block_of(entry.name))
        if not group or other or (not by_block and sum(e.numel for e in group) >= size):
            latest[kind] = []
            groups.append(latest[kind])
        latest[kind].append(entry)
    at = {entry.name: i for i, entry in enumerate(ordered)}
    groups.sort(key=lambda group: at[group[-1].name])  # a bucket leaves with its last parameter
    laid = [_layout_of(group, ranks, group[0].name in whole) for group in groups]
    return laid + [_layout_of(apart[axes], ranks) for axes in sorted(apart, key=_tp_last)]


def whole_beside(entries: Sequence[ParamEntry]) -> set[str]:
    """Return the vectors beside weights in float8, which stay whole at stage 3.

    Raises ValueError where a plain matrix stands beside them: it would be gathered alone, and free
    the others meanwhile.
    """
    blocks = {block_of(entry.name) for entry in entries if entry.scales}
    beside = [e for e in entries if block_of(e.name) in blocks and not e.axes and not e.scales]
    for entry in beside:
        if entry.matrix:
            raise ValueError(
                f"--fp8-param-gather at --zero-stage 3: {entry.name} is not in float8, and "
                "other weights of its block are; leave the flag out, or take a lower stage"
            )
    return {entry.name for entry in beside}


def _tp_last(axes: tuple[str, ...]) -> tuple[bool, tuple[str, ...]]:
    """Return a sort key, the same on every rank, that puts buckets summed over tp last."""
    return "tp" in axes, axes


def _layout_of(group: Sequence[ParamEntry], ranks: int, whole: bool = False) -> BucketLayout:
    offset, params = 0, []
    for entry in group:
        params.append((entry.name, offset, entry.numel))
        offset += -(-entry.numel // BLOCK) * BLOCK
    grain = BLOCK * ranks
    rows, scales = sum(e.rows for e in group), sum(e.scales for e in group)
    length, axes = -(-offset // grain) * grain, group[0].axes
    groups = tuple(entry.group for entry in group)
    return BucketLayout(
        tuple(params), length, axes=axes, rows=rows, scales=scales, whole=whole, groups=groups
    )


def gaps(layout: BucketLayout) -> list[tuple[int, int]]:
    """List the padding [low, high) between a bucket's parameters and after the last."""
    ends = [offset + numel for _, offset, numel in layout.params]
    starts = [offset for _, offset, _ in layout.params[1:]] + [layout.length]
    return [(low, high) for low, high in zip(ends, starts, strict=True) if low < high]


def memory(
    layouts: Sequence[BucketLayout],
    zero_stage: int,
    ranks: int,
    weight: int,
    gradient: int,
    accumulate: int,
    state: Mapping[str, int],
    rank: int | None = None,
) -> dict[str, int]:
    """Return the bytes that one rank keeps from step to step, the padding of buckets included.

    ranks: how many share a bucket. weight, gradient, accumulate: bytes of an element of a weight,
    of a main gradient, and of a sum or master. state: bytes that the optimizer keeps for an element
    of each group, s. rank: of those that share a bucket; None: the one with most state. With L
    elements in all and share = L/ranks:

        stage         0           1                     2                  3
        parameters    L weight    L weight              L weight           share weight
        gradients     L gradient  L gradient            share accumulate   share accumulate
        masters       L acc.      share accumulate, where a weight is narrower than that
        moments       L s         share s

    Where main gradients are narrower, stage 1 also has share accumulate of sums. At stage 3 buckets
    that are summed over another axis keep whole weights (docs/design.md says why). Weights that
    travel in float8 are kept as at stage 3, with a byte more for each element of the share, the
    bytes of all scales and, at stages 1 and 2, of all rows.
    """
    elements, ranks = sum(layout.length for layout in layouts), ranks if zero_stage else 1
    own = elements // ranks
    kept = sum(layout.length for layout in layouts if layout.axes or layout.whole)
    low = sum(layout.length for layout in layouts if layout.scales)
    kept = kept if zero_stage == 3 else elements - low
    parameters = own + kept - kept // ranks
    gradients = own * accumulate if zero_stage >= 2 else elements * gradient
    if zero_stage == 1 and gradient < accumulate:
        gradients += own * accumulate
    coded = low // ranks + sum(layout.scales for layout in layouts)
    coded += sum(layout.rows for layout in layouts) if zero_stage < 3 else 0
    return {
        "parameters": parameters * weight + coded,
        "gradients": gradients,
        "masters": own * accumulate if weight < accumulate else 0,
        "moments": _state_bytes(layouts, ranks, state, rank if ranks > 1 else None),
    }


def _state_bytes(
    layouts: Sequence[BucketLayout], ranks: int, state: Mapping[str, int], rank: int | None
) -> int:
    if len(set(state.values())) == 1:  # then all ranks have the same
        return sum(layout.length for layout in layouts) // ranks * max(state.values())
    of_rank = [0] * ranks
    for layout in layouts:
        part = layout.length // ranks
        for low, high, group in layout.runs():
            for i in range(low // part, -(-high // part)):
                of_rank[i] += (min(high, (i + 1) * part) - max(low, i * part)) * state[group]
    return max(of_rank) if rank is None else of_rank[rank]
