# SPDX-License-Identifier: Apache-2.0
"""Gather weights in float8 (--fp8-param-gather), which are used in float8 alone.

    requantise    after an update: scales of this rank's parts, the maximum over all ranks of them,
                  then the codes of its parts
    gather        a bucket's codes from all ranks, a byte a number, under computation
    wait          its rows: codes and scales side by side, as layers multiply them

At stages 1 and 2 every bucket is gathered after an update; at stage 3 for each use. Such a bucket
keeps its part of the weights in their own dtype, as at stage 3; nobody has them whole. What a scale
is, and how rows are made, the layers say: each weight has `float8_rows` (WeightRows).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mpu.comm.collectives import MAX, all_gather, all_reduce
from mpu.comm.transport import Axis, Handle, Label
from mpu.zero.bucket import ParamAndGradBucket

AGREE = Label("optimizer", "float8 scales")


class WeightRows(Protocol):
    """How one weight travels; see mpu/layers/float8/weights.py. shared: over tp, too."""

    shared: bool
    count: int
    nbytes: int

    def scales(self, part: Tensor, first: int) -> Tensor: ...
    def codes(self, part: Tensor, first: int, scales: Tensor) -> Tensor: ...
    def rows(self, codes: Tensor, scales: Tensor, out: Tensor) -> Tensor: ...


def of_buckets(
    buckets: Sequence[ParamAndGradBucket], shard: Axis, tp: Axis, gatherer: Any
) -> Callable[[], None] | None:
    """Return what is to be called when weights changed; None where nothing travels in float8.

    gatherer: that of stage 3 (mpu/zero/weights.py), which then gathers in float8; or None.
    """
    if not any(bucket.layout.scales for bucket in buckets):
        return None
    made = Float8Gather(buckets, shard, tp, at_once=gatherer is None)
    if gatherer is not None:
        gatherer.float8 = made
    return made.requantise


class Float8Gather:
    """The buckets of float8, their codes and scales. at_once: gather when codes are made."""

    def __init__(
        self, buckets: Sequence[ParamAndGradBucket], shard: Axis, tp: Axis, at_once: bool
    ) -> None:
        self.shard, self.tp, self.at_once = shard, tp, at_once
        self._shared = 0  # scales that ranks of tp share come first
        self.buckets = [bucket for bucket in buckets if bucket.layout.scales]
        self._how: dict[str, WeightRows] = {}
        for bucket in self.buckets:
            self._how |= {name: param.float8_rows for name, param, _ in bucket.params}  # type: ignore[attr-defined]
        total, self._at = 0, dict[str, slice]()
        for name in sorted(self._how, key=lambda name: not self._how[name].shared):
            self._at[name] = slice(total, total := total + self._how[name].count)
            if self._how[name].shared:
                self._shared = total
        device = self.buckets[0].param_shard.device
        self.scales = torch.zeros(total, dtype=torch.uint8, device=device)
        for bucket in self.buckets:
            codes = torch.zeros(bucket.high - bucket.low, dtype=torch.uint8, device=device)
            bucket.coded = codes, self.scales

    @torch.no_grad()
    def requantise(self) -> None:
        """Make the codes of this rank's parts, after they changed. All ranks do it together."""
        self.scales.zero_()
        for bucket in self.buckets:
            for name, part, first, _ in self._parts(bucket):
                self.scales[self._at[name]] = self._how[name].scales(part, first)
        all_reduce(self.scales, self.shard, op=MAX, label=AGREE)
        if self._shared:
            all_reduce(self.scales[: self._shared], self.tp, op=MAX, label=AGREE)
        for bucket in self.buckets:
            for name, part, first, into in self._parts(bucket):
                scales = self.scales[self._at[name]]
                bucket.coded[0][into] = self._how[name].codes(part, first, scales)
        for bucket in reversed(self.buckets if self.at_once else []):
            self.gather(bucket)

    def _parts(self, bucket: ParamAndGradBucket) -> Iterator[tuple[str, Tensor, int, slice]]:
        """Yield name, elements and first element of each part, and where its codes stand."""
        for name, low, high, start in bucket.owned():
            into = slice(low - bucket.low, high - bucket.low)
            yield name, bucket.param_shard[into], low - start, into

    def gather(self, bucket: ParamAndGradBucket) -> None:
        """Start the gather of a bucket's codes; wait for `bucket.gathering` before their use."""
        bucket.gathering.wait()
        codes, label = bucket.coded[0], Label(bucket, "gather")
        bucket.weights = flat = codes.new_empty(bucket.length)
        _, handle = all_gather(codes, self.shard, True, into=flat, label=label)
        bucket.gathering = _Arrival(handle, self, bucket)

    def fill_rows(self, bucket: ParamAndGradBucket) -> None:
        """Make the rows of a bucket's weights, in memory of their own; drop the flat codes."""
        assert (flat := bucket.weights) is not None
        bucket.weights, at = flat.new_empty(bucket.layout.rows), 0
        for name, param, start in bucket.params:
            codes, how = flat[start : start + param.numel()], self._how[name]
            out = bucket.weights[at : (at := at + how.nbytes)]
            bucket.rows[param] = how.rows(codes, self.scales[self._at[name]], out)


class _Arrival(Handle):
    """The gather of a bucket's codes: after the first wait the bucket has rows."""

    def __init__(self, inner: Handle, gather: Float8Gather, bucket: ParamAndGradBucket) -> None:
        super().__init__()
        self._inner, self._gather, self._bucket = inner, gather, bucket
        self._arrived = False

    def wait(self) -> None:
        """Wait for the codes, and make rows of them once. Raises CommunicationError."""
        if not self._arrived:
            self._inner.wait()
            self._arrived = True
            with torch.no_grad():
                self._gather.fill_rows(self._bucket)
