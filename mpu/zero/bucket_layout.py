# SPDX-License-Identifier: Apache-2.0
"""Lay a rank's parameters out in flat buckets: how they are shared, and where each is.

Pure arithmetic, the same on every rank that shares a bucket. One collective moves a bucket. The
parameters of a bucket are cut over the same axis, so the same ranks hold the same part of them: a
bucket's gradients are summed over those ranks, which share it equally (Sharing). Parameters are in
reverse definition order, which is about the order in which backward finishes them, each at a
multiple of BLOCK elements. A bucket's length is a multiple of BLOCK times the number of ranks, so
that a share is whole blocks. A bucket has

    stages 0 to 2   parameters of one pipeline chunk, until there are `size` elements
    stage 3         parameters of one transformer block, or neighbours outside of any block
    late            parameters whose gradients come when backward is over (a deferred output layer)
    last            parameters whose gradient is summed over another axis too (tied embeddings over
                    the ends of a pipeline, norms under sequence parallelism), one bucket an axis

Frozen parameters (requires_grad is False) share buckets with one another alone. Such a bucket has
weights and nothing else. Below stage 3 no rank owns a part of it, as nobody updates it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from mpu.grid import DATA
from mpu.param import group_of, placement_of

BLOCK = 1024  # elements; also the unit of the global norm
SMALLEST, LARGEST = 1 << 21, 40_000_000  # elements of an automatic bucket


@dataclass(frozen=True)
class ZeroConfig:
    """How gradients and weights are shared among data-parallel ranks."""

    zero_stage: int = 0
    bucket_size: int = 0  # elements of a bucket, about; 0: automatic
    overlap_grad_reduce: bool = True  # reduce a bucket during backward; else all of them after it
    overlap_param_gather: bool = False  # prefetch weights during the computation before their use
    # reduce after every micro-batch, not once a step (stages 2 and 3; other bits)
    reduce_each_micro_batch: bool = False
    grad_reduce_dtype: torch.dtype | None = None  # dtype on the wire; None: the accumulation dtype
    # dtype of a rank's own accumulation over micro-batches; None: the accumulation dtype
    main_grads_dtype: torch.dtype | None = None
    # at stage 3 weights stay unsharded from their first use in a step to their last (pipelines,
    # whose chunks alternate)
    keep_unsharded: bool = False


class Sharing(NamedTuple):
    """Which ranks sum a bucket's gradients and share its state.

    cut: the axis that cuts its parameters. data: the axis of the ranks that hold the same part of
    them (mpu.grid.DATA), over which gradients are summed. ranks: how many these are. shard: how
    many of them share one instance of the state. zero_stage: in effect; 0 where nobody shares.
    """

    cut: str = "tp"
    data: str = DATA["tp"]
    ranks: int = 1
    shard: int = 1
    zero_stage: int = 0


def sharing_of(cut: str, ranks: int, shard: int, zero_stage: int) -> Sharing:
    """Return the sharing of what an axis of the grid cuts; zero_stage: that which is asked for."""
    return Sharing(cut, DATA[cut], ranks, shard, zero_stage if shard > 1 else 0)


class ParamEntry(NamedTuple):
    """One parameter of this rank.

    chunk: its pipeline chunk. axes: those over which its gradient is summed before the ranks that
    share it are. rows, scales: bytes of what it becomes, where it travels in float8
    (mpu/zero/float8_gather.py). agreed: the ranks of `cut` agree on these scales too. matrix: it
    has two dimensions. cut: the axis that cuts it. group: the group that the model puts it in, for
    the optimizer. late: its last gradient comes after those of all other parameters of the rank.
    frozen: it has no gradient. It is summed over no axes, then, and does not travel in float8.
    """

    name: str
    numel: int
    chunk: int = 0
    axes: tuple[str, ...] = ()
    rows: int = 0
    scales: int = 0
    matrix: bool = False
    cut: str = "tp"
    group: str = ""
    agreed: bool = False
    late: bool = False
    frozen: bool = False

    def as_frozen(self) -> "ParamEntry":
        """Return what a frozen parameter has of this."""
        return self._replace(axes=(), rows=0, scales=0, agreed=False, late=False, frozen=True)


def entries_of(
    named: Iterable[tuple[str, nn.Parameter]], chunk_of: Callable[[str], int] = lambda name: 0
) -> list[ParamEntry]:
    """Return a module's parameters as `make_buckets` takes them, in definition order.

    named: module.named_parameters(). chunk_of(name): the pipeline chunk of a parameter.
    """
    found = []
    for name, param in named:
        place = placement_of(param)
        axes = tuple(axis.name for axis in place.reduce_axes if axis.size > 1)
        how = getattr(param, "float8_rows", None)
        rows, scales = (how.nbytes, how.count) if how else (0, 0)
        chunk, matrix = chunk_of(name), param.dim() > 1
        entry = ParamEntry(
            name=name,
            numel=param.numel(),
            chunk=chunk,
            axes=axes,
            rows=rows,
            scales=scales,
            matrix=matrix,
            cut=place.axis.name,
            group=group_of(param),
            agreed=bool(how and how.shared),
            late=getattr(param, "late", False) and not axes,
        )
        found.append(entry if param.requires_grad else entry.as_frozen())
    return found


class BucketLayout(NamedTuple):
    """One bucket: (name, offset, numel) of its parameters, and its padded length in elements.

    axes: over which its gradients are summed before the ranks of `sharing`. rows, scales: sums of
    its parameters'; 0 unless it travels in float8. unsharded: its weights stay unsharded at stage
    3. groups: those of its parameters. late, frozen: as ParamEntry has them, of all of them.
    """

    params: tuple[tuple[str, int, int], ...]
    length: int
    axes: tuple[str, ...] = ()
    rows: int = 0
    scales: int = 0
    unsharded: bool = False
    sharing: Sharing = Sharing()
    groups: tuple[str, ...] = ()
    late: bool = False
    frozen: bool = False

    @property
    def own(self) -> int:
        """Return the elements that a rank owns: its share, at stage 0 all."""
        return self.length // self.sharing.shard if self.sharing.zero_stage else self.length

    def wire(self, size: int) -> int:
        """Return the bytes of its weights on the wire; size: of an element that is not float8."""
        return self.length * (1 if self.scales else size)

    @property
    def by_use(self) -> bool:
        """Return whether its weights are gathered for each use."""
        return self.sharing.zero_stage == 3 and not self.axes and not self.unsharded

    @property
    def sharded(self) -> bool:
        """Return whether a rank keeps its share of the weights alone."""
        return self.by_use or self.scales > 0

    def runs(self, separate: Collection[str] = ()) -> list[tuple[int, int, str]]:
        """Return [low, high) and group of each run of parameters of one group, padding included.

        Each parameter of the groups `separate` is a run of its own, without padding.
        """
        found: list[tuple[int, int, str]] = []
        ends = [start for _, start, _ in self.params[1:]] + [self.length]
        for (_, start, numel), group, end in zip(self.params, self.groups, ends, strict=True):
            if group in separate:
                found.append((start, start + numel, group))
            elif found and found[-1][2] == group:
                found[-1] = (found[-1][0], end, group)
            else:
                found.append((start, end, group))
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
    entries: Sequence[ParamEntry], size: int, sharing: Mapping[str, Sharing]
) -> list[BucketLayout]:
    """Put parameters, given in definition order, into buckets, in the order of their sums.

    size: elements a bucket, about. sharing: by the axis that cuts a parameter; a bucket is padded
    to whole blocks for each rank of it. At stage 0, and where gradients are summed over another
    axis, weights do not travel in float8.
    """
    stage = {cut: shared.zero_stage for cut, shared in sharing.items()}
    plain = [entry._replace(rows=0, scales=0) for entry in entries]
    pairs = zip(entries, plain, strict=True)
    entries = [low if low.axes or not stage[low.cut] else entry for entry, low in pairs]
    groups: list[list[ParamEntry]] = []
    summed_twice: dict[tuple[tuple[str, ...], str], list[ParamEntry]] = {}
    latest: dict[tuple[str, str, bool], list[ParamEntry]] = {}  # the group that a kind adds to
    unsharded = unsharded_vectors([entry for entry in entries if stage[entry.cut] == 3])
    ordered = sorted(reversed(entries), key=lambda e: (e.late, -e.chunk))
    for entry in ordered:
        if entry.axes:
            summed_twice.setdefault((entry.axes, entry.cut), []).append(entry)
            continue
        by_block = stage[entry.cut] == 3
        how = (
            "unsharded"
            if entry.name in unsharded
            else "rows"
            if entry.scales and not by_block
            else ""
        )
        kind = how, entry.cut, entry.frozen
        group = latest.get(kind, [])
        other = group and (group[-1].chunk, group[-1].late) != (entry.chunk, entry.late)
        if by_block and how != "unsharded":
            other = other or (group and block_of(group[-1].name) != block_of(entry.name))
        if not group or other or (not by_block and sum(e.numel for e in group) >= size):
            latest[kind] = []
            groups.append(latest[kind])
        latest[kind].append(entry)
    at = {entry.name: i for i, entry in enumerate(ordered)}
    groups.sort(key=lambda group: at[group[-1].name])  # a bucket leaves with its last parameter
    groups += [
        summed_twice[key]
        for key in sorted(summed_twice, key=lambda key: (_tp_last(key[0]), key[1]))
    ]
    return [
        _layout_of(group, sharing[group[0].cut], group[0].name in unsharded) for group in groups
    ]


def unsharded_vectors(entries: Sequence[ParamEntry]) -> set[str]:
    """Return the vectors of blocks with float8 weights, which stay unsharded at stage 3.

    Raises ValueError where such a block has a plain matrix: it would be gathered alone, and free
    the others meanwhile.
    """
    blocks = {block_of(entry.name) for entry in entries if entry.scales}
    vectors = [e for e in entries if block_of(e.name) in blocks and not e.axes and not e.scales]
    for entry in vectors:
        if entry.matrix:
            raise ValueError(
                f"--fp8-param-gather at --zero-stage 3: {entry.name} is not in float8, and "
                "other weights of its block are; omit the flag, or take a lower stage"
            )
    return {entry.name for entry in vectors}


def _tp_last(axes: tuple[str, ...]) -> tuple[bool, tuple[str, ...]]:
    """Return a sort key, the same on every rank, that puts buckets summed over tp last."""
    return "tp" in axes, axes


def _layout_of(group: Sequence[ParamEntry], sharing: Sharing, unsharded: bool) -> BucketLayout:
    offset, params, frozen = 0, [], group[0].frozen
    if frozen and (unsharded or sharing.zero_stage < 3):
        sharing = sharing._replace(zero_stage=0)
    for entry in group:
        params.append((entry.name, offset, entry.numel))
        offset += -(-entry.numel // BLOCK) * BLOCK
    grain = BLOCK * sharing.ranks
    rows, scales = sum(e.rows for e in group), sum(e.scales for e in group)
    length, axes = -(-offset // grain) * grain, group[0].axes
    return BucketLayout(
        tuple(params),
        length,
        axes,
        rows=rows,
        scales=scales,
        unsharded=unsharded,
        sharing=sharing,
        groups=tuple(entry.group for entry in group),
        late=group[0].late,
        frozen=frozen,
    )


def gaps(layout: BucketLayout) -> list[tuple[int, int]]:
    """List the padding [low, high) between a bucket's parameters and after the last."""
    ends = [offset + numel for _, offset, numel in layout.params]
    starts = [offset for _, offset, _ in layout.params[1:]] + [layout.length]
    return [(low, high) for low, high in zip(ends, starts, strict=True) if low < high]


def memory(
    layouts: Sequence[BucketLayout],
    weight: int,
    gradient: int,
    accumulate: int,
    state: Mapping[str, int],
    ranks: Mapping[str, int] | None = None,
    separate: Collection[str] = (),
) -> dict[str, int]:
    """Return the bytes that one rank keeps from step to step, the padding of buckets included.

    weight, gradient, accumulate: bytes of an element of a weight, of a main gradient, and of a sum
    or master. state: bytes that the optimizer keeps for an element, s, by group. ranks: the rank
    among those that share a bucket, by the axis that cuts it; None: the one with most state.
    separate: as BucketLayout.runs takes it. With L elements in a bucket and share = L/ranks:

        stage         0           1                     2                  3
        parameters    L weight    L weight              L weight           share weight
        gradients     L gradient  L gradient            share accumulate   share accumulate
        masters       L acc.      share accumulate, where a weight is narrower than that
        moments       L s         share s

    Where main gradients are narrower, stages 0 and 1 also have the sums: L or share accumulate. At
    stage 3 buckets that are summed over another axis keep unsharded weights (docs/design.md says
    why). Frozen parameters have weights alone, L below stage 3. Weights that travel in float8 are
    stored as at stage 3, with a byte more for each element of the share, the bytes of all scales
    and, at stages 1 and 2, of all rows.
    """
    kinds = dict.fromkeys(("parameters", "gradients", "masters", "moments"), 0)
    for layout in layouts:
        own, stage = layout.own, layout.sharing.zero_stage
        kinds["parameters"] += (own if layout.sharded else layout.length) * weight
        if layout.frozen:
            continue
        if layout.scales:
            kinds["parameters"] += own + layout.scales + (layout.rows if stage < 3 else 0)
        kinds["gradients"] += own * accumulate if stage >= 2 else layout.length * gradient
        if stage < 2 and gradient < accumulate:
            kinds["gradients"] += own * accumulate
        kinds["masters"] += own * accumulate if weight < accumulate else 0
    trained = [layout for layout in layouts if not layout.frozen]
    kinds["moments"] = _state_bytes(trained, state, ranks, separate)
    return kinds


def _state_bytes(
    layouts: Sequence[BucketLayout],
    state: Mapping[str, int],
    ranks: Mapping[str, int] | None,
    separate: Collection[str],
) -> int:
    if len(set(state.values())) == 1 and not separate:  # then all ranks have the same
        return sum(layout.own for layout in layouts) * max(state.values())
    shares: dict[str, list[int]] = {}  # of each rank that shares buckets, by the axis
    for layout in layouts:
        own = layout.own
        share = shares.setdefault(layout.sharing.cut, [0] * (layout.length // own))
        for low, high, group in layout.runs(separate):
            for i in range(low // own, -(-high // own)):
                share[i] += (min(high, (i + 1) * own) - max(low, i * own)) * state[group]
    if ranks is None:
        return sum(map(max, shares.values()))
    return sum(share[ranks[cut] if len(share) > 1 else 0] for cut, share in shares.items())
