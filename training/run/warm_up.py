# SPDX-License-Identifier: Apache-2.0
"""Run every chunk once before a pipeline's first message, on GPUs.

The first launch of a kernel loads its code or allocates memory, such as a cuBLAS workspace, and
this may wait for running kernels. A posted receive is a kernel that runs until its message arrives.
If that message depends on the kernel that is being loaded, the first step deadlocks. So each rank
first runs a forward and a backward of its chunks, on a model of the same shapes that shares nothing
with the run's: no weight, no gradient, no bucket, no random number. It sends no message between
stages. Its tensor-parallel collectives are those of a step, which all ranks of tp make together.

Some of these resources belong to a thread, such as cuDNN's plans of attention. So forward and
backward run in the threads of the run, also where one overlaps the other (mpu/interleave.py).
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from mpu.gradients import GradientSink
from mpu.grid import Grid
from mpu.layers.linear import use_overlap
from mpu.overlap.choices import OverlapMap
from mpu.pipeline.engine import Engine, Forward
from mpu.pipeline.schedules import Schedule
from mpu.pipeline.stage_layout import Stage
from training.data.batch import Batch, DocumentRules, make_batch
from training.data.context_part import context_part
from training.data.loss_mask import is_masked
from training.run.model_profile import ModelProvider
from training.run.pipeline_stages import rank_stages
from training.run.state import Run, RunSchedule
from training.settings.config import Config
from training.settings.layer_options import context_of, main_grads_dtype, recompute_of

MICRO_BATCHES = 2  # the first writes weight gradients, the second adds to them


class Scratch(GradientSink):
    """A sink that stores all weights of a dtype in one buffer of zeros, and all gradients in
    another, each as large as the largest weight. Nothing is summed over ranks.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._pieces: dict[tuple[str, torch.dtype], Tensor] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros for a new weight; all weights share this memory."""
        return self._piece("weights", shape, dtype, device)

    def main_grad(self, param: nn.Parameter) -> Tensor:
        """Return a buffer for a gradient; all gradients share this memory."""
        return self._piece("gradients", tuple(param.shape), self.dtype, param.device)

    def _piece(
        self, what: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        count, buffer = torch.Size(shape).numel(), self._pieces.get((what, dtype))
        if buffer is None or buffer.numel() < count:
            buffer = self._pieces[what, dtype] = torch.zeros(count, dtype=dtype, device=device)
        return buffer[:count].view(shape)


class LocalEngine(Engine):
    """An engine that runs each chunk's forward and backward on inputs of zeros, and sends nothing.

    engine: of the run. stages: of this rank. overlaps: whether a forward overlaps the backward
    before it, as in the run (Schedule.pairs), in the same threads as in the run.
    """

    def __init__(self, engine: Engine, stages: Sequence[Stage], overlaps: bool) -> None:
        super().__init__(
            engine.grid, engine.queue, engine.monitor, engine.dtype, engine.device,
            engine.interleaver,
        )  # fmt: skip
        self.stages, self.overlaps = stages, overlaps

    def run(
        self, schedule: Schedule, forward: Forward, shape: tuple[int, ...], during: str = ""
    ) -> None:
        """Run F, B and W of each micro-batch and chunk; `schedule` is ignored."""
        behind: Callable[[], None] | None = None  # a backward to overlap with the next forward
        for i in range(MICRO_BATCHES):
            for chunk, stage in enumerate(self.stages):
                hidden = None
                if not stage.embedding:
                    hidden = torch.zeros(shape, dtype=self.dtype, device=self.device)
                    hidden.requires_grad_()
                ahead = partial(forward, chunk, i, hidden)
                out = ahead() if behind is None else self.interleaver.run(ahead, behind)[0]
                behind = None
                if not out.requires_grad:
                    continue  # no parameter up to here is trained
                dy = None if stage.loss else torch.zeros_like(out)
                backward = partial(torch.autograd.backward, out, dy)
                if self.overlaps:
                    behind = backward
                else:
                    backward()
        if behind is not None:
            behind()


def warm_up(
    run: Run,
    provider: ModelProvider,
    run_schedule: RunSchedule,
    overlap: OverlapMap,
    note: Callable[[str], None],
) -> None:
    """Run each chunk of this rank, if the run is a pipeline on GPUs, and note the time it took.

    run_schedule: the program's function. overlap: the methods of its linear layers.
    All ranks call it.
    """
    if run.device.type == "cuda" and run.grid.pp.size > 1:
        run.monitor.action = "loading kernels before the first message"
        begin = time.perf_counter()
        run_chunks(run, provider, run_schedule, overlap)
        seconds = time.perf_counter() - begin
        note(f"kernels: loaded by a forward and a backward of each chunk, in {seconds:.1f} s")


def run_chunks(
    run: Run, provider: ModelProvider, run_schedule: RunSchedule, overlap: OverlapMap
) -> None:
    """Run a forward and a backward of each chunk of this rank, on a model of the run's shapes,
    flags and collectives. Weights are zeros, and tokens are spread evenly over the experts. Its
    memory is free afterwards.
    """
    _run_chunks(run, provider, run_schedule, overlap)
    # layers refer to each other, and autograd's nodes to them: what one collection frees can
    # release more garbage
    while gc.collect():
        pass


def _run_chunks(
    run: Run, provider: ModelProvider, run_schedule: RunSchedule, overlap: OverlapMap
) -> None:
    config = run.config
    ctx = context_of(
        config, run.grid, run.device, Scratch(main_grads_dtype(config)), even_experts=True,
        interleaver=run.engine.interleaver,
    )  # fmt: skip
    stages = rank_stages(config, provider, run.grid.pp.rank)
    model = provider(config, ctx, recompute_of(config, run.device), stages)
    assert isinstance(model, nn.Module)
    use_overlap(model, overlap)
    overlaps = config.parallel.overlap_moe_expert_parallel_comm
    engine = LocalEngine(run.engine, model.stages, overlaps)
    batches = batches_of_zeros(config, run.grid, run.device)
    nothing = Schedule("warm-up", (), MICRO_BATCHES)
    run_schedule(replace(run, model=model, engine=engine), nothing, batches, 1, "")
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)  # copies must end before their host memory is freed


def batches_of_zeros(config: Config, grid: Grid, device: torch.device) -> list[Batch]:
    """Return micro-batches of token 0, each row one document, with the masks of the run's flags."""
    flags = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    rules = DocumentRules(eod=-1, **{flag: getattr(config.data, flag) for flag in flags})
    rows = np.zeros((config.batch.micro_batch_size, config.model.seq_length + 1), np.int64)
    counted = np.ones(rows.shape, bool) if is_masked(config) else None
    batches, cp = [make_batch(rows, rules, 0, counted) for _ in range(MICRO_BATCHES)], grid.cp
    return [context_part(batch, cp.rank, cp.size).to(device) for batch in batches]
