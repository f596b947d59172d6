# SPDX-License-Identifier: Apache-2.0
"""What a rank does up to its first step, in the order of main() and work() of pretrain_llama.py:

    prepare               alone: the device, a trial call of each kernel, the tokenizer, the data
    meet                  all ranks find each other, and have the same settings (same_settings.py)
    new_monitor, connect  the failure channel, the process groups, memory that ranks share
    build                 the model, its buckets, its optimizer (pretrain_llama.py)
    describe              prints a summary of the run
    Saver.begin           takes the lock of --save, loads a checkpoint
    measure_and_warm_up   chooses overlap methods; runs kernels once before a pipeline's messages
    log_of                opens the log

Trial calls, measurements and the warm-up build their layers by the same `context_of` as the step.
"""

import json
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import mpu
from mpu import needs
from mpu.accelerators import missing
from mpu.comm.transport import CommunicationError
from mpu.connect import share, share_gpus
from mpu.grid import Grid
from mpu.launch import Launch
from mpu.layers import fused_gpu
from mpu.layers.attention.backends import FLAG
from mpu.param import PlacementError
from mpu.zero.gradient_check import GradientCheck
from training.checkpoint import CheckpointError
from training.checkpoint.find import below, candidates, nothing_at, places, resumed
from training.data.build import Loaders, build_loaders
from training.data.dataset import DataError, Dataset
from training.data.stage_datasets import Staged
from training.data.tokenizer import tokenizer_for
from training.data.tokenizer_files import digests_of
from training.faults.activity import Activity
from training.faults.hang_watch import HangWatch
from training.faults.monitor import FailureMonitor
from training.run import context_parallel, matrices, memory_report, pipeline_stages, same_run
from training.run.attention import prepare_attention
from training.run.autotune import overlap
from training.run.autotune.overlap import Note, Overlap
from training.run.device import choose_device
from training.run.log import Log
from training.run.model_profile import ModelProvider, model_profile, whole_model
from training.run.output import check_wandb_login
from training.run.rendezvous import RendezvousError
from training.run.restarts import write_error_file
from training.run.saver import Saver
from training.run.state import Run, RunSchedule
from training.run.trial import try_calls
from training.run.warm_up import warm_up
from training.run.watch.intervals import still_due
from training.settings import param_groups
from training.settings.config import Config, UsageError
from training.settings.float8_layers import check_device
from training.settings.layer_options import accumulate_dtype
from training.settings.stages import name_at, tokens_at

ROOT = Path(__file__).resolve().parents[2]
# errors that a user can fix: printed as one sentence, without a traceback
EXPECTED = (UsageError, DataError, CheckpointError, FloatingPointError, PlacementError)


def prepare(
    config: Config,
    grid: Grid,
    share_cores: bool,
    note: Callable[[str], None],
    activity: Activity | None = None,
) -> tuple[Config, torch.device, Loaders, dict[str, str]]:
    """Do everything that needs no other rank: choose the device, build the tokenizer and loaders.

    Quick checks come first; reading a whole corpus, if necessary, comes last.

    share_cores: on a CPU, take only this rank's share of the node's cores. activity: prints slow
    operations. Returns the config with its vocabulary, the device, the loaders, and hashes that all
    ranks must share.
    """
    if Path(mpu.__path__[0]).resolve().parent != ROOT:
        raise UsageError(
            f"`import mpu` found {mpu.__path__[0]}, not {ROOT / 'mpu'}: remove the other mpu from "
            "PYTHONPATH"
        )
    if line := needs.untested(torch.__version__):
        note(line)
    grid.launch.check_rendezvous()
    activity = activity or Activity(grid.launch)
    activity.what = "starting the device"
    device = choose_device(config, grid.launch, share_cores, note)
    p, dtype = config.parallel, config.run.dtype
    activity.what = "choosing kernels, and compiling the first one"
    te = "te" if p.attention_backend == "te" else ""
    if why := (
        missing("--optimizer-backend", p.optimizer_backend, device.type, accumulate_dtype(config))
        or missing("--norm-backend", p.norm_backend, device.type, dtype)
        or (te and missing(FLAG, te, device.type, dtype))
    ):
        raise UsageError(why)
    prepare_attention(config, device, note)
    check_device(config, device)
    activity.what = "looking for checkpoints"
    check_early(config, grid.rank == 0)
    activity.what = "loading the tokenizer"
    tokenizer = tokenizer_for(config)
    config = config.with_vocab(tokenizer.vocab_size)
    if device.type == "cuda":
        activity.what = "compiling and calling each kind of kernel"
        try_calls(config, device, note)
    part = (grid.cp.rank, grid.cp.size)
    activity.what = "opening the data"
    loaders = build_loaders(
        config, tokenizer, grid.dp.rank, grid.dp.size, note, part,
        activity=activity, begun=partial(begun, config),
    )  # fmt: skip
    digests = {**digests_of(tokenizer), "data_digest": loaders.digest}
    return config, device, loaders, {**digests, **corpus_digests(loaders.train.dataset)}


def corpus_digests(data: Dataset) -> dict[str, str]:
    """Return the hashes of the training data that a checkpoint stores."""
    digests = {"corpus_digest": data.corpus}
    digests["corpus_sketch"] = data.sketch  # compared with older checkpoints
    if isinstance(data, Staged):
        digests["stage_corpora"] = json.dumps(data.corpora)
    return digests


def begun(config: Config, split: str, train: Dataset) -> bool:
    """Return whether the run resumes one that read the same data in the same order.

    split: "train", or the name of held-out data.
    """
    c = config.checkpoint
    found = resumed(c.load, c.branch_from, c.ckpt_step, c.finetune)
    if found is None:
        return False
    return same_run.same_order(found, config, corpus_digests(train), held_out=split != "train")


def check_early(config: Config, logs: bool) -> None:
    """Raise ValueError for mistakes that would otherwise appear after the ranks built a model.

    It looks at names only: where checkpoints should be and, on the rank that logs, which packages
    are installed, and whether W&B has a login.
    """
    c, log = config.checkpoint, config.log
    found: list[str] = []
    for flag, root, step in places(c.load, c.branch_from, c.ckpt_step, c.pretrained_checkpoint):
        found += candidates(root, step, flag)[0]
    # if folders below --load hold checkpoints, the user meant to continue one of those runs
    meant = c.load and (config.run.skip_train or (c.load != c.save and below(c.load)))
    needed = {
        "--skip-train --load" if config.run.skip_train else "--load": c.load if meant else None,
        "--branch-from": c.branch_from,
        "--pretrained-checkpoint": c.pretrained_checkpoint,
    }
    for flag, place in needed.items() if not found else ():
        if place:
            raise nothing_at(flag, place)
    if not logs:
        return
    for flag, wanted, package in (
        ("--tensorboard-dir", log.tensorboard_dir, "tensorboard"),
        ("--wandb-project", log.wandb_project, "wandb"),
    ):
        if wanted and find_spec(package) is None:
            raise UsageError(
                f"{flag} {wanted}: the package {package} is not installed; pip install {package}, "
                "or omit the flag"
            )
    if log.wandb_project:
        check_wandb_login(log.wandb_project)


def new_monitor(
    config: Config,
    grid: Grid,
    launch: Launch,
    store: Any,
    error_file: str | None,
    activity: Activity | None = None,
) -> FailureMonitor:
    """Return this rank's end of the failure channel. store: where the ranks met, None for one rank.

    activity: this rank's activity, which it reports to the others. error_file: where torchrun looks
    for the cause. Raises RendezvousError if this rank cannot join the channel.
    """
    deadline = 60.0 * config.parallel.distributed_timeout_minutes
    watch = HangWatch(grid.waits, deadline, config.fault.hang_timeout)
    if store is None:
        return FailureMonitor(watch=watch, activity=activity)
    point = launch.point

    def on_failure(cause: str) -> None:
        write_error_file(cause, error_file)

    try:
        return FailureMonitor(
            launch.rank, launch.world, store, point.host, point.secret,
            silence=config.fault.peer_timeout, watch=watch, tell=on_failure, activity=activity,
        )  # fmt: skip
    except CommunicationError as error:
        raise RendezvousError(f"rank {launch.rank}: {error}") from None


def connect(
    config: Config,
    grid: Grid,
    device: torch.device,
    store: Any,
    timeout: timedelta,
    note: Callable[[str], None],
) -> None:
    """Join the process groups, then set up memory that ranks share. Raises CommunicationError.

    On a CPU this is the host's shared memory; on GPUs it is the memory that the overlap kernels
    write to, if --tp-comm-overlap asks for them. note: called with a line about each axis.
    """
    try:
        grid.connect(device, store, timeout)
        c = config.checkpoint
        if c.async_save or (c.save and c.save_hf):
            grid.add_background(timeout)
    except RuntimeError as error:
        raise CommunicationError(f"the ranks did not connect: {error}") from error
    p, lines = config.parallel, []
    if path := p.nccl_communicator_config_path:
        given = ", ".join(f"{axis} {dict(one)}" for axis, one in grid.nccl.items())
        lines.append(f"NCCL settings of {path}: {given if grid.backend == 'nccl' else 'not used'}")
    if device.type == "cpu" and not p.no_shared_memory:
        lines += share(grid, timeout)
    elif device.type == "cuda" and p.tp_comm_overlap in ("auto", "symmetric"):
        lines += share_gpus(grid, device, timeout)
    for line in lines:
        note(line)


def describe(run: Run, provider: ModelProvider, note: Note) -> None:
    """Print a summary of the run: its stages, optimizer, parameters, buckets and kernels."""
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
    if run.sink.frozen.names or run.config.optimizer.param_group:  # else all are treated alike
        whole = whole_model(run.config, provider)
        for line in param_groups.lines(dict(whole.named_parameters())):
            note(line)
    for name in run.sink.frozen.overruled:
        note(
            f"--model-file freezes only one of {name} and the embedding that it is tied to: the "
            "embedding's setting is used; give both the same"
        )
    if reason := fused_gpu.without(run.device):
        note(f"fused operations are not available, so the run is slower: {reason}")


def measure_and_warm_up(
    run: Run, saver: Saver, provider: ModelProvider, run_schedule: RunSchedule, note: Note
) -> Overlap:
    """Choose each matmul's overlap method, then load kernels before the first message.

    The methods that the checkpoint recorded are used; otherwise they are measured, and the next
    checkpoint records them. This also arms the gradient check of the first step. All ranks call it.
    """
    config, ctx = run.config, run.model.ctx
    run.sink.check = GradientCheck(run.grid, note)
    run.monitor.action = "choosing the overlap of each matmul"
    found = overlap.choose_methods(run.module, ctx, config, note, saver.saved.overlap_choices)
    saver.saved.overlap_choices = found.chosen.choices
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
        stage_at=partial(name_at, config) if config.stages else None,
        still_due=lambda iteration: still_due(config, iteration, total) | tests,
        on_line=run.monitor.activity.started,
    )  # fmt: skip
