#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Pretrain a Llama: parse -> grid -> data -> model -> optimizer -> loop. See `train_step` first.

    python pretrain_llama.py --mock-data --vocab-size 1000 --num-layers 2 --hidden-size 64 \\
        --num-attention-heads 4 --seq-length 64 --train-iters 10 --lr 1e-3
    torchrun --nproc-per-node 2 pretrain_llama.py --tensor-model-parallel-size 2 \\
        --sequence-parallel ...
    WORLD_SIZE=512 python pretrain_llama.py --dry-run ...      what would run where
    WORLD_SIZE=512 python pretrain_llama.py --rehearse ...     one rank's steps, without a GPU
"""

import gc
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache, partial
from importlib import import_module
from inspect import getfile
from typing import Any

from mpu.launch import Launch, environment_defaults, launched_by, shares_cores
from mpu.needs import end_at_once, explain_missing_packages
from training.faults.activity import Activity
from training.run.restarts import ERROR_FILE, end_again, write_error_file

os.environ.update(environment_defaults(os.environ, sys.argv))
if __name__ == "__main__":
    explain_missing_packages()
    end_again(os.environ)  # if torchrun restarts a run that cannot continue
    ACTIVITY = Activity.of_process()  # now, as imports from a slow file system take minutes
    ACTIVITY.what = "importing torch and the program"
    signal.signal(signal.SIGINT, end_at_once)  # during the import of torch, which may catch it
    PARENT = os.getppid()  # read now, as torchrun may be killed during the imports
    gc.disable()  # imported objects stay alive: collections would take a tenth of the time

import torch
from torch import Tensor

from model.llama import Llama
from model.load import (
    blame_forward,
    blaming_file,
    config_of,
    digest,
    load_model_file,
    of_checkpoint,
    own_flags,
    saved_config,
    with_mup,
)
from mpu import native
from mpu.comm.collectives import sum_in_order
from mpu.comm.transport import CommunicationError, Label
from mpu.context import LayerContext
from mpu.grid import Grid
from mpu.meta_tensors import META
from mpu.mup import Widths
from mpu.optim.optimizer import Optimizer
from mpu.param import name_groups, unique_parameters
from mpu.pipeline.engine import Engine
from mpu.pipeline.schedules import Schedule, forward_only
from mpu.pipeline.stage_layout import Stage
from mpu.recompute import Recompute
from mpu.zero.param_and_grad_buffer import ParamAndGradBuffer
from training.data.batch import Batch
from training.data.build import Loaders
from training.data.loader import Loader
from training.faults.monitor import FailureMonitor
from training.files.untrusted import printable
from training.flags import foreign, model_sizes
from training.flags.parse import model_file, parse
from training.run import layer_values, matrices, memory_report, resumable
from training.run.autotune.overlap import Overlap, OverlapNotes
from training.run.layer_values import LayerValues
from training.run.log import Log
from training.run.memory_report import MemoryReport
from training.run.model_profile import make_grid, whole_model
from training.run.output import note_of
from training.run.pipeline_stages import check_made_here, rank_stages, uses_of
from training.run.process import PROGRAM, as_process, refuse
from training.run.rendezvous import meet
from training.run.same_settings import settings_of
from training.run.sample import draw_sample
from training.run.saver import Saver
from training.run.start import (
    EXPECTED,
    connect,
    describe,
    log_of,
    measure_and_warm_up,
    new_monitor,
    prepare,
)
from training.run.state import Run
from training.run.step import Step, Watcher, after_step
from training.run.stop import Agreement, StopSignal, time_is_up
from training.run.trial import agreed
from training.run.watch import (
    Digests,
    GarbageCollection,
    Guard,
    Intervals,
    Profile,
    Replicas,
    Rewind,
    SlowRanks,
    Stepped,
)
from training.settings import param_groups
from training.settings.batch_size import total_iterations
from training.settings.config import Config
from training.settings.expert_options import own_sizes
from training.settings.layer_options import (
    accumulate_dtype,
    as_configured,
    context_of,
    recompute_of,
)
from training.settings.param_groups import Assigned
from training.settings.stages import waits_for
from training.settings.update_rules import mup_of, optimizer_groups
from training.settings.zero_config import zero_config


@dataclass
class LlamaRun(Run):
    """A Run whose model is a Llama, or a fork of it."""

    model: Llama


def train_step(
    run: Run, batches: list[Batch], lr: float, decoupled_lr: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Train on this rank's micro-batches of one global batch; return loss, norm, found_inf.

    batch [b, s] -> embed [s/t, b, h] -> blocks -> loss [b, s] -> backward (a bucket is reduced when
    its last gradient is complete) -> finish sums -> norm, clip -> update. The schedule decides the
    order of actions on this pipeline rank. Results are scalars on the device: nothing waits.
    """
    step, schedule = run.iteration + 1, run.schedule(len(batches))
    tokens = len(batches) * batches[0].tokens.numel() * run.grid.dp_cp.size  # including masked ones
    masked = batches[0].loss_mask is not None  # the same for all batches of a run
    if masked:  # auxiliary losses cover all tokens
        counted = sum(batch.token_count for batch in batches)
        run.model.ctx.auxiliary_losses.mask(counted, tokens, run.grid.dp_cp, run.device)
    run.sink.begin_step(len(batches))
    total = run_schedule(run, schedule, batches, tokens, f"of iteration {step}")
    run.monitor.action = f"the gradient sums of iteration {step}"
    run.sink.finish_grad_sync()
    label = Label("train_step", "loss sum")
    total = sum_in_order(sum_in_order(total, run.grid.dp_cp, label), run.grid.pp, label)
    run.monitor.action = f"the update of iteration {step}"
    grad_scale = tokens / total[1].clamp(min=1) if masked else None
    norm, found_inf = run.optimizer.step(lr, decoupled_lr, grad_scale)
    run.model.ctx.auxiliary_losses.mean = total[2] / total[1].clamp(min=1)
    return (total[0] + total[2]) / total[1].clamp(min=1), norm, found_inf


def run_schedule(
    run: Run, schedule: Schedule, batches: list[Batch], tokens: int, during: str
) -> Tensor:
    """Execute a schedule on micro-batches; return fp64 [3]: (losses, tokens, auxiliary losses).

    These are sums over the unmasked tokens; the first two are zero except on the last stage.
    Backward starts from the sum of the losses / `tokens`.
    """
    total = torch.zeros(3, dtype=torch.float64, device=run.device)
    auxiliary = run.model.ctx.auxiliary_losses
    auxiliary.begin(tokens)

    def forward(chunk: int, i: int, hidden: Tensor | None) -> Tensor:
        batch = batches[i]
        ids = (batch.tokens, batch.labels, batch.position_ids, batch.packed_seq_params)
        out = run.model(*ids, hidden=hidden, chunk=chunk)
        if not run.model.stages[chunk].loss:
            return out
        loss = out if batch.loss_mask is None else out * batch.loss_mask  # [b, s]
        total[0] += loss.detach().sum(dtype=torch.float64)
        total[1] += batch.token_count
        return loss.sum() / tokens

    run.engine.run(schedule, forward, run.model.hidden_shape(*batches[0].tokens.shape), during)
    total[2] += auxiliary.take()
    return total


def evaluate(run: Run, loader: Loader) -> tuple[float, float]:
    """Return, on every rank, the mean loss over --eval-iters global batches of held-out data, and
    the mean bytes of text per unmasked token.

    With --full-validation they cover all of the data. The loss is NaN if all tokens are masked.
    """
    during = f"of the evaluation after iteration {run.iteration}"
    run.monitor.enter("evaluation", f"the data {during}")
    total = torch.zeros(3, dtype=torch.float64, device=run.device)
    count, size, text = run.config.run.eval_iters, run.config.batch.global_batch_size, 0
    for batches in loader.global_batches(count, size):
        text += sum(batch.text_bytes for batch in batches)
        batches = [batch.to(run.device) for batch in batches]
        schedule = forward_only(run.schedule(len(batches)))
        total += run_schedule(run, schedule, batches, 1, during)
    total[2] = text / (run.grid.cp.size * run.grid.pp.size)  # each of these ranks counts all of it
    run.monitor.action = f"the sum of the losses {during}"
    loss, tokens, size = sum_in_order(sum_in_order(total, run.grid.dp_cp), run.grid.pp).tolist()
    return (loss / tokens if tokens else math.nan), size / max(tokens, 1)


def validate(run: Run, sets: Mapping[str, Loader], log: Log, saver: Saver) -> bool:
    """Evaluate on each validation set, and log its loss; --eval-iters 0 turns it off.

    Return whether the weights are the best so far, and so must be saved (--keep-best).
    """
    losses = {}
    with log.timing("validation"):
        for part, loader in sets.items():
            if loader.dataset.length is None and run.config.run.eval_iters <= 0:
                continue
            losses[part], bytes_per_token = evaluate(run, loader)
            log.validation(run.iteration, losses[part], bytes_per_token, part=part)
    return saver.evaluated(run.iteration, losses)


def evaluate_test(run: Run, loader: Loader | None, log: Log) -> None:
    """Evaluate on the test split, if there is one; --eval-iters 0 turns it off."""
    if loader is not None and run.config.run.eval_iters > 0:
        with log.timing("test"):
            log.validation(run.iteration, *evaluate(run, loader), name="test")


def name_fork(argv: list[str]) -> list[str]:
    """Add --model-file if this program is a fork that imports Llama from another file."""
    return argv if Llama.__module__ == "model.llama" else ["--model-file", getfile(Llama), *argv]


def widths(config: Config) -> Widths:
    """Return the model's sizes and, with --use-mup, the muP widths of its file."""
    file = load_model_file(config.model.model_file)
    sizes = config_of(file, model_sizes.of_model(config.model), own_sizes(config))
    mup = mup_of(config)
    return Widths(sizes, {}) if mup is None else with_mup(file, sizes, mup)


def model_provider(
    config: Config,
    ctx: LayerContext,
    recompute: Recompute | None = None,
    stages: Sequence[Stage] | None = None,
) -> Llama:
    """Build one rank's model. This is the only interface of `training` to the model."""
    file = load_model_file(config.model.model_file)
    model = file.Model(widths(config).sizes, ctx, recompute, stages)
    as_configured(config, model, ctx)
    with blaming_file(file):
        name_groups(model, file.parameter_group)
    if ctx.device == META:
        blame_forward(file, model)
    if config.optimizer.param_group:
        param_groups.apply(assigned(config), model, file.hf_names(model))
    return model


@lru_cache(maxsize=16)
def assigned(config: Config) -> dict[str, Assigned]:
    """Return the --param-group settings of the whole model's parameters, by checkpoint name."""
    o, file = config.optimizer, load_model_file(config.model.model_file)
    whole: Any = whole_model(replace(config, optimizer=replace(o, param_group=())), model_provider)
    with blaming_file(file):
        names = file.hf_names(whole)
    return param_groups.assign(o.param_group, whole, names, o.weight_decay)


def build(config: Config, grid: Grid, device: torch.device, monitor: FailureMonitor) -> LlamaRun:
    """Build the model, its gradient buckets and its optimizer on one rank."""
    p = config.parallel
    sink = ParamAndGradBuffer(grid, accumulate_dtype(config), zero_config(config))
    ctx = context_of(config, grid, device, sink)
    recompute = recompute_of(config, device)
    matrices.check(config, model_provider)
    stages = rank_stages(config, model_provider, grid.pp.rank)
    uses = uses_of(config, model_provider, grid.pp.rank)
    model = model_provider(config, ctx, recompute, stages)
    check_made_here(config, model_provider, dict(unique_parameters(model)), uses)
    sink.attach(model, model.chunk_of, uses)
    for names in sink.fill():
        monitor.action = f"drawing {len(names)} initial weights"
        model.initialize(config.run.seed, names)
    optimizer = Optimizer(
        model, sink, grid, optimizer_groups(config, widths(config).divisors),
        clip=config.optimizer.clip_grad,
        cpu_offload=p.optimizer_cpu_offload and p.device != "cpu",
        state_offload=p.optimizer_state_offload,
    )  # fmt: skip
    engine = Engine(
        grid, ctx.queue, monitor, config.run.dtype, device, ctx.interleaver,
        trained=sink.frozen.trained,
    )  # fmt: skip
    return LlamaRun(
        config, grid, device, model, engine, sink=sink, optimizer=optimizer, monitor=monitor
    )


def train(
    run: Run,
    loaders: Loaders,
    saver: Saver,
    log: Log,
    overlap: Overlap,
    total: int,
    stop_signal: StopSignal,
) -> None:
    """Loop: data, step, log and watchers, evaluate, save; stop when all ranks agree."""
    config, started = run.config, run.monitor.activity.begun
    agreement = Agreement(run.grid.world)
    rewind = Rewind(run, saver, log, agreement)
    guard = Guard(run, rewind, loaders.train, log, agreement, rerun=run_schedule)
    slow = SlowRanks(run.grid, run.device, log) if run.grid.world_size > 1 else None
    profile = None
    if config.log.profile or config.log.record_memory_history:
        profile = Profile(config, run.grid, run.engine, run.sink, agreement, log.note)
    layers = LayerValues(run) if layer_values.asked(config) else None
    error_file, check, digests = run.grid.launch.error_file, config.fault, config.log.log_digests
    asked: list[Watcher | None] = [  # in this order, up to one that rewinds
        slow,  # detects slow ranks, for the log
        log,  # the step's line
        MemoryReport(run, log),  # once
        Stepped(error_file) if error_file else None,  # once
        Intervals(config, total),  # --save-interval, --eval-interval, --train-iters, ...
        Digests(run, saver.saved.names, saver.saved.digests, log) if digests else None,
        guard,  # signals, time, bad values: stops or rewinds; uses the decisions of Intervals
        profile,
        Replicas(run, rewind, loaders.train, log, train_step) if check.check_replicas else None,
        GarbageCollection(config) if config.run.manual_gc else None,
        OverlapNotes(overlap.auto, log) if overlap.auto else None,
    ]
    watchers = [watcher for watcher in asked if watcher]
    stop_signal.begin()
    with profile or nullcontext(), slow or nullcontext():
        signal = False
        rewind.begin()  # saves the start, if the run may have to rewind to it
        while rewind.unfinished(total):  # also counts skipped steps
            step = Step.next(run)
            run.monitor.enter("data", f"reading the data of iteration {step.iteration}")
            batches = step.batches(loaders.train, run.device)
            step.waited = time.perf_counter() - step.begin

            run.monitor.enter("step", f"iteration {step.iteration}")
            step.loss, step.norm, step.found_inf = train_step(
                run, batches, step.lr, step.decoupled_lr
            )
            saver.poll()
            over = time_is_up(config.run, started) or bool(saver.failed)
            spiked = guard.spiked(step)
            # sends this step's flags to all ranks; returns those of the previous step
            step.agreed = agreement.ask(stop_signal.received, over, step.found_inf, *spiked)
            step.count(run)
            stop_signal.stepped = True

            step.auxiliary = run.model.ctx.auxiliary_losses.mean
            of_layers = partial(layers, step.size * config.model.seq_length) if layers else dict
            step.values = log.values(step, run.optimizer.params_norm, of_layers)
            decision = after_step(step, watchers)
            if decision.back:  # the run was rewound to a checkpoint
                continue
            best = decision.evaluate and validate(run, loaders.valid, log, saver)
            if decision.sample:
                draw_sample(run, loaders, log)
            if decision.save or (best and not decision.skipped):
                run.monitor.enter("save", f"saving iteration {run.iteration}")
                with log.timing("save"):
                    saver.save(
                        run.iteration, run.consumed, must=decision.stop, hurry=decision.hurry,
                        only_best=not decision.save,
                    )  # fmt: skip
            if decision.evaluate_after_save and validate(run, loaders.valid, log, saver):
                run.monitor.enter("save", f"saving iteration {run.iteration} with its loss")
                saver.save(run.iteration, run.consumed, must=True, hurry=True)
            if decision.stop:
                signal = decision.signal
                break
        if run.iteration < total:
            done, stage = f"iteration {run.iteration} of {total}", waits_for(config, run.consumed)
            next_stage = stage.name if stage else ""
            log.note(stop_signal.end(signal, done, config.checkpoint, next_stage))


def main(
    argv: list[str] | None = None, parent: int | None = None, activity: Activity | None = None
) -> int:
    """Run; return the exit code. parent: the parent process. activity: this process's Activity.

    0: the run is complete. 75: a signal stopped it early, after a save; the same command resumes it
    (0 under torchrun, which treats other codes as crashes). 1: the run failed. 2: an error in flags
    or data. A signal before the first step, or a second Ctrl-C, raises SystemExit(128+n), and ends
    a first step that takes longer than 10 s with that code.
    """
    launch, activity = Launch(), activity or Activity()
    monitor = FailureMonitor(activity=activity)
    report_to = os.environ.get(ERROR_FILE)
    by = launched_by()
    launcher = (parent or os.getppid()) if by else None
    typed = sys.argv if argv is None else [PROGRAM, *argv]
    with StopSignal(launcher, 0 if by == "torchrun" else os.EX_TEMPFAIL) as stop_signal, activity:
        try:
            launch = activity.launch = Launch.from_env()
            stop_signal.verbose = launch.rank == 0
            activity.what = "reading the flags"
            argv = name_fork(typed[1:])
            # another program runs this one, on a device without memory
            if any(use.dashed == "--rehearse" and use.on for use in foreign.uses_of(argv)):
                activity.started()  # that program prints instead
                tool = os.path.join(os.path.dirname(getfile(native)), "../tools/rehearse.py")
                return subprocess.call([sys.executable, tool, os.path.abspath(__file__), *argv])
            config = parse(argv, launch.world, own_flags(model_file(argv)), of_checkpoint)
            grid = make_grid(config, launch)
            if config.run.dry_run:
                activity.what = "the dry run"
                text = forecast("dry_run").report(config, sys.modules[__name__])
                print(printable(text, lines=True))
                if config.run.memory_picture:
                    print(forecast("memory_picture").draw(config, sys.modules[__name__]))
                return 0
            config, device, loaders, digests = prepare(
                config, grid, shares_cores(), note_of(grid.rank), activity
            )
            activity.what = "comparing the memory of this host with what the run needs"
            memory_report.check_host(
                config, grid, device,
                lambda: forecast("dry_run").memory_of_ranks(config, sys.modules[__name__]),
            )  # fmt: skip
            activity.what = "checking whether the run can be resumed"
            file = load_model_file(config.model.model_file)
            whole = whole_model(config, model_provider)
            with blaming_file(file):
                resumable.check(config, digests, whole, file, saved_config)
            digests["model_digest"] = digest(file)
            stop_signal.check()
        except (ValueError, OSError) as error:
            stop_signal.check()
            stop_signal.verbose = False  # torchrun sends SIGTERM to all ranks once one has ended
            return refuse(error, launch, 2, report_to, alone=True, typed=typed)
        timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
        try:
            activity.what = "meeting the other ranks"
            store = None
            if launch.world > 1:
                shared = settings_of(config, digests | agreed(device), launch)
                store = meet(timeout, launch, activity=activity, settings=shared)
            monitor = new_monitor(config, grid, launch, store, report_to, activity)
            with monitor, memory_report.enough():
                monitor.action = "connecting the process groups"
                connect(config, grid, device, store, timeout, note_of(grid.rank))
                monitor.action = "building the model"
                work(build(config, grid, device, monitor), loaders, digests, stop_signal)
                grid.close()
        except (ValueError, FloatingPointError) as error:
            stop_signal.check()
            if stop_signal.training and not isinstance(error, EXPECTED):
                raise
            stop_signal.verbose = False
            return refuse(error, launch, 1 if stop_signal.training else 2, report_to)
        except CommunicationError:
            if monitor.first is None:
                raise
            write_error_file(str(monitor.first), report_to)
            return 1
    return stop_signal.code


def forecast(file: str) -> Any:
    """Return a module of forecast/, which records steps of this program."""
    return import_module(f"forecast.{file}")


def work(run: LlamaRun, loaders: Loaders, digests: dict[str, str], stop_signal: StopSignal) -> None:
    """Load a checkpoint if there is one, train, test, and close the saver and the log."""
    config, model, note = run.config, run.model, note_of(run.grid.rank)
    run.monitor.action = "describing the run"
    describe(run, model_provider, note)
    file = load_model_file(config.model.model_file)
    samples = config.run.eval_iters * config.batch.global_batch_size
    evaluated_on = loaders.evaluated_on(samples) if config.checkpoint.keep_best is not None else {}
    saver = Saver(
        config, model.ctx, model, run.optimizer, file.hf_names(model), digests=digests, note=note,
        hf_config=file.hf_config, from_hf_config=file.from_hf_config,
        activity=run.monitor.activity, evaluated_on=evaluated_on,
    )  # fmt: skip
    run.monitor.action = "beginning, or loading a checkpoint"
    run.iteration, run.consumed = saver.begin()
    overlap = measure_and_warm_up(run, saver, model_provider, run_schedule, note)
    total = total_iterations(config, run.iteration, run.consumed)
    run.monitor.action = "opening the log"
    log = log_of(run, model_provider, total, tested=loaders.test is not None)
    with log, saver:
        skip = config.run.skip_train
        if skip or (config.run.eval_at_start and run.iteration < total):
            if validate(run, loaders.valid, log, saver):
                run.monitor.enter("save", "saving what the run begins with")
                with log.timing("save"):
                    saver.save(run.iteration, run.consumed, must=False, only_best=True)
        if not skip:
            train(run, loaders, saver, log, overlap, total=total, stop_signal=stop_signal)
        run.monitor.enter("save", "the end of the run")
        if skip or (config.run.eval_interval and run.iteration == total):
            evaluate_test(run, loaders.test, log)
        if line := saver.best_line():
            log.note(line)
        log.finished(run.iteration, skip)


if __name__ == "__main__":
    gc.freeze()  # so that no collection scans the 160,000 objects of imports
    gc.enable()
    run_main = partial(main, parent=PARENT, activity=ACTIVITY)
    as_process(run_main, os.environ.get(ERROR_FILE))
