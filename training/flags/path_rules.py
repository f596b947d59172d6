# SPDX-License-Identifier: Apache-2.0
"""Check, before a run starts, that data and tokenizer exist and that outputs can be written.

The check opens, makes and writes nothing. A dry run may name files of another machine, so it checks
only the form of the flags.
"""

import glob
import os
import shlex

from training.config import Config, UsageError
from training.data.blend import parse_blend
from training.data.split import parse_split
from training.untrusted import SETTINGS, read_plain


def check(config: Config) -> None:
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
    if not d.mock_data and not d.data_path and not d.train_data_path and not dry:
        raise UsageError("no data: give --data-path, --train-data-path or --mock-data")
    for name, paths in blends.items():
        if paths:
            _blend("--" + name.replace("_", "-"), paths, dry)
    shares = _split(d.split) if d.split is not None else (1.0, 1.0, 0.0)
    if config.run.eval_interval and config.run.eval_iters > 0:
        if shares[1] == 0 or (d.train_data_path and not d.valid_data_path):
            raise UsageError(
                f"--eval-interval {config.run.eval_interval} has nothing to evaluate on: give the "
                "second number of --split a share, or --valid-data-path"
            )
    if d.tokenizer_type is None and not dry:
        raise UsageError(
            "--tokenizer-type is missing: it says how large the vocabulary is and which token "
            "ends a document"
        )
    if d.tokenizer_type == "NullTokenizer" and config.model.vocab_size is None:
        raise UsageError("--vocab-size is missing: NullTokenizer has no file that says it")
    if d.tokenizer_type not in (None, "NullTokenizer"):
        flag = "--vocab-file" if d.tokenizer_type == "GPT2BPETokenizer" else "--tokenizer-model"
        if d.tokenizer_model is None:
            raise UsageError(f"{flag} is missing: {d.tokenizer_type} reads that file")
        if not os.path.exists(d.tokenizer_model) and not dry:
            raise UsageError(f"{flag} {d.tokenizer_model}: no such file (nothing is downloaded)")
        if d.merge_file is not None and not os.path.exists(d.merge_file) and not dry:
            raise UsageError(f"--merge-file {d.merge_file}: no such file (nothing is downloaded)")


def _split(text: str) -> tuple[float, float, float]:
    try:
        return parse_split(text)
    except ValueError as error:
        raise UsageError(str(error)) from None


def shard_list(path: str, dry: bool) -> tuple[str, ...]:
    """Return the words of --data-args-path. dry: without the file its name stands for them."""
    try:
        lines = read_plain(path, SETTINGS).decode().splitlines()
    except OSError as error:
        if dry:
            return (path,)
        raise UsageError(f"--data-args-path {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"--data-args-path {path}: it is no list of names ({error})") from None
    try:
        words = tuple(word for line in lines for word in shlex.split(line, comments=True))
    except ValueError as error:
        raise UsageError(f"--data-args-path {path}: {error}") from None
    if not words:
        raise UsageError(f"--data-args-path {path}: it names no data")
    return words


def _blend(flag: str, paths: tuple[str, ...], dry: bool) -> None:
    """Refuse a blend that cannot be parsed, or a prefix without its two files."""
    try:
        prefixes, _ = parse_blend(paths, flag)
    except ValueError as error:
        raise UsageError(str(error)) from None
    for prefix in prefixes:
        for ending in (".bin", ".idx"):
            if prefix.endswith(ending):
                raise UsageError(f"{flag} {prefix}: give the prefix, without {ending}")
            if not dry and not os.path.isfile(prefix + ending):
                raise UsageError(
                    f"{flag} {prefix}: there is no file {prefix}{ending} ({_instead(prefix)})"
                )


def _instead(prefix: str) -> str:
    """Return what to do without a pair: the longer prefix that is there, or how one is made."""
    made = glob.glob(f"{glob.escape(prefix)}_*_document.bin")  # --output-prefix, key
    if made:
        return f"did you mean {min(made).removesuffix('.bin')}?"
    return "tools/preprocess_data.py makes a .bin/.idx pair"


def _directories(config: Config) -> None:
    """Refuse outputs that could not be written."""
    log = config.log
    history = log.memory_snapshot_path
    directories = {
        "--save": config.checkpoint.save,
        "--tensorboard-dir": log.tensorboard_dir,
        "--data-cache-path": config.data.data_cache_path,
        "--data-local-copy": config.data.data_local_copy,
        "--log-json": log.log_json and os.path.dirname(os.path.abspath(log.log_json)),
        "--memory-snapshot-path": history and os.path.dirname(os.path.abspath(history)),
    }
    for flag, path in directories.items():
        if path:
            _writable(flag, path)
    if log.log_json and os.path.isdir(log.log_json):
        raise UsageError(f"--log-json {log.log_json} is a directory: give a file")


def _writable(flag: str, path: str) -> None:
    """Refuse a directory that could not be made or written; make nothing."""
    standing = os.path.abspath(path)
    while not os.path.lexists(standing):
        standing = os.path.dirname(standing)
    if not os.path.isdir(standing):
        raise UsageError(f"{flag} {path}: {standing} is not a directory")
    if not os.access(standing, os.W_OK | os.X_OK):
        raise UsageError(f"{flag} {path}: {standing} is not writable by this user")
