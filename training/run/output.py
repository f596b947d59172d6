# SPDX-License-Identifier: Apache-2.0
"""The outputs of a run: standard output, a file of JSON lines, TensorBoard, W & B.

A failing output never ends the run. On standard output, a full disk, a closed pipe and a terminal
that is gone raise OSError: those lines are lost, and text that is still in the buffer is written
once a later line succeeds. The other outputs raise their errors, and `Outputs` drops them.
"""

import json
import math
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeVar

from training.files.owned import json_lines, refuse
from training.files.untrusted import owner_only, printable, private
from training.settings.arguments import LogConfig

# {output: (its flag, the method that closes it)}
OUTPUTS = {
    "bar": ("", "stop"),
    "json": ("log_json", "close"),
    "tensorboard": ("tensorboard_dir", "close"),
    "wandb": ("wandb_project", "finish"),
}

T = TypeVar("T")


def say(line: str) -> None:
    """Print and flush a line; ignore an OSError."""
    with suppress(OSError):
        print(line, flush=True)


def note_of(rank: int) -> Callable[[str], None]:
    """Return a function that prints a line on rank 0 and does nothing on other ranks."""
    return say if rank == 0 else lambda line: None


def flush() -> None:
    """Flush standard output and standard error; ignore an OSError."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None: it was closed before the start
            with suppress(OSError):
                stream.flush()


def write_line(file: Any, line: str) -> None:
    """Write a line of the JSON log and flush it."""
    file.write(line + "\n")
    file.flush()


def write_scalars(writer: Any, numbers: dict[str, Any], step: int) -> None:
    """Queue values for TensorBoard's thread; raises the error that ended that thread."""
    for key, value in numbers.items():
        writer.add_scalar(key, value, step)


def hushed(make: Callable[[], T]) -> T:
    """Return make(); an error that ends one of the threads it started prints no traceback.

    TensorBoard raises the error of its thread again at the next write, where `Outputs` prints it.
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
    """Open a file of JSON lines to append, dropping an incomplete last line of a killed run.

    Raises ValueError if it cannot be written, or is not the log of a run.
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
    from torch.utils.tensorboard import SummaryWriter  # start.py has checked that it is installed

    try:
        Path(directory).mkdir(mode=0o700, parents=True, exist_ok=True)
        purge = start_iteration + 1 if start_iteration else None
        with owner_only():
            return hushed(lambda: SummaryWriter(directory, purge_step=purge))
    except OSError as error:
        raise ValueError(f"--tensorboard-dir {directory}: {error.strerror}") from None


def open_wandb(project: str, name: str | None, run_config: dict[str, Any] | None) -> Any:
    """Start a Weights & Biases run."""
    import wandb  # start.py has checked that it is installed

    try:
        with owner_only():
            run = wandb.init(project=project, name=name, config=run_config)
    except wandb.Error as error:
        raise ValueError(f"--wandb-project {project}: {error}") from None
    run.define_metric("iteration")  # its own step only grows: an earlier iteration would be lost
    run.define_metric("*", step_metric="iteration")
    return run


def check_wandb_login(project: str) -> None:
    """Raise ValueError if W&B would upload the run and no login is on this machine.

    wandb looks at WANDB_API_KEY, its settings and .netrc; no server is contacted, and the user is
    not prompted.
    """
    import wandb

    try:
        if wandb.setup().settings.mode not in ("online", "run", "shared"):
            return
        try:
            found = wandb.login(prompt=False, verify=False)
        except TypeError:  # a wandb whose login() would prompt the user
            found = wandb.api.api_key is not None
    except wandb.Error as error:
        raise ValueError(f"--wandb-project {project}: {error}") from None
    if not found:
        raise ValueError(
            f"--wandb-project {project}: no W&B login on this machine: run `wandb login`, set "
            "WANDB_API_KEY, or set WANDB_MODE=offline, which writes the run to files"
        )


class Outputs:
    """The outputs of a run's log: the terminal, and those that flags ask for.

    An output that fails is dropped, with a line about it. total: the end of the progress bar.
    """

    def __init__(
        self, config: LogConfig, start_iteration: int, total: int, run_config: dict[str, Any] | None
    ) -> None:
        self.config = config
        self.json = self.tensorboard = self.wandb = self.bar = None
        if config.log_json:
            self.json = open_json(Path(config.log_json))
        if config.tensorboard_dir:
            self.tensorboard = open_tensorboard(config.tensorboard_dir, start_iteration)
        if config.wandb_project:
            self.wandb = open_wandb(config.wandb_project, config.wandb_exp_name, run_config)
        if sys.stdout is not None and sys.stdout.isatty():
            self.bar = Bar(total)

    def advance(self, done: int) -> None:
        """Move the live bar, where there is one."""
        self._try("bar", lambda bar: bar.advance(done))

    def print(self, line: str) -> None:
        """Print a line, above the live bar where there is one."""
        line = printable(line)
        if self.bar:
            self._try("bar", lambda bar: bar.print(line))
        else:
            say(line)

    def write(self, record: dict[str, Any]) -> None:
        """Write a record to the JSON file, TensorBoard and W&B."""
        finite = {key: finite_or_none(value) for key, value in record.items()}
        numbers = {key: value for key, value in record.items() if key != "iteration"}
        step = record["iteration"]
        self._try("json", lambda file: write_line(file, json.dumps(finite, allow_nan=False)))
        numbers.pop("expert_tokens", None)
        for i, value in numbers.pop("step_losses", [])[:-1]:  # the last one is in the record itself
            self._plot({"loss": value}, i)
        self._plot(numbers, step)

    def _plot(self, numbers: dict[str, Any], step: int) -> None:
        self._try("tensorboard", lambda writer: write_scalars(writer, numbers, step))
        self._try("wandb", lambda run: run.log({**numbers, "iteration": step}))

    def _try(self, name: str, work: Callable[[Any], None]) -> None:
        """Call work() on an output, if it is open; drop it, with a line about it, if that fails.

        wandb raises errors of its own, TensorBoard those of its thread: any Exception counts.
        """
        output = getattr(self, name)
        if output is None:
            return
        try:
            work(output)
        except Exception as error:
            setattr(self, name, None)
            flag, end = OUTPUTS[name]
            why = (isinstance(error, OSError) and error.strerror) or error
            what = f"--{flag.replace('_', '-')} {getattr(self.config, flag)}" if flag else "the bar"
            self.print(f"{what}: {why}; nothing more is written to it")
            with suppress(Exception):  # it may fail in the same way
                getattr(output, end)()

    def close(self) -> None:
        """Close every output and restore the terminal."""
        for name, (_, end) in OUTPUTS.items():
            self._try(name, methodcaller(end))
        self.json = self.tensorboard = self.wandb = self.bar = None


class Bar:
    """Show one live line at the foot of the terminal; the lines of the log scroll above it."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

        self.console = Console()
        columns = BarColumn(None), MofNCompleteColumn(), TimeElapsedColumn()
        # No refresh thread: it would compete with training for the interpreter's lock.
        self.progress = Progress(*columns, console=self.console, auto_refresh=False, expand=True)
        self.task = self.progress.add_task("", total=total)
        self.progress.start()

    def advance(self, done: int) -> None:
        """Move the bar to `done`."""
        self.progress.update(self.task, completed=done, refresh=True)

    def print(self, line: str) -> None:
        """Print a line above the bar, as it is."""
        self.console.print(line, markup=False, highlight=False)

    def stop(self) -> None:
        """Leave the bar where it is and show the cursor again."""
        self.progress.stop()


def finite_or_none(value: Any) -> Any:
    """Return the value, or None for an infinity or NaN, which JSON cannot hold."""
    if isinstance(value, list):
        return [finite_or_none(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
