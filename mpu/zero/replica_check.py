# SPDX-License-Identifier: Apache-2.0
"""Compare replicas, which must be equal bit for bit, to detect a bit flip on one rank.

    replicas                                 on the ranks of
    whole weights (stages 0 to 2)            dp_cp; edp, where ep cuts them
    sharded weights (stage 3)                dp_cp_replicate: one in each optimizer instance; edp's
    masters and moments, stage 0             as whole weights
    masters and moments, later stages        as sharded weights
    weights replicated over tp (norms)       tp too, with their masters and moments
    tied embeddings                          embd too, with their masters and moments

Each rank digests each parameter of each kind (`digest_of`), and the digests, 8 bytes each, are
gathered: one small collective per axis, and one over all ranks to determine whether any two differ.
Data that only one rank holds (a shard of stage 1 to 3 without instances) has no replica: flips in
it are not detected here.
"""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpu.comm.collectives import all_gather, gather_bytes, sum_in_order
from mpu.comm.transport import Axis, Label
from mpu.grid import DATA, Grid
from mpu.param import placement_of
from mpu.zero.digest import digest_of

REPLICATED = (
    "dp_cp", "dp_cp_replicate", "edp", "edp_replicate", "tp", "ep", "embd"
)  # axes whose ranks hold replicas, in the order of their collectives  # fmt: skip


class Difference(NamedTuple):
    """Replicas of one tensor that differ: the ranks that may be wrong, and all ranks' hashes."""

    suspects: tuple[int, ...]  # the ranks outside a majority, or all if there is none
    what: str  # parameter and kind
    hashes: dict[int, int]  # by global rank

    def __str__(self) -> str:
        who = " or ".join(f"rank {rank}" for rank in self.suspects)
        return f"{self.what} differs on {who} of the ranks {sorted(self.hashes)} that hold it"


class ReplicaCheck:
    """Compares the replicas of one run. optimizer: mpu.optim.optimizer.Optimizer.

    exact: whether replicas over tp are equal even without a sum that makes them so; False with
    kernels whose results differ from run to run.
    """

    def __init__(self, grid: Grid, optimizer: Any, exact: bool = True) -> None:
        self.grid, self.optimizer, self.exact = grid, optimizer, exact

    def tensors(self) -> Iterator[tuple[str, str, Tensor, tuple[Axis, ...]]]:
        """Yield (parameter, kind, values, axes whose ranks hold replicas) of replicated tensors."""
        sink, grid = self.optimizer.sink, self.grid
        sink.wait_for_weights()
        params = {name: p for bucket in sink.weight_buckets for name, p, _ in bucket.params}
        found = [
            (name, "weight", param.data, grid.data(bucket.layout.sharing.cut).every)
            for bucket in sink.weight_buckets
            if not bucket.sharded
            for name, param, _ in bucket.params
        ]
        shared = [(name, "weight", v) for name, _, _, v in self.optimizer.named_weights()]
        shared += [(name, kind, v) for name, kind, _, v in self.optimizer.named_state()]
        found += [(name, kind, v, sink.holders(params[name])) for name, kind, v in shared]
        for name, kind, values, data in found:
            axes = [data, *self._holders(params[name])]
            several = tuple(axis for axis in axes if axis.size > 1)
            if several:
                yield name, kind, values, several

    def _holders(self, param: Any) -> list[Axis]:
        """Return the axes of this grid, connected, over which a parameter is replicated."""
        place = placement_of(param)
        summed = {axis.name for axis in place.reduce_axes}
        names = [axis.name for axis in place.holders]
        exact = [name for name in names if self.exact or name in summed or name not in DATA]
        return [getattr(self.grid, name) for name in exact]

    @torch.no_grad()
    def hashes(self) -> dict[str, list[tuple[str, Tensor]]]:
        """Return, for each axis with replicas, (parameter and kind, hash) in a fixed order."""
        rows: dict[str, list[tuple[str, Tensor]]] = {}
        for name, kind, values, axes in self.tensors():
            value = digest_of(values)
            for axis in axes:
                rows.setdefault(axis.name, []).append((f"{name} ({kind})", value))
        return rows

    def run(self) -> list[Difference]:
        """Compare, on every rank; return the differences, surest first, the same on all ranks."""
        label = Label(self, "replica check")
        device = self.optimizer.sink.device
        rows, seen = self.hashes(), []
        for name in REPLICATED:
            axis: Axis = getattr(self.grid, name)
            if axis.size == 1 or name not in rows:
                continue
            named = rows[name]
            own = torch.stack([value.to(device) for _, value in named])
            every = all_gather(own[None], axis, label=label)[0]
            seen.append((axis, named, every))
        wrong = [(every != every[0]).any() for _, _, every in seen]
        flag = torch.stack(wrong).any() if wrong else torch.zeros((), device=device)
        if not sum_in_order(flag.double(), self.grid.world, label).item():
            return []
        found = []
        for axis, named, every in seen:
            for column in (every != every[0]).any(0).nonzero()[:, 0].tolist():
                hashes = dict(zip(axis.ranks, every[:, column].tolist(), strict=True))
                found.append((named[column][0], hashes))
        texts = gather_bytes(json.dumps(found).encode(), self.grid.world, device)
        rows_of_all = [
            (what, {int(rank): value for rank, value in hashes.items()})
            for text in texts
            for what, hashes in json.loads(text)
        ]
        return verdict(rows_of_all)


def verdict(rows: list[tuple[str, dict[int, int]]]) -> list[Difference]:
    """Return the suspects for rows of (tensor, hashes by rank) that differ, surest first.

    In a row with a majority the other ranks are wrong. Otherwise any of its ranks may be wrong,
    unless another row of the same tensor, over another axis, narrows them down.
    """
    unique = {(what, tuple(sorted(hashes.items()))): hashes for what, hashes in rows}
    judged = []
    for (what, _), hashes in unique.items():
        (value, count), *_ = Counter(hashes.values()).most_common()
        sure = 2 * count > len(hashes)
        wrong = {rank for rank, own in hashes.items() if own != value or not sure}
        judged.append((what, wrong, hashes))
    found = []
    for what, wrong, hashes in judged:
        for other, theirs, _ in judged:
            if other == what and wrong & theirs:
                wrong = wrong & theirs
        found.append(Difference(tuple(sorted(wrong)), what, hashes))
    return sorted(found, key=lambda d: (len(d.suspects), d.what, d.suspects))
