# SPDX-License-Identifier: Apache-2.0
"""Run the micro-batches of a step from CUDA graphs (`--cuda-graph`): one launch for each.

The first steps are eager. Then one micro-batch's forward and backward are captured, in which
nothing computes, and from there on its launches are replayed, in the same memory:

    first micro-batch    its graph overwrites the main gradients of the step before
    the others           one graph, which adds to them
    the last one         eager under --overlap-grad-reduce: buckets leave while it runs
    the first one        eager under --overlap-param-gather: weights arrive while it runs

A micro-batch comes to its graph in static tensors. The number of tokens by which losses are divided
is part of a graph; where it changes, graphs are captured again. What else a host decides, and so
forbids a graph, training/flags/compute_rules.py refuses, and a rehearsal finds.

tests/training/run/test_cuda_graph.py runs this against an imitation of torch.cuda's class, which
records and computes again.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpu.pipeline.schedules import Schedule
from training.data.batch import Batch
from training.run.state import Run, RunSchedule
from training.settings.arguments import ParallelConfig

INPUTS = ("tokens", "labels", "loss_mask", "position_ids")


class _Captured(NamedTuple):
    """A graph, what it reads and returns, and the parameters whose gradients it writes."""

    graph: Any
    batch: Batch
    total: Tensor
    tokens: int
    written: frozenset[nn.Parameter]

    def take(self, batch: Batch) -> None:
        """Copy a micro-batch to where the graph reads it."""
        for name in INPUTS:
            if (given := getattr(batch, name)) is not None:
                getattr(self.batch, name).copy_(given, non_blocking=True)


class Graphs:
    """Call it as run_schedule of pretrain_llama.py, which it calls: (run, schedule, batches, ...).

    warmup_steps: steps that are eager. cuda: torch.cuda, or what takes its place. note: is called
    with once what is captured, or why nothing is.
    """

    def __init__(
        self,
        run_schedule: RunSchedule,
        parallel: ParallelConfig,
        warmup_steps: int,
        note: Callable[[str], None],
        cuda: Any = torch.cuda,
    ) -> None:
        self.run_schedule, self.parallel, self.note, self.cuda = run_schedule, parallel, note, cuda
        self.left = warmup_steps
        self.captured: dict[bool, _Captured] = {}  # by whether it is the first micro-batch
        self.replays = 0

    def __call__(
        self, run: Run, schedule: Schedule, batches: list[Batch], tokens: int, during: str
    ) -> Tensor:
        """Run a step's micro-batches; return what run_schedule returns, with the same bits.

        Auxiliary losses are added by micro-batch here, so their logged mean may differ in the last
        bit of its fp64 sum; their gradients do not.
        """
        if not self.ready(run):
            return self.run_schedule(run, schedule, batches, tokens, during)
        total = torch.zeros(3, dtype=torch.float64, device=run.device)
        for i, batch in enumerate(batches):
            where = f"(micro-batch {i}) {during}"
            if eager(self.parallel, i, len(batches)):
                total += self.run_schedule(run, run.schedule(1), [batch], tokens, where)
                continue
            if not i:
                run.sink.wait_for_weights()
            run.monitor.action = f"a CUDA graph {where}"
            captured = self.captured.get(i == 0)
            if captured is None or captured.tokens != tokens:
                captured = self.captured[i == 0] = self.capture(run, batch, tokens, where)
            else:  # captured before: tell the sink what Python would have
                run.sink.note_replay(captured.written)
            captured.take(batch)
            captured.graph.replay()
            self.replays += 1
            total += captured.total
            total[1] += batch.token_count
        return total

    def ready(self, run: Run) -> bool:
        """Return whether this step may use graphs: warm, unmeasured, its gradients checked."""
        if self.left > 0:
            self.left -= 1
            return False
        if run.sink.check is not None or run.engine.spans is not None:
            return False
        plain = any(bucket.plain for bucket in run.sink.buckets)
        if plain:
            self.note(
                "--cuda-graph captures nothing: a weight is used in plain autograd, whose gradient "
                "has different memory in each step; take it by mpu.gradients.use(weight, ctx.sink)"
            )
            self.left = 1 << 62
        return not plain

    def capture(self, run: Run, batch: Batch, tokens: int, during: str) -> _Captured:
        """Capture a micro-batch; Python runs it, so the sink counts it, and nothing computes."""
        given = {name: getattr(batch, name) for name in INPUTS}
        static: Any = {name: None if x is None else x.clone() for name, x in given.items()}
        static_batch = replace(batch, token_count=0, **static)
        graph, others = self.cuda.CUDAGraph(), list(self.captured.values())
        pool = others[0].graph.pool() if others else None  # one after the other: never at once
        before = set(run.sink.written)
        # NCCL's watchdog asks for events on a thread of its own
        with self.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            total = self.run_schedule(run, run.schedule(1), [static_batch], tokens, during)
        if not others:
            self.note("--cuda-graph: micro-batches run from CUDA graphs from here on")
            run.grid.closing.append(self.close)
        written = frozenset(set(run.sink.written) - before)
        return _Captured(graph, static_batch, total, tokens, written)

    def close(self) -> None:
        """Destroy the graphs. A communicator of NCCL does not end while a graph holds its calls."""
        for captured in self.captured.values():
            captured.graph.reset()
        self.captured.clear()


def eager(parallel: ParallelConfig, i: int, count: int) -> bool:
    """Return whether micro-batch i of so many does what the others do not, so has no graph."""
    gathers = parallel.overlap_param_gather and parallel.shard_size > 1
    return (i == 0 and gathers) or (i == count - 1 and parallel.overlap_grad_reduce)
