# SPDX-License-Identifier: Apache-2.0
"""Check the run: its faults, learning rate, log and profile, and the files that it names.

The check of files makes and writes nothing. A dry run may name files of another machine, so only
the form of the flags is checked.
"""

import os
import shlex
from pathlib import Path

import torch

from mpu.torch_private import TorchLacks, memory_history
from training.checkpoint import refuse_to_save
from training.checkpoint.manifest import MANIFEST, STEP
from training.data.blend import parse_blend
from training.data.build import validation_sets
from training.data.loss_mask import SUFFIX
from training.data.not_tokens import instead
from training.data.split import parse_split
from training.files.owned import json_lines, refuse
from training.files.untrusted import SETTINGS, nothing_downloaded, read_plain
from training.settings.arguments import CHANGES, CheckpointConfig, DataConfig
from training.settings.config import Config, UsageError
from training.settings.setting import flag_of


def check_faults(config: Config) -> None:
    """Raise UsageError for --iterations-to-skip or --hang-timeout out of range."""
    if 0 in config.fault.iterations_to_skip:
        raise UsageError("--iterations-to-skip 0: iterations count from 1")
    seconds, minutes = config.fault.hang_timeout, config.parallel.distributed_timeout_minutes
    if seconds is not None and seconds > 60 * minutes:
        raise UsageError(
            f"--hang-timeout {seconds:g}: must be at most the {60 * minutes} s of "
            f"--distributed-timeout-minutes {minutes}, after which the run ends in any case"
        )


def check_learning_rate(config: Config) -> None:
    """Raise UsageError for a curve whose ends or lengths contradict each other."""
    o = config.optimizer
    pairs = [
        ("--min-lr", o.min_lr, "--lr", o.lr),
        ("--lr-warmup-init", o.lr_warmup_init, "--lr", o.lr),
    ]
    if o.decoupled_lr is not None:
        floor = o.min_lr if o.decoupled_min_lr is None else o.decoupled_min_lr
        name = "--min-lr" if o.decoupled_min_lr is None else "--decoupled-min-lr"
        pairs.append((name, floor, "--decoupled-lr", o.decoupled_lr))
        pairs.append(("--lr-warmup-init", o.lr_warmup_init, "--decoupled-lr", o.decoupled_lr))
    for low, a, high, b in pairs:
        if a > b:
            raise UsageError(f"{low} {a} is more than {high} {b}")
    unit = "iters" if config.batch.train_iters is not None else "samples"
    warmup = getattr(o, f"lr_warmup_{unit}")
    decay = getattr(o, f"lr_decay_{unit}") or getattr(config.batch, f"train_{unit}")
    if warmup >= decay:
        raise UsageError(
            f"--lr-warmup-{unit} {warmup} must be less than the decay's length "
            f"(--lr-decay-{unit}, or else --train-{unit}), {decay}"
        )
    if o.lr_decay_style == "WSD":
        last = getattr(o, f"lr_wsd_decay_{unit}")
        if last is None:
            raise UsageError(
                f"--lr-wsd-decay-{unit} is missing: --lr-decay-style WSD needs the length of its "
                "last part"
            )
        if last > decay:
            raise UsageError(
                f"--lr-wsd-decay-{unit} {last} is more than the decay's length, {decay}"
            )


def check_run(config: Config) -> None:
    """Raise UsageError for invalid flags of a resume, an evaluation, a log or a profile."""
    log, checkpoint = config.log, config.checkpoint
    for what in checkpoint.allow_change:
        if what not in CHANGES:
            raise UsageError(f"--allow-change {what}: must be among {', '.join(CHANGES)}")
    _branch(checkpoint)
    _evaluation(config)
    if log.profile and log.profile_step_start >= log.profile_step_end:
        raise UsageError(
            f"--profile-step-end {log.profile_step_end} must be more than "
            f"--profile-step-start {log.profile_step_start}"
        )
    for rank in log.profile_ranks if log.profile or log.record_memory_history else ():
        if rank >= config.parallel.world_size:
            raise UsageError(
                f"--profile-ranks {rank}: ranks go from 0 to {config.parallel.world_size - 1}"
            )
    picture = config.run.memory_picture
    if picture is not None and not picture.endswith((".svg", ".png")):
        raise UsageError(f"--memory-picture {picture}: a picture must be a .png or .svg file")
    here = config.parallel.device is None and not config.run.dry_run  # a dry run is for any machine
    if (every := log.log_layer_rms_interval) and every % log.log_interval:
        raise UsageError(
            f"--log-layer-rms-interval {every} must be a multiple of --log-interval "
            f"{log.log_interval}, whose lines have these numbers"
        )
    if log.record_memory_history and (
        config.parallel.device == "cpu" or (here and not torch.cuda.is_available())
    ):
        raise UsageError(
            "--record-memory-history needs --device cuda: it records CUDA's allocator, and memory "
            "of a CPU has no such record; --dry-run counts a rank's memory by kind, and --rehearse "
            "predicts a GPU's peak"
        )
    if log.record_memory_history:
        try:
            memory_history()
        except TorchLacks as error:
            raise UsageError(f"{error}: omit the flag") from None


def _evaluation(config: Config) -> None:
    """Raise UsageError if --keep-best has nothing to compare."""
    c = config.checkpoint
    if c.keep_best is not None:
        _best(f"--keep-best {c.keep_best}".rstrip(), config)


def check_evaluated(config: Config) -> None:
    """Raise UsageError if a flag asks for evaluations and there is nothing to evaluate on."""
    run, d, c = config.run, config.data, config.checkpoint
    asked = {
        "--eval-at-start": run.eval_at_start,
        "--skip-train": run.skip_train,
        "--keep-best": c.keep_best is not None,
    }
    for flag in (flag for flag, given in asked.items() if given):
        if run.eval_iters <= 0 and not d.full_validation:
            raise UsageError(
                f"{flag} evaluates on --eval-iters batches, and --eval-iters {run.eval_iters} asks "
                "for none: give a number >= 1, or --full-validation"
            )
        train = bool(d.train_data_path or d.data_stages)
        if not has_validation(d.split, train, bool(d.valid_data_path)):
            raise UsageError(
                f"{flag} has nothing to evaluate on: give the second number of --split a share, or "
                "--valid-data-path"
            )


def _best(flag: str, config: Config) -> None:
    """Raise UsageError if --keep-best names no validation set."""
    d, c = config.data, config.checkpoint
    sets = list(validation_sets(d.valid_data_path))
    if not d.multiple_validation_sets:
        sets = []
    if c.keep_best and c.keep_best not in sets:
        there = f"the sets are {', '.join(sets)}" if sets else "give it without a name: there is "
        raise UsageError(
            f"{flag}: no validation set has this name; {there}"
            + "one set, without --multiple-validation-sets" * (not sets)
        )


def _branch(c: CheckpointConfig) -> None:
    """Raise UsageError for a branch that would write into its trunk, or could not be resumed."""
    if c.branch_from is None:
        return
    if c.save is None or c.load != c.save:
        raise UsageError(
            f"--branch-from {c.branch_from} needs --save and --load with one directory, in which "
            "the branch is saved and resumed"
        )
    if os.path.realpath(c.save) == os.path.realpath(c.branch_from):
        raise UsageError(
            f"--branch-from {c.branch_from}: --save is the same directory; a branch is saved in "
            "another one"
        )


def check_paths(config: Config) -> None:
    """Raise UsageError, naming flag and path, for a missing input or an output in the way."""
    _data(config)
    if not config.run.dry_run:
        _directories(config)


def _data(config: Config) -> None:
    d, dry = config.data, config.run.dry_run
    blends = {
        name: getattr(d, name)
        for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    }
    given = d.mock_data or d.data_path or d.train_data_path or d.data_stages
    if not given and not dry:
        raise UsageError("no data: give --data-path, --train-data-path or --mock-data")
    if d.data_stages and d.data_order == "megatron":
        raise UsageError(
            "--data-order megatron has no stages (--data-stages): Megatron-LM's order is made for "
            "one blend and a fixed number of samples"
        )
    for stage in config.stages:
        _blend(
            f"--data-stages {d.data_stages}: stage {stage.name!r}:", stage.train_data_path, d, dry
        )
    if config.stages:
        _lengths(config)
    for name, paths in blends.items():
        if paths:
            _blend(flag_of(name), paths, d, dry)
    if d.split is not None:
        _split(d.split)
    _validation(d)
    if d.tokenizer_type is None and not dry:
        raise UsageError(
            "--tokenizer-type is missing: it says how large the vocabulary is and which token "
            "ends a document"
        )
    if d.tokenizer_type == "NullTokenizer" and config.model.vocab_size is None:
        raise UsageError("--vocab-size is missing: NullTokenizer has no file to read it from")
    if d.tokenizer_type not in (None, "NullTokenizer"):
        flag = "--vocab-file" if d.tokenizer_type == "GPT2BPETokenizer" else "--tokenizer-model"
        if d.tokenizer_model is None:
            raise UsageError(f"{flag} is missing: {d.tokenizer_type} reads that file")
        if not os.path.exists(d.tokenizer_model) and not dry:
            why = nothing_downloaded(d.tokenizer_model)
            raise UsageError(f"{flag} {d.tokenizer_model}: no such file ({why})")
        if d.merge_file is not None and not os.path.exists(d.merge_file) and not dry:
            raise UsageError(f"--merge-file {d.merge_file}: no such file (nothing is downloaded)")


def _lengths(config: Config) -> None:
    """Raise UsageError if stages need processes of their own and no resume could continue."""
    file, c = config.data.data_stages, config.checkpoint
    differ = len({stage.settings for stage in config.stages}) > 1
    trains = not config.run.dry_run and not config.run.skip_train
    if differ and trains and not (c.save and c.load == c.save):
        raise UsageError(
            f"--data-stages {file}: its stages differ in seq_length or rotary positions, so the "
            "run ends between them: give --save and --load with one directory, from which the same "
            "command resumes"
        )


def _validation(d: DataConfig) -> None:
    """Raise UsageError for validation sets that cannot be told apart or have no end."""
    if d.multiple_validation_sets:
        _unweighted("--multiple-validation-sets", "--valid-data-path", d.valid_data_path)
    if d.full_validation:
        _unweighted("--full-validation", "--data-path", d.data_path)
        _unweighted("--full-validation", "--valid-data-path", d.valid_data_path)


def _unweighted(who: str, flag: str, paths: tuple[str, ...]) -> None:
    if paths and parse_blend(paths, flag)[1] is not None:
        raise UsageError(
            f"{who} takes no weights, as it reads each set separately: give {flag} prefixes alone"
        )


def has_validation(split: str | None, train: bool, valid: bool) -> bool:
    """Return whether there is validation data: a share of --split, or --valid-data-path.

    train, valid: whether these data paths are given. Raises UsageError for an invalid --split.
    """
    return valid if train else split is None or _split(split)[1] > 0


def _split(text: str) -> tuple[float, float, float]:
    try:
        return parse_split(text)
    except ValueError as error:
        raise UsageError(str(error)) from None


def shard_list(path: str, dry: bool) -> tuple[str, ...]:
    """Return the words in the file --data-args-path. dry: if it is missing, return its name."""
    try:
        lines = read_plain(path, SETTINGS).decode().splitlines()
    except OSError as error:
        if dry:
            return (path,)
        raise UsageError(f"--data-args-path {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"--data-args-path {path}: it is not a list of names ({error})") from None
    try:
        words = tuple(word for line in lines for word in shlex.split(line, comments=True))
    except ValueError as error:
        raise UsageError(f"--data-args-path {path}: {error}") from None
    if not words:
        raise UsageError(f"--data-args-path {path}: it names no data")
    return words


def _blend(flag: str, paths: tuple[str, ...], d: DataConfig, dry: bool) -> None:
    """Raise UsageError for a blend that cannot be parsed, or a prefix without its two files."""
    try:
        prefixes, _ = parse_blend(paths, flag)
    except ValueError as error:
        raise UsageError(str(error)) from None
    for prefix in prefixes:
        stem = prefix.removesuffix(".bin").removesuffix(".idx")
        missing = [stem + e for e in (".bin", ".idx") if not (dry or os.path.isfile(stem + e))]
        if missing:
            there = instead(stem, d.tokenizer_type, d.tokenizer_model, d.merge_file)
            raise UsageError(f"{flag} {prefix}: there is no file {missing[0]} ({there})")
        if stem != prefix:
            ending = prefix.removeprefix(stem)
            raise UsageError(f"{flag} {prefix}: give the prefix, without {ending}")
        if stem.endswith(SUFFIX):
            pair = stem.removesuffix(SUFFIX)
            raise UsageError(f"{flag} {prefix}: it is the loss mask of {pair}: name {pair} alone")


def _directories(config: Config) -> None:
    """Raise UsageError for outputs that could not be written."""
    log = config.log
    saves = None if config.run.skip_train else config.checkpoint
    directories = {
        "--save": saves and saves.save,
        "--save-hf": saves and saves.save_hf,
        "--tensorboard-dir": log.tensorboard_dir,
        "--data-cache-path": _to_make(config.data.data_cache_path),
    }
    files = {"--log-json": log.log_json, "--memory-snapshot-path": log.memory_snapshot_path}
    for flag, path in (directories | files).items():
        if path:
            whole = os.path.abspath(path)
            _writable(f"{flag} {path}", os.path.dirname(whole) if flag in files else whole)
    if log.log_json and os.path.isdir(log.log_json):
        raise UsageError(f"--log-json {log.log_json} is a directory: give a file")
    if config.run.dry_run or config.rehearse.rehearse:  # nothing is written
        return
    try:
        if log.log_json:
            refuse("--log-json", log.log_json, json_lines("iteration"), "the log of a run")
        if saves is not None:
            _checkpoints(saves)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _to_make(path: str | None) -> str | None:
    """Return a directory that must be made, else None: an existing cache may be another user's."""
    return None if path and os.path.isdir(path) else path


def _checkpoints(c: CheckpointConfig) -> None:
    """Raise ValueError if the directory of --save or --save-hf holds something else."""
    if c.save:
        refuse_to_save(Path(c.save), "--save")
    if not c.save_hf:
        return
    sources = {
        "--save": c.save,
        "--load": c.load,
        "--pretrained-checkpoint": c.pretrained_checkpoint,
        "--branch-from": c.branch_from,
    }
    for flag, path in sources.items():
        if path and os.path.realpath(path) == os.path.realpath(c.save_hf):
            raise UsageError(
                f"--save-hf {c.save_hf} is also the directory of {flag} {path}, where its folders "
                "would have the names of checkpoints: give another directory"
            )
    refuse_to_save(Path(c.save_hf), "--save-hf")
    root = Path(os.path.realpath(c.save_hf))
    for name in sorted(os.listdir(root)) if root.is_dir() else ():
        if STEP.fullmatch(name) and (root / name / MANIFEST).is_file():
            raise UsageError(
                f"--save-hf {c.save_hf} holds checkpoints ({name}): give another directory"
            )


def _writable(named: str, standing: str) -> None:
    """Raise UsageError if a directory could not be made or written; make nothing.

    named: flag and value. standing: the directory.
    """
    while not os.path.lexists(standing):
        standing = os.path.dirname(standing)
    if not os.path.isdir(standing):
        raise UsageError(f"{named}: {standing} is not a directory")
    if not os.access(standing, os.W_OK | os.X_OK):
        raise UsageError(f"{named}: {standing} is not writable by this user")
