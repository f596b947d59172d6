# SPDX-License-Identifier: Apache-2.0
"""ZeRO stage 3: each rank keeps its part of the weights; a block's weights are gathered for use.

    acquire(block i)    reshard blocks that are not in use; unshard block i unless that has begun,
                        and block i+1 if prefetch is on; the caller waits for block i's gather

Where block i+1 is vectors alone (the last norm before tied embeddings), block i+2 is prefetched
too: no matmul of block i+1 could hide its gather. A block has several buckets if it mixes frozen
and trained weights, which do not share buckets. The next block is known from an earlier pass of the
same kind: the order of uses, in forward and backward, is recorded and followed. If it differs, a
block is gathered when it is requested, and the new order is recorded. All ranks use their blocks in
the same order, so they gather in the same order.
"""

from collections.abc import Iterator, Sequence

import torch

from mpu.comm.collectives import all_gather
from mpu.comm.transport import Label
from mpu.zero.bucket import ParamBucket


class Gatherer:
    """Gathers the weights of sharded buckets before their use and frees them after it.

    ahead: prefetch the next block during the computation of this one. keep: keep gathered weights
    until their gradients of this step are complete. unsharded: the buckets whose weights are
    gathered. peak: the most bytes of gathered weights at once.
    """

    def __init__(self, ahead: bool, keep: bool) -> None:
        self.ahead, self.keep = ahead, keep
        self.unsharded: list[ParamBucket] = []
        self.peak = 0
        self._current: ParamBucket | None = None
        self._order: list[ParamBucket] = []  # uses in this pass
        self._known: list[ParamBucket] = []  # uses in the last pass of this kind
        self._kind, self._orders = 0, dict[int, list[ParamBucket]]()

    def begin_pass(self, kind: int) -> None:
        """Begin a pass; kind: the number of micro-batches of a step, or 0 outside of steps."""
        if self._order:
            self._orders[self._kind] = self._order
        self._kind, self._order, self._known = kind, [], self._orders.get(kind, [])
        for bucket in list(self.unsharded):
            if bucket.users:
                names = [name for each in bucket.block for name, _, _ in each.params]
                raise RuntimeError(
                    f"a use of {names[0]}, or of a weight gathered with it, has not ended: each "
                    "acquire needs an end_use in the same forward or backward (docs/forking.md)"
                )
            self.reshard(bucket)

    def acquire(self, bucket: ParamBucket) -> None:
        """Begin a use: start the gathers of this bucket's block and, if `ahead`, of the next."""
        bucket.users += 1
        if self._current is not None and bucket.block is self._current.block:
            return
        following = self._follow(bucket) if self.ahead else ()
        needed = [each for one in (bucket, *following) for each in one.block]
        for other in list(self.unsharded):
            busy = any(each.users or (self.keep and each.waiting) for each in other.block)
            if not busy and other not in needed:
                self.reshard(other)
        self._current = bucket
        for each in needed:
            if each.weights is None:
                self.unshard(each)

    def end_use(self, bucket: ParamBucket) -> None:
        """End a use; the weights are freed when another block is used."""
        bucket.users -= 1

    def reshard_if_unused(self, bucket: ParamBucket) -> None:
        """Free the weights of a bucket that this step no longer needs, unless they are in use or
        are gathered together with other buckets.
        """
        if bucket in self.unsharded and not bucket.users and len(bucket.block) == 1:
            self.reshard(bucket)

    def _follow(self, bucket: ParamBucket) -> Sequence[ParamBucket]:
        """Record a use; return the buckets to prefetch: what was used next in the last pass of this
        kind, up to the first block with a matrix.
        """
        at = len(self._order)
        self._order.append(bucket)
        if self._known[at : at + 1] != [bucket]:
            self._known = []
        end = at + 2
        while end < len(self._known) and not any(b.has_matrix for b in self._known[end - 1].block):
            end += 1
        return self._known[at + 1 : end]

    def unshard(self, bucket: ParamBucket) -> None:
        """Start the gather of a bucket's weights; wait for `bucket.gathering` before their use.

        Without `ahead` this waits for the gather.
        """
        assert bucket.shard is not None
        weights = bucket.param_shard.new_empty(bucket.length)
        bucket.view_params_in(weights)
        _, bucket.gathering = all_gather(
            bucket.param_shard, bucket.shard, self.ahead, into=weights,
            label=Label(bucket, "gather"),
        )  # fmt: skip
        self.unsharded.append(bucket)
        live = sum(b.length * b.param_shard.itemsize for b in self.unsharded)
        self.peak = max(self.peak, live)

    def reshard(self, bucket: ParamBucket) -> None:
        """Free a bucket's gathered weights."""
        _hide(bucket)
        self.unsharded.remove(bucket)
        if self._current in bucket.block:
            self._current = None


def fill(buckets: Sequence[ParamBucket]) -> Iterator[set[str]]:
    """Yield the parameter names of each sharded bucket in turn.

    These parameters may be written until the generator is resumed, which keeps this rank's part of
    them.
    """
    for bucket in buckets:
        if bucket.sharded:
            flat = bucket.param_shard.new_zeros(bucket.length)
            bucket.view_params_in(flat, copy=True)
            yield {name for name, _, _ in bucket.params}
            bucket.param_shard.copy_(flat[bucket.low : bucket.high])
            _hide(bucket)


def _hide(bucket: ParamBucket) -> None:
    """Free the gathered weights; the parameters read as NaN until the next gather."""
    bucket.gathering.wait()
    bucket.weights = None
    nothing = bucket.param_shard.new_full((1,), torch.nan)
    for _, param, _ in bucket.params:
        param.data = nothing.expand(param.shape)
