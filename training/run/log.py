# SPDX-License-Identifier: Apache-2.0
"""The log of a run: lines on the terminal, a JSON file, TensorBoard events, Weights & Biases.

No output that fails ends the run: after one line about it the log goes on without that output.
Every value arrives as a plain Python float that already holds for all ranks; nothing here talks to
another rank. Rank 0 writes; on any other rank every method returns at once.
"""

import json
import math
import resource
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.run import cuda_memory
from training.run.log_line import duration, finite_or_none, flops, step_line
from training.run.output import (
    open_json,
    open_tensorboard,
    open_wandb,
    say,
    write_line,
    write_scalars,
)
from training.run.peak_flops import peak_flops
from training.untrusted import printable

# each output: the flag that asked for it, and how it is closed
OUTPUTS = {
    "bar": ("", "stop"),
    "json": ("log_json", "close"),
    "tensorboard": ("tensorboard_dir", "close"),
    "wandb": ("wandb_project", "finish"),
}


class Log:
    """Write the log of one run.

    `config` is LogConfig. `flops_per_token`: model FLOPs of forward and backward for one token.
    `total_samples` (of a run counted in samples) takes precedence over `total_iterations` in the
    estimate of the time left. `start_iteration`: the iteration of the checkpoint, 0 for a new run;
    later TensorBoard events, left by a run that went further, are hidden.
    Raises ValueError where a file cannot be written or a package that was asked for is missing.
    """

    def __init__(
        self,
        config: Any,
        *,
        rank: int,
        world_size: int,
        flops_per_token: float,
        dtype: torch.dtype,
        device: torch.device | str,
        total_iterations: int,
        total_samples: int | None = None,
        start_iteration: int = 0,
        run_config: dict[str, Any] | None = None,
    ) -> None:
        self.writes = rank == 0
        self.config, self.device = config, torch.device(device)
        self.flops_per_token = flops_per_token
        self.total_iterations, self.total_samples = total_iterations, total_samples
        self.steps, self.tokens, self.seconds, self.data_wait = 0, 0, 0.0, 0.0
        self.recent: deque[float] = deque(maxlen=10)
        self.losses: dict[int, Tensor] = {}  # of the steps since the last line, by iteration
        self.mean_loss, self.began, self.trained = math.nan, time.monotonic(), False
        self.saved_in = (run_config or {}).get("checkpoint.save")
        self.length = (run_config or {}).get("model.seq_length", 0)
        self.last_samples = 0
        self.json = self.tensorboard = self.wandb = self.bar = None
        if not self.writes:
            return
        if config.log_json:
            self.json = open_json(Path(config.log_json))
        if config.tensorboard_dir:
            self.tensorboard = open_tensorboard(config.tensorboard_dir, start_iteration)
        if config.wandb_project:
            self.wandb = open_wandb(config.wandb_project, config.wandb_exp_name, run_config)
        peak, source = peak_flops(self.device, dtype)
        self.peak = peak * world_size
        if sys.stdout is not None and sys.stdout.isatty():
            self.bar = Bar(total_samples or total_iterations)
        self.note(f"MFU is held against {flops(peak)} a rank x {world_size}: {source}")

    def due(self, iteration: int) -> bool:
        """Return whether step() of this iteration writes, so that the values are needed."""
        return iteration % self.config.log_interval == 0 or iteration == self.total_iterations

    def values(
        self,
        iteration: int,
        loss: Tensor,
        norm: Tensor,
        lr: float,
        params: Callable[[], Tensor],
        auxiliary: Tensor | None = None,
    ) -> dict[str, Any]:
        """Return a step's numbers, {} unless due; waits for the device. params: gives its norm.

        auxiliary: the part of the loss that is auxiliary; it is left out where it is 0.
        Where lines are some steps apart, mean_loss is the mean of the steps since the last one, and
        step_losses has (iteration, loss) of each.
        """
        for stale in [i for i in self.losses if i >= iteration]:  # the run went back
            del self.losses[stale]
        self.losses[iteration] = loss.detach()
        if not self.due(iteration):
            return {}
        few = len(self.losses) == 1
        losses = [loss.item()] if few else torch.stack(list(self.losses.values())).tolist()
        values: dict[str, Any] = {"loss": losses[-1], "grad_norm": norm.item(), "lr": lr}
        if len(losses) > 1:
            values["mean_loss"] = math.fsum(losses) / len(losses)
            values["step_losses"] = [list(pair) for pair in zip(self.losses, losses, strict=True)]
        if auxiliary is not None and (part := auxiliary.item()):
            values["auxiliary_loss"] = part
        self.losses = {}
        return values | ({"params_norm": params().item()} if self.config.log_params_norm else {})

    def step(
        self,
        *,
        iteration: int,
        consumed_samples: int,
        tokens: int,
        seconds: float,
        data_wait_seconds: float = 0.0,
        loss: float = math.nan,
        grad_norm: float = math.nan,
        lr: float = math.nan,
        **more: Any,
    ) -> None:
        """Count one step; every --log-interval iterations, write what was counted since.

        loss, grad_norm and lr belong to this very step, not to the interval, and are read only
        where due(iteration). step_seconds and data_wait_seconds are means over the steps of the
        interval; tokens_per_second counts all ranks. more: mean_loss and step_losses of `values`,
        and other numbers.
        """
        if not self.writes:
            return
        self.steps, self.tokens = self.steps + 1, self.tokens + tokens
        self.seconds, self.data_wait = self.seconds + seconds, self.data_wait + data_wait_seconds
        samples = consumed_samples - self.last_samples
        self.last_samples = consumed_samples
        done = consumed_samples if self.total_samples else iteration
        if self.bar:
            self._try("bar", lambda bar: bar.advance(done))
        if not self.due(iteration):
            return
        rate = self.tokens / self.seconds
        record = {
            "iteration": iteration,
            "consumed_samples": consumed_samples,
            **({"consumed_tokens": consumed_samples * self.length} if self.length else {}),
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens_per_second": rate,
            "step_seconds": self.seconds / self.steps,
            "peak_memory_bytes": peak_memory(self.device),
            **cuda_memory.numbers(self.device),
            "data_wait_seconds": self.data_wait / self.steps,
            "model_flops_per_second": rate * self.flops_per_token,
            "mfu": rate * self.flops_per_token / self.peak,
            **more,
        }
        self.recent.append(record["step_seconds"])
        self.trained, self.mean_loss = True, more.get("mean_loss", loss)
        self.steps, self.tokens, self.seconds, self.data_wait = 0, 0, 0.0, 0.0
        self.print(step_line(record, self.total_iterations, self.time_left(done, samples)))
        self.write(record)

    def time_left(self, done: int, samples_a_step: int) -> float | None:
        """Return the seconds to the end at the speed of the last ten log steps, None if unknown."""
        total, a_step = self.total_iterations, 1
        if self.total_samples:
            total, a_step = self.total_samples, samples_a_step
        if a_step <= 0:
            return None
        return max(0, total - done) / a_step * sum(self.recent) / len(self.recent)

    def validation(
        self, iteration: int, loss: float, loader: Any = None, *, name: str = "validation"
    ) -> None:
        """Write the loss on held-out data, under the key {name}_loss.

        loader: of that data, which knows how many bytes of text a token is (bytes_per_token).
        """
        if not self.writes:
            return
        line = f"{name} at iteration {iteration} | loss {loss:.4f}"
        line += f" | perplexity {math.exp(min(loss, 700.0)):.2f}"
        record = {"iteration": iteration, f"{name}_loss": loss}
        if loader is not None and (size := loader.bytes_per_token()):
            record[f"{name}_bits_per_byte"] = bits = loss / math.log(2) / size
            line += f" | {bits:.3f} bits per byte"
        self.print(line)
        self.write(record)

    def finished(self, iteration: int) -> None:
        """Say that the run is over, where it is, and where its result lies."""
        if not self.writes or iteration < self.total_iterations:
            return
        where = f"; saved in {self.saved_in}" if self.saved_in else "; nothing is saved: no --save"
        if self.trained:
            took = duration(time.monotonic() - self.began)
            loss = f"loss {self.mean_loss:.4f}"
            self.print(f"finished: {iteration} iterations, {loss}, {took}{where}")
        else:
            self.print(f"nothing to do: iteration {iteration} of {iteration} was reached before")

    def note(self, text: str) -> None:
        """Print a line, above the live bar where there is one."""
        if self.writes:
            self.print(text)

    def print(self, line: str) -> None:
        """Print a line above the live bar, or simply where there is none."""
        line = printable(line)
        if self.bar:
            self._try("bar", lambda bar: bar.print(line))
        else:
            say(line)

    def write(self, record: dict[str, Any]) -> None:
        """Hand a record to the files."""
        finite = {key: finite_or_none(value) for key, value in record.items()}
        numbers = {key: value for key, value in record.items() if key != "iteration"}
        step = record["iteration"]
        self._try("json", lambda file: write_line(file, json.dumps(finite, allow_nan=False)))
        for i, value in numbers.pop("step_losses", [])[:-1]:  # the last is this record's own
            self._plot({"loss": value}, i)
        self._plot(numbers, step)

    def _plot(self, numbers: dict[str, Any], step: int) -> None:
        self._try("tensorboard", lambda writer: write_scalars(writer, numbers, step))
        self._try("wandb", lambda run: run.log(numbers, step=step))

    def _try(self, name: str, work: Callable[[Any], None]) -> None:
        """Do it with an output, if there is one; one that fails is dropped, with a line about it.

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
            self.print(f"{what}: {why}; it ends here")
            with suppress(Exception):  # it may fail in the same way
                getattr(output, end)()

    def close(self) -> None:
        """Close every output and give the terminal back as it was found."""
        for name, (_, end) in OUTPUTS.items():
            self._try(name, methodcaller(end))
        self.json = self.tensorboard = self.wandb = self.bar = None

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


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


def peak_memory(device: torch.device) -> int:
    """Return this rank's peak bytes: the allocator's on CUDA, the whole process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
