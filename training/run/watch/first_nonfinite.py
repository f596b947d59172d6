# SPDX-License-Identifier: Apache-2.0
"""Name the first tensor that is not finite in a step, by running its micro-batches once more.

    weights                    each rank looks at those that it owns
    forward                    what enters and what leaves each module (mpu/module_tracker.py)
    backward                   the gradient of what each module gave, and each parameter's main
                               gradient once it is ready
    after the gradients' sums  each rank looks at the sums that it owns

Nothing is updated, so only time is lost. The rerun is made when all ranks know of the step, one
step later: with the weights of then, which are one update further where that step was sound.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from mpu.comm.collectives import gather_bytes
from mpu.module_tracker import INPUT, MAIN_GRAD, OUTPUT, OUTPUT_GRAD, Event, ModuleTracker
from mpu.torch_private import TorchLacks, running_node
from training.checkpoint.finite import fault_of
from training.data.batch import Batch
from training.data.dataset import Dataset
from training.run.state import Run, RunSchedule

WHERE = re.compile(r"(\w+) chunk (\d+) micro-batch (\d+) in stage (\d+)")
DEFERRED = re.compile(r"deferred (W) of (micro-batch) (\d+) in stage (\d+)")
WHAT = {  # a kind of event: name, class
    INPUT: "the input of {} ({})",
    OUTPUT: "the output of {} ({})",
    OUTPUT_GRAD: "the gradient of the output of {} ({})",
    MAIN_GRAD: "the gradient of the weight {}",
}
WEIGHT, FORWARD, BACKWARD, SUM = range(4)  # in the order in which a step comes to them


def find_first(
    run: Run, dataset: Dataset, batches: list[Batch], rerun: RunSchedule, during: str
) -> list[str]:
    """Run a step's micro-batches again, on every rank; return sentences on what was found.

    rerun: run_schedule of pretrain_llama.py. The same sentences on every rank.
    """
    try:
        running_node()
    except TorchLacks as error:
        return [f"which module it is in is not known: {error}"]
    watch = _Watch(run, dataset, batches)
    watch.look_at_weights()
    tokens = len(batches) * batches[0].tokens.numel() * run.grid.dp_cp.size
    run.sink.begin_step(len(batches))
    with watch.following():
        rerun(run, run.schedule(len(batches)), batches, tokens, during)
    run.sink.finish_grad_sync()
    watch.look_at_sums()
    mine = json.dumps(watch.found).encode()
    every = [json.loads(text) for text in gather_bytes(mine, run.grid.world, run.device)]
    found = sorted((*at, rank, text) for rank, own in enumerate(every) for at, text in own)
    if not found:
        return [
            "run again, all values were finite, so its samples are not the cause: a transient "
            "fault, or one outside of forward and backward"
        ]
    *_, rank, text = found[0]
    return [f"run again, the first value that is not finite is in {text}, on rank {rank}"]


class _Watch:
    """What one rank finds: the first of each kind, as ([kind, micro-batch, stage, place], text)."""

    def __init__(self, run: Run, dataset: Dataset, batches: Sequence[Batch]) -> None:
        self.run, self.dataset, self.batches = run, dataset, batches
        self.found: list[tuple[list[int], str]] = []
        self._looks = 0

    def look_at_weights(self) -> None:
        """Look at the weights, and at the masters that they are rounded from."""
        sink, masters = self.run.sink, self.run.optimizer.masters
        masters = [*masters, *(bucket.param_shard for bucket in sink.frozen_buckets)]
        for bucket, master in zip(sink.weight_buckets, masters, strict=True):
            for name, low, high, _ in bucket.owned():
                part = slice(low - bucket.low, high - bucket.low)
                fault = fault_of(bucket.param_shard[part]) or fault_of(master[part])
                if fault:
                    self.found.append(([WEIGHT, 0, 0, 0], f"the weight {name}: {fault}"))
                    return

    def look_at_sums(self) -> None:
        """Look at the sums of the gradients."""
        for bucket in self.run.sink.buckets:
            for name, low, high, _ in bucket.owned():
                if fault := fault_of(bucket.grad_shard[low - bucket.low : high - bucket.low]):
                    self.found.append(([SUM, 0, 0, 0], f"the summed gradient of {name}: {fault}"))
                    return

    @contextmanager
    def following(self) -> Iterator[None]:
        """Look at every tensor that passes between modules, until the block is left."""
        run, reader = self.run, self._read
        readers = dict.fromkeys((INPUT, OUTPUT, OUTPUT_GRAD, MAIN_GRAD), reader)
        tracker = ModuleTracker(run.module, run.engine.queue, run.sink, readers)
        try:
            yield
        finally:
            tracker.close()

    def _read(self, event: Event) -> None:
        name = event.name or ("a parameter" if event.kind == MAIN_GRAD else "the model")
        what = WHAT[event.kind].format(name, type(event.of).__name__)
        for value in event.tensors:
            self._look(value, what, FORWARD if event.kind in (INPUT, OUTPUT) else BACKWARD)

    @torch.no_grad()
    def _look(self, value: Tensor, what: str, kind: int) -> None:
        """Note a tensor that is not finite, if it is this rank's first of its kind."""
        self._looks += 1
        if any(order[0] == kind for order, _ in self.found):
            return
        if fault := fault_of(value):
            action = self.run.monitor.action
            place = WHERE.search(action) or DEFERRED.search(action)
            number, stage = (int(place[3]), int(place[4])) if place else (0, 0)
            order = [kind, number, stage if kind == FORWARD else -stage, self._looks]
            text = f"{what} ({fault}), of micro-batch {number}: {self._samples(number, value)}"
            self.found.append((order, text))

    def _samples(self, number: int, value: Tensor) -> str:
        """Name the first sample of a micro-batch whose values are not finite, or all of them."""
        batch = self.batches[min(number, len(self.batches) - 1)]
        rows = len(batch.tokens)
        dim = {3: 1, 2: 0}.get(value.dim(), -1)  # hidden states [s, b, h], losses [b, s]
        first = batch.first_sample
        if rows > 1 and (dim < 0 or value.shape[dim] != rows):
            last = first + rows - 1
            return f"samples {first} to {last}, the first from {self.dataset.describe(first)}"
        if rows > 1:
            first += int((~value.isfinite()).movedim(dim, 0).flatten(1).any(1).nonzero()[0])
        return f"sample {first}, from {self.dataset.describe(first)}"
