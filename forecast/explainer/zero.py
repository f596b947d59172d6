# SPDX-License-Identifier: Apache-2.0
"""Track a step's buckets for tools/explain.py: contents, owners, gradients, gathered weights."""

from collections import Counter
from collections.abc import Collection
from textwrap import wrap
from typing import Any

from torch import Tensor

from mpu.module_tracker import Event
from mpu.zero.bucket_layout import block_of
from pretrain_llama import LlamaRun

WIDTH = 150


class Buckets:
    """The buckets of a run, and the gradients that are ready since `begin`."""

    def __init__(self, run: LlamaRun) -> None:
        self.sink = run.sink
        self.place = {id(bucket): i for i, bucket in enumerate(run.sink.buckets)}
        named = run.model.named_parameters(remove_duplicate=False)
        self._uses = Counter(id(param) for _, param in named)  # uses of a parameter per micro-batch
        self._given: Counter[int] = Counter()  # number of ready gradients of a parameter
        self._micro_batches = 1

    def ready(self, event: Event) -> None:
        """Count a gradient that is ready."""
        self._given[id(event.of)] += 1

    def begin(self, micro_batches: int) -> None:
        """Begin a step, in which no gradient is ready yet."""
        self._given.clear()
        self._micro_batches = micro_batches

    def number(self, block: Any) -> int | None:
        """Return the number of a bucket, or None for anything else."""
        return self.place.get(id(block))

    def holding(self, memory: Collection[int]) -> int | None:
        """Return the number of the bucket with a tensor at one of these addresses, or None."""
        for i, bucket in enumerate(self.sink.buckets):
            tensors = [value for value in vars(bucket).values() if isinstance(value, Tensor)]
            if any(tensor.untyped_storage().data_ptr() in memory for tensor in tensors):
                return i
        return None

    def gathered(self) -> list[int]:
        """Return the numbers of the buckets whose weights are currently gathered."""
        gatherer = self.sink.gatherer
        return [self.place[id(bucket)] for bucket in gatherer.unsharded] if gatherer else []

    def after(self, leaving: int) -> str:
        """Return the gradients for which the bucket after number `leaving` still waits, or ""."""
        buckets = self.sink.buckets
        if leaving + 1 == len(buckets) or buckets[leaving].reduce_axes:
            return ""
        then, rounds = buckets[leaving + 1], self._micro_batches
        if self.sink.each and not then.reduce_axes and then.reduction.zero_stage >= 2:
            rounds += 1 - then.rounds
        names = [
            name.removesuffix(".weight")
            for name, param, _ in then.params
            if self._given[id(param)] < self._uses[id(param)] * rounds
        ]
        if len(names) == len(then.params):
            return f"any gradient of bucket {leaving + 1} ({self.contents(leaving + 1)})"
        return f"those of {some(names)} (bucket {leaving + 1})" if names else ""

    def contents(self, number: int) -> str:
        """Return "the 4 weights of layers.1" for a block's sharded bucket, else their names."""
        names = [name.removesuffix(".weight") for name, _, _ in self.sink.buckets[number].params]
        blocks = {block_of(name) for name in names}
        if self.sink.buckets[number].sharded and len(blocks) == 1 and blocks != {""}:
            return f"the {len(names)} weights of {blocks.pop()}"
        return some(names)

    def contents_of_buckets(self) -> list[str]:
        """Return lines with the contents of each communicated bucket, and the part of this rank."""
        lines, many = [], len({bucket.layout.sharing for bucket in self.sink.buckets}) > 1
        for i, bucket in enumerate(self.sink.buckets):
            sharing, shard = bucket.layout.sharing, bucket.shard
            if sharing.ranks == 1 and not bucket.reduce_axes:
                continue
            text = f"  bucket {i} holds the gradients of {self.contents(i)}"
            if shard is not None:
                text = f"  bucket {i}: {self.contents(i)}; {bucket.length:,} numbers, rank "
                text += f"{shard.rank} of {shard.size} owns [{bucket.low:,}, {bucket.high:,})"
            if many:
                text += f"; summed over {sharing.data}"
            if sharing.zero_stage == 3:
                text += "; weights "
                text += "gathered for use" if bucket.sharded else "whole, gathered after updates"
            lines += wrap(text, WIDTH, subsequent_indent="    ")
        return lines


def some(names: list[str]) -> str:
    """Join names; of more than five, only the first and last two."""
    return ", ".join(names if len(names) <= 5 else [*names[:2], "...", *names[-2:]])
