# SPDX-License-Identifier: Apache-2.0
"""Find the first non-finite tensor of a step by rerunning its micro-batches.

    weights, moments           each rank checks those that it owns
    forward                    inputs and outputs of each module, and of the collectives inside
    backward                   the gradients of these, and each parameter's main gradient once it is
                               ready
    after the gradients' sums  each rank checks the sums that it owns

Nothing is updated, so the rerun only costs time. It is made once all ranks know of the step, one
step later, with the current weights, which are one update further if that later step was sound.
"""

import json
from typing import Any

import torch
from torch import Tensor

from mpu.comm.collectives import gather_bytes
from mpu.module_tracker import FORWARD as IN_FORWARD
from mpu.module_tracker import Event
from mpu.torch_private import TorchLacks, running_node
from training.checkpoint.finite import fault_of
from training.data.batch import Batch
from training.data.dataset import Dataset
from training.run.state import Run, RunSchedule
from training.run.watch.recorder import Recorder, in_words

WEIGHT, FORWARD, BACKWARD, SUM = range(4)  # in the order of a step
AFTER = {"own gradient": BACKWARD, "gradient": SUM}  # by the kind of a parameter's tensor


def find_first(
    run: Run, dataset: Dataset, batches: list[Batch], rerun: RunSchedule, during: str
) -> list[str]:
    """Rerun a step's micro-batches on every rank; return sentences on the findings.

    rerun: run_schedule of pretrain_llama.py. All ranks return the same sentences.
    """
    try:
        running_node()
    except TorchLacks as error:
        return [f"the module at fault is unknown: {error}"]
    tokens = len(batches) * batches[0].tokens.numel() * run.grid.dp_cp.size
    watch = _Watch(run, batches, dataset)
    with watch:  # the gradients are summed in it
        run.sink.begin_step(len(batches))
        rerun(run, run.schedule(len(batches)), batches, tokens, during)
        run.sink.finish_grad_sync()
    mine = json.dumps(watch.found).encode()
    every = [json.loads(text) for text in gather_bytes(mine, run.grid.world, run.device)]
    found = sorted((*at, rank, text) for rank, own in enumerate(every) for at, text in own)
    if not found:
        return [
            "in a rerun all values were finite, so its samples are not the cause: the fault was "
            "transient, or outside of forward and backward"
        ]
    *_, rank, text = found[0]
    return [f"in a rerun the first non-finite value is in {text}, on rank {rank}"]


class _Watch(Recorder):
    """Finds one rank's first non-finite tensor of each kind.

    found: ([kind, micro-batch, stage, place in the order of the rank's tensors], text) of each.
    """

    def __init__(self, run: Run, batches: list[Batch], dataset: Dataset) -> None:
        super().__init__(run, batches)
        self.dataset = dataset
        self.found: list[tuple[list[int], str]] = []
        self._looks = 0

    def state(self, when: str) -> None:
        """Check the weights and moments before the rerun, which changes none."""
        if when == "before":
            super().state(when)

    @torch.no_grad()
    def keep(self, x: Tensor, entry: dict[str, Any]) -> dict[str, Any]:
        """Record a non-finite tensor, if it is this rank's first of its kind."""
        self._looks += 1
        kind = AFTER.get(entry.get("kind", ""), WEIGHT)
        if "phase" in entry:
            kind = FORWARD if entry["phase"] == IN_FORWARD else BACKWARD
        if all(order[0] != kind for order, _ in self.found):
            if fault := fault_of(x):
                number, stage = entry.get("micro_batch", 0), entry.get("stage", 0)
                order = [kind, number, stage if kind == FORWARD else -stage, self._looks]
                text = f"{in_words(entry)} ({fault})"
                if "micro_batch" in entry:
                    activation = x if "phase" in entry else x.new_empty(())
                    text += f", of micro-batch {number}: {self._samples(number, activation)}"
                self.found.append((order, text))
        return {}

    def _main_grad(self, event: Event) -> None:
        entry = {"group": "parameter", "kind": "own gradient", "module": event.name}
        self.keep(event.tensors[0], {**entry, **self._where()})

    def _samples(self, number: int, value: Tensor) -> str:
        """Return the first sample of a micro-batch with non-finite values, or all its samples.

        value: an activation, or a tensor without dimensions.
        """
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
