# SPDX-License-Identifier: Apache-2.0
"""What a run prints and logs to: standard output, a file of JSON lines, TensorBoard, W & B.

No output that fails ends the run. On standard output a full disk, a reader that left its pipe and a
terminal that is gone raise OSError: the lines are lost then, and what the buffer still holds is
written where a later line finds room. The others raise what failed, and `Log` drops them.
"""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from training.files.owned import json_lines, refuse
from training.files.untrusted import owner_only, private

T = TypeVar("T")


def say(line: str) -> None:
    """Print a line now, or lose it."""
    with suppress(OSError):
        print(line, flush=True)


def flush() -> None:
    """Write out what is buffered for standard output and error, or lose it."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # it was closed before the start
            with suppress(OSError):
                stream.flush()


def write_line(file: Any, line: str) -> None:
    """Write a line of the JSON log and hand it to the system."""
    file.write(line + "\n")
    file.flush()


def write_scalars(writer: Any, numbers: dict[str, Any], step: int) -> None:
    """Queue numbers for TensorBoard's thread; raises what that thread failed with."""
    for key, value in numbers.items():
        writer.add_scalar(key, value, step)


def hushed(make: Callable[[], T]) -> T:
    """Return what `make` makes; an error that ends one of its threads prints no traceback.

    TensorBoard raises the error of its thread again at the next write, where `Log` tells it.
    """
    before, hook = set(threading.enumerate()), threading.excepthook
    made = make()
    threads = set(threading.enumerate()) - before

    def report(error: threading.ExceptHookArgs) -> None:
        if error.thread not in threads:
            hook(error)

    threading.excepthook = report
    return made


def open_json(path: Path, flag: str = "--log-json") -> Any:
    """Open a file of JSON lines to append, dropping a last line that a killed run left torn.

    Raises ValueError where it cannot be written, or holds something else.
    """
    refuse(flag, path, json_lines("iteration"), "the log of a run")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            content = path.read_bytes()
            last = content.rfind(b"\n") + 1
            if last < len(content):
                os.truncate(path, last)
        return open(path, "a", encoding="utf-8", opener=private)
    except OSError as error:
        raise ValueError(f"{flag} {path}: cannot be written ({error.strerror})") from None


def open_tensorboard(directory: str, start_iteration: int) -> Any:
    """Open TensorBoard's writer, hiding events after the iteration that the run resumes from."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            f"--tensorboard-dir {directory}: the package tensorboard is not installed;"
            " pip install tensorboard, or omit the flag"
        ) from None
    try:
        Path(directory).mkdir(mode=0o700, parents=True, exist_ok=True)
        purge = start_iteration + 1 if start_iteration else None
        with owner_only():
            return hushed(lambda: SummaryWriter(directory, purge_step=purge))
    except OSError as error:
        raise ValueError(f"--tensorboard-dir {directory}: {error.strerror}") from None


def open_wandb(project: str, name: str | None, run_config: dict[str, Any] | None) -> Any:
    """Start a Weights & Biases run."""
    try:
        import wandb
    except ImportError:
        raise ValueError(
            f"--wandb-project {project}: the package wandb is not installed; pip install wandb,"
            " or omit the flag"
        ) from None
    try:
        with owner_only():
            return wandb.init(project=project, name=name, config=run_config)
    except wandb.Error as error:
        raise ValueError(f"--wandb-project {project}: {error}") from None


def check_wandb_login(project: str) -> None:
    """Raise ValueError where W&B would upload the run and no login is on this machine.

    It asks wandb, which looks at WANDB_API_KEY, its settings and .netrc; it asks no server and no
    user.
    """
    import wandb

    try:
        if wandb.setup().settings.mode not in ("online", "run", "shared"):
            return
        try:
            found = wandb.login(prompt=False, verify=False)
        except TypeError:  # a wandb whose login() would ask the user
            found = wandb.api.api_key is not None
    except wandb.Error as error:
        raise ValueError(f"--wandb-project {project}: {error}") from None
    if not found:
        raise ValueError(
            f"--wandb-project {project}: W&B has no login here: call `wandb login`, set "
            "WANDB_API_KEY, or set WANDB_MODE=offline, which writes the run to files"
        )
