# SPDX-License-Identifier: Apache-2.0
"""What a rank does between its first connection and its first step."""

from collections.abc import Callable
from functools import partial

from mpu.grid import Grid
from mpu.layers import fused_gpu
from mpu.param import PlacementError
from mpu.zero.gradient_check import GradientCheck
from training.checkpoint import CheckpointError
from training.data.dataset import DataError
from training.run import context_parallel, matrices, memory_report, pipeline_stages
from training.run.autotune import overlap
from training.run.autotune.overlap import Note, Overlap
from training.run.log import Log
from training.run.model_profile import ModelProvider, model_profile, whole_model
from training.run.output import say
from training.run.saver import Saver
from training.run.state import Run, RunSchedule
from training.run.warm_up import warm_up
from training.run.watch.intervals import still_due
from training.settings import param_groups
from training.settings.config import UsageError
from training.settings.stages import name_at, tokens_at

# errors that a user can do something about: one sentence, no traceback
EXPECTED = (UsageError, DataError, CheckpointError, FloatingPointError, PlacementError)


def note_of(grid: Grid) -> Callable[[str], None]:
    """Return what prints a line on rank 0, and nothing on the others."""
    return say if grid.rank == 0 else lambda text: None


def describe(run: Run, provider: ModelProvider, note: Note) -> None:
    """Print what the flags and the machine make of the run."""
    for line in [*run.config.notes, *context_parallel.lines(run.config)]:
        note(line)
    for line in [
        *pipeline_stages.lines(run.config, provider),
        *matrices.lines(run.config, provider, [(run.grid, run.optimizer)]),
    ]:
        note(line)
    count = sum(p.numel() for p in run.module.parameters())
    fixed = sum(p.numel() for p in run.module.parameters() if not p.requires_grad)
    of_them = f" ({fixed:,} of them frozen)" if fixed else ""
    note(f"{run.grid}; {count:,} parameters on this rank{of_them}, {run.device}")
    note(memory_report.buckets(run.config, run.sink, run.grid.rank))
    if run.sink.frozen.names or run.config.optimizer.param_group:  # else all parameters are alike
        whole = whole_model(run.config, provider)
        for line in param_groups.lines(dict(whole.named_parameters())):
            note(line)
    for name in run.sink.frozen.overruled:
        note(
            f"{name} is tied to an embedding of which --model-file says something else: the "
            "embedding counts; say whether it trains at both ends"
        )
    if reason := fused_gpu.without(run.device):
        note(f"fused operations are not available, so this is slower: {reason}")


def measure_and_warm_up(
    run: Run, saver: Saver, provider: ModelProvider, run_schedule: RunSchedule, note: Note
) -> Overlap:
    """Choose which layers are in float8, then what overlaps; run what must run before a message.

    What the checkpoint recorded is taken, else it is measured, and the next checkpoint records it.
    A matmul of float8 sends other bytes, so another method may be its fastest: hence this order.
    It arms the gradient check of the first step, too. All ranks call it.
    """
    config, ctx = run.config, run.model.ctx
    run.sink.check = GradientCheck(run.grid, note)
    run.monitor.action = "measuring what is fastest"
    found = overlap.choose_methods(run.module, ctx, config, note, saver.overlap_choices)
    saver.overlap_choices = found.chosen.choices
    warm_up(run, provider, run_schedule, found.chosen, note)
    return found


def log_of(run: Run, provider: ModelProvider, total: int, tested: bool = False) -> Log:
    """Return the log of a run that ends at iteration `total`. tested: there is a test set."""
    config = run.config
    tests = {"test": int(tested and bool(config.run.eval_interval))}
    return Log(
        config.log, rank=run.grid.rank, world_size=run.grid.world_size,
        flops_per_token=model_profile(config, provider).flops,
        dtype=config.run.dtype, device=run.device, total_iterations=total,
        total_samples=config.batch.train_samples,
        start_iteration=0 if config.run.skip_train else run.iteration,
        run_config=config.flat(), tokens_at=partial(tokens_at, config),
        stage_at=partial(name_at, config),
        still_due=lambda iteration: still_due(config, iteration, total) | tests,
        on_line=run.monitor.activity.started,
    )  # fmt: skip
