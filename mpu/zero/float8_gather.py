# SPDX-License-Identifier: Apache-2.0
"""Gather weights in float8 (--fp8-param-gather), which are used in float8 alone.

    requantise    after an update: scales of this rank's parts, their maximum over all ranks, then
                  the codes of its parts
    gather        a bucket's codes from all ranks, a byte a number, under computation
    wait          its rows: codes and scales side by side, as layers multiply them

At stages 1 and 2 every bucket is gathered after an update; at stage 3 for each use. Such a bucket
keeps its part of the weights in their own dtype, as at stage 3; no rank has all of them. What a
scale is, and how rows are made, the layers say: each weight has `float8_rows` (WeightRows).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from mpu.comm.collectives import MAX, all_gather, all_reduce
from mpu.comm.transport import Axis, Handle, Label
from mpu.grid import DataAxes, Grid
from mpu.zero.bucket import ParamAndGradBucket

AGREE = Label("optimizer", "float8 scales")


class WeightRows(Protocol):
    """How one weight travels; see mpu/layers/float8/weights.py.

    shared: the ranks that cut the weight share its scales.
    """

    shared: bool
    count: int
    nbytes: int

    def scales(self, part: Tensor, first: int) -> Tensor: ...
    def codes(self, part: Tensor, first: int, scales: Tensor) -> Tensor: ...
    def rows(self, codes: Tensor, scales: Tensor, out: Tensor) -> Tensor: ...


def of_buckets(
    buckets: Sequence[ParamAndGradBucket], grid: Grid, at_once: bool
) -> list["Float8Gather"]:
    """Return what makes the codes of weights that travel in float8, one for each axis that cuts.

    at_once: gather codes when they are made; else for each use (mpu/zero/gather.py).
    """
    low = [bucket for bucket in buckets if bucket.layout.scales]
    cuts = dict.fromkeys(bucket.layout.sharing.cut for bucket in low)
    return [
        Float8Gather([b for b in low if b.layout.sharing.cut == cut], grid.data(cut), at_once)
        for cut in cuts
    ]


class Float8Gather:
    """The buckets of float8 that the same ranks share, and the scales of all their weights."""

    def __init__(
        self, buckets: Sequence[ParamAndGradBucket], axes: DataAxes, at_once: bool
    ) -> None:
        self.shard, self.cut, self.at_once = axes.shard, axes.cut, at_once
        self._shared = 0  # scales that the ranks of `cut` share come first
        how: dict[str, WeightRows] = {}
        for bucket in buckets:
            how |= {name: param.float8_rows for name, param, _ in bucket.params}  # type: ignore[attr-defined]
        total, at = 0, dict[str, slice]()
        for name in sorted(how, key=lambda name: not how[name].shared):
            at[name] = slice(total, total := total + how[name].count)
            if how[name].shared:
                self._shared = total
        device = buckets[0].param_shard.device
        self.scales = torch.zeros(total, dtype=torch.uint8, device=device)
        self.buckets: list[Float8Bucket] = []
        for bucket in buckets:
            scales = {name: self.scales[at[name]] for name, _, _ in bucket.params}
            self.buckets.append(Float8Bucket(bucket, self.shard, how, scales))
            bucket.float8 = self.buckets[-1]

    @torch.no_grad()
    def requantise(self) -> None:
        """Make the codes of this rank's parts, after they changed. All ranks do it together."""
        self.scales.zero_()
        for bucket in self.buckets:
            bucket.make_scales()
        all_reduce(self.scales, self.shard, op=MAX, label=AGREE)
        if self._shared:
            all_reduce(self.scales[: self._shared], self.cut, op=MAX, label=AGREE)
        for bucket in self.buckets:
            bucket.make_codes()
        for bucket in reversed(self.buckets if self.at_once else []):
            bucket.gather()


class Float8Bucket:
    """The weights of one bucket in float8.

    codes: of the owned part. scales: of each weight, views of the scales of all buckets. rows: of
    each weight, while they are whole.
    """

    def __init__(
        self,
        bucket: ParamAndGradBucket,
        shard: Axis,
        how: Mapping[str, WeightRows],
        scales: Mapping[str, Tensor],
    ) -> None:
        self.bucket, self.shard, self.how, self.scales = bucket, shard, how, scales
        own = bucket.param_shard
        self.codes = torch.zeros(len(own), dtype=torch.uint8, device=own.device)
        self.rows: dict[nn.Parameter, Tensor] = {}

    def persistent_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that stay from step to step."""
        yield self.codes
        yield from self.scales.values()

    def _parts(self) -> Iterator[tuple[str, Tensor, int, slice]]:
        """Yield name, elements and first element of each part, and where its codes stand."""
        bucket = self.bucket
        for name, low, high, start in bucket.owned():
            into = slice(low - bucket.low, high - bucket.low)
            yield name, bucket.param_shard[into], low - start, into

    def make_scales(self) -> None:
        """Write the scales of this rank's parts; the ranks' maximum is the weight's."""
        for name, part, first, _ in self._parts():
            self.scales[name].copy_(self.how[name].scales(part, first))

    def make_codes(self) -> None:
        """Make the codes of this rank's parts by the scales that the ranks agreed on."""
        for name, part, first, into in self._parts():
            self.codes[into] = self.how[name].codes(part, first, self.scales[name])

    def gather(self, async_op: bool = True) -> None:
        """Start the gather of the codes; wait for `bucket.gathering` before their use."""
        bucket = self.bucket
        bucket.gathering.wait()
        bucket.weights = flat = self.codes.new_empty(bucket.length)
        label = Label(bucket, "gather")
        _, handle = all_gather(self.codes, self.shard, async_op, into=flat, label=label)
        bucket.gathering = _Arrival(handle, self)

    def fill_rows(self) -> None:
        """Make the rows of the weights, in memory of their own; drop the flat codes."""
        bucket = self.bucket
        assert (flat := bucket.weights) is not None
        bucket.weights, at = flat.new_empty(bucket.layout.rows), 0
        for name, param, start in bucket.params:
            codes, how = flat[start : start + param.numel()], self.how[name]
            out = bucket.weights[at : (at := at + how.nbytes)]
            self.rows[param] = how.rows(codes, self.scales[name], out)


class _Arrival(Handle):
    """The gather of a bucket's codes: after the first wait the bucket has rows."""

    def __init__(self, inner: Handle, gathered: Float8Bucket) -> None:
        super().__init__()
        self._inner, self._gathered = inner, gathered
        self._arrived = False

    def wait(self) -> None:
        """Wait for the codes, and make rows of them once. Raises CommunicationError."""
        if not self._arrived:
            self._inner.wait()
            self._arrived = True
            with torch.no_grad():
                self._gathered.fill_rows()
