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
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpu.host_memory import read_values
from training.files.untrusted import printable
from training.run.output import (
    open_json,
    open_tensorboard,
    open_wandb,
    say,
    write_line,
    write_scalars,
)
from training.run.peak_flops import peak_flops
from training.run.step import CONTINUE, Decision, Step
from training.run.time_left import TimeLeft
from training.settings.arguments import LogConfig

WIDTH = 100  # columns of a step's line
# each output: the flag that asked for it, and how it is closed
OUTPUTS = {
    "bar": ("", "stop"),
    "json": ("log_json", "close"),
    "tensorboard": ("tensorboard_dir", "close"),
    "wandb": ("wandb_project", "finish"),
}


class Log:
    """Write the log of one run.

    `flops_per_token`: model FLOPs of forward and backward for one token.
    `total_samples` (of a run counted in samples) takes precedence over `total_iterations` in the
    estimate of the time left. `start_iteration`: the iteration of the checkpoint, 0 for a new run;
    later TensorBoard events, left by a run that went further, are hidden. tokens_at, stage_at: of
    samples consumed. still_due: how often each kind of work between steps is still to be done from
    the end of an iteration on. on_line: called at each step's line.
    Raises ValueError where a file cannot be written or a package that was asked for is missing.
    """

    def __init__(
        self,
        config: LogConfig,
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
        tokens_at: Callable[[int], int] | None = None,
        stage_at: Callable[[int], str] = lambda samples: "",
        still_due: Callable[[int], Mapping[str, int]] = lambda iteration: {},
        on_line: Callable[[], None] = lambda: None,
    ) -> None:
        self.writes = rank == 0
        self.config, self.device = config, torch.device(device)
        self.flops_per_token = flops_per_token
        self.total_iterations, self.total_samples = total_iterations, total_samples
        self.steps, self.tokens, self.seconds, self.data_wait = 0, 0, 0.0, 0.0
        self.left, self.still_due, self.on_line = TimeLeft(), still_due, on_line
        self.losses: dict[int, Tensor] = {}  # of the steps since the last line, by iteration
        self.mean_loss, self.began, self.trained = math.nan, time.monotonic(), False
        self.saved_in = (run_config or {}).get("checkpoint.save")
        self.length = (run_config or {}).get("model.seq_length", 0)
        self.start_iteration = start_iteration
        self.held_out: dict[str, list[tuple[int, float]]] = {}  # of a set: (iteration, loss)
        self.stage_at, self.stage = stage_at, ""
        self.tokens_at = tokens_at or (lambda samples: samples * self.length)
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
        self.note(f"MFU: percent of {world_size} x {flops(peak)}, {source}")

    def at_interval(self, iteration: int) -> bool:
        """Return whether step() of this iteration writes, so that the values are needed."""
        return iteration % self.config.log_interval == 0 or iteration == self.total_iterations

    def after_step(self, step: Step) -> Decision:
        """Count a step, with its values; write a line where one is due."""
        if (stage := self.stage_at(step.consumed)) != self.stage:
            self.note(f"iteration {step.iteration} is of stage {stage}")
            self.stage = stage
        self.step(
            iteration=step.iteration,
            consumed_samples=step.consumed + step.size,
            samples=step.size,
            tokens=step.size * self.length,
            seconds=time.perf_counter() - step.begin,
            data_wait_seconds=step.waited,
            **step.values,
        )
        return CONTINUE

    def values(
        self,
        step: Step,
        params: Callable[[], Tensor],
        more: Callable[[], dict[str, Any]] = dict,
    ) -> dict[str, Any]:
        """Return a step's numbers, {} unless due; waits for the device. params: gives its norm.
        more: gives other numbers, on every rank.

        Where lines are some steps apart, mean_loss is the mean of the steps since the last one, and
        step_losses has (iteration, loss) of each.
        """
        iteration, loss, norm = step.iteration, step.loss, step.norm
        for stale in [i for i in self.losses if i >= iteration]:  # the run went back
            del self.losses[stale]
        self.losses[iteration] = loss.detach()
        if not self.at_interval(iteration):
            return {}
        few = len(self.losses) == 1
        kept = list(self.losses.values())
        losses = [read_values(loss)] if few else read_values(torch.stack(kept))
        numbers = [norm] if step.auxiliary is None else [norm, step.auxiliary]
        grad_norm, *auxiliary = read_values(torch.stack([each.double() for each in numbers]))
        values: dict[str, Any] = {"loss": losses[-1], "grad_norm": grad_norm, "lr": step.lr}
        if len(losses) > 1:
            values["mean_loss"] = math.fsum(losses) / len(losses)
            values["step_losses"] = [list(pair) for pair in zip(self.losses, losses, strict=True)]
        if any(auxiliary):  # left out where it is 0
            values["auxiliary_loss"] = auxiliary[0]
        self.losses = {}
        values |= more()
        if self.config.log_params_norm:
            values["params_norm"] = read_values(params())
        return values

    def step(
        self,
        *,
        iteration: int,
        consumed_samples: int,
        samples: int,
        tokens: int,
        seconds: float,
        data_wait_seconds: float = 0.0,
        loss: float = math.nan,
        grad_norm: float = math.nan,
        lr: float = math.nan,
        **more: Any,
    ) -> None:
        """Count one step; every --log-interval iterations, write what was counted since.

        samples, loss, grad_norm and lr belong to this very step, not to the interval, and are read
        only where at_interval(iteration). step_seconds and data_wait_seconds are means over the
        steps of the interval; tokens_per_second counts all ranks. more: mean_loss and step_losses
        of `values`, and other numbers.
        """
        if not self.writes:
            return
        self.steps, self.tokens = self.steps + 1, self.tokens + tokens
        self.seconds, self.data_wait = self.seconds + seconds, self.data_wait + data_wait_seconds
        done = consumed_samples if self.total_samples else iteration
        if self.bar:
            self._try("bar", lambda bar: bar.advance(done))
        if not self.at_interval(iteration):
            return
        rate = self.tokens / self.seconds
        record = {
            "iteration": iteration,
            "consumed_samples": consumed_samples,
            **({"consumed_tokens": self.tokens_at(consumed_samples)} if self.length else {}),
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens_per_second": rate,
            "step_seconds": self.seconds / self.steps,
            "peak_memory_bytes": peak_memory(self.device),
            **cuda_memory(self.device),
            "data_wait_seconds": self.data_wait / self.steps,
            "model_flops_per_second": rate * self.flops_per_token,
            "mfu": rate * self.flops_per_token / self.peak,
            **more,
        }
        self.left.step(record["step_seconds"])
        self.trained, self.mean_loss = True, more.get("mean_loss", loss)
        self.steps, self.tokens, self.seconds, self.data_wait = 0, 0, 0.0, 0.0
        steps: float = self.total_iterations - iteration
        if self.total_samples:
            steps = (self.total_samples - consumed_samples) / samples
        left = self.left.seconds(max(0, steps), self.still_due(iteration))
        self.on_line()
        self.print(step_line(record, self.total_iterations, left))
        self.write(record)

    def timing(self, kind: str) -> AbstractContextManager[None]:
        """Measure in the block how long a kind of work between steps takes: see `still_due`."""
        return self.left.measuring(kind)

    def validation(
        self,
        iteration: int,
        loss: float,
        bytes_per_token: float = 0.0,
        *,
        name: str = "validation",
        part: str = "",
    ) -> None:
        """Write the loss on held-out data, under the key {name}_loss, or {name}_loss/{part}.

        bytes_per_token: of text, of these tokens; 0 where they stand for none. part: the name of
        one of several sets.
        """
        if not self.writes:
            return
        of = f"/{part}" if part else ""
        line = f"{name}{part and f'-{part}'} at iteration {iteration} | loss {loss:.4f}"
        line += f" | perplexity {math.exp(min(loss, 700.0)):.2f}"
        if name == "validation":  # the first one and the last one count
            self.held_out[part] = [*self.held_out.get(part, ())[:1], (iteration, loss)]
        record = {"iteration": iteration, f"{name}_loss{of}": loss}
        if bytes_per_token:
            record[f"{name}_bits_per_byte{of}"] = bits = loss / math.log(2) / bytes_per_token
            line += f" | {bits:.3f} bits per byte"
        self.print(line)
        self.write(record)

    def finished(self, iteration: int, only_evaluated: bool = False) -> None:
        """Say that the run is over, where it is, and where its result lies.

        With --eval-at-start also what became of each loss on held-out data.
        """
        if not self.writes:
            return
        if only_evaluated:
            self.print(f"evaluated at iteration {iteration}: --skip-train trains and saves nothing")
            return
        for part, ((begin, before), *later) in self.held_out.items():
            if begin == self.start_iteration and later:
                step = f"iteration {begin + 1}" if begin else "the first step"
                at, after = later[-1]
                end = "at the end" if at == self.total_iterations else f"at iteration {at}"
                of = part and f"-{part}"
                self.print(f"validation{of} loss {before:.4f} before {step}, {after:.4f} {end}")
        if iteration < self.total_iterations:
            return
        where = f"; saved in {self.saved_in}" if self.saved_in else "; not saved (no --save)"
        if self.trained:
            took = duration(time.monotonic() - self.began)
            loss = f"loss {self.mean_loss:.4f}"
            self.print(f"finished: {iteration} iterations, {loss}, {took}{where}")
        else:
            self.print(f"nothing to do: iteration {iteration} of {iteration} is already done")

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
        numbers.pop("expert_tokens", None)
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
            self.print(f"{what}: {why}; nothing more is written to it")
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


def cuda_memory(device: torch.device) -> dict[str, float]:
    """Return the bytes in use now and those that the allocator keeps; {} on a CPU."""
    if device.type != "cuda":
        return {}
    return {
        "memory_allocated_bytes": torch.cuda.memory_allocated(device),
        "memory_reserved_bytes": torch.cuda.memory_reserved(device),
    }


def step_line(record: dict[str, Any], total: int, left: float) -> str:
    """Return the line of one log step: mean loss of its steps, lr, norm, speed, time left.

    record: as `Log.step` makes it. left: seconds to the end. A run of five
    digits of iterations leaves the first word out. Where numbers are so long that the line would
    not fit all the same, the word goes, then the bars, then MFU.
    """
    norm = f"norm {short(record['grad_norm'])}"
    if "params_norm" in record:
        norm += f" (params {short(record['params_norm'])})"
    loss = f"loss {_loss(record.get('mean_loss', record['loss']))}"
    if "auxiliary_loss" in record:
        loss += f" (auxiliary {short(record['auxiliary_loss'])})"
    loads = [f"load {short(record['expert_load'])}"] if "expert_load" in record else []
    if record.get("dropped_share"):
        loads = [f"{loads[0]}, {record['dropped_share']:.1%} dropped"]
    logits = []
    if (top := record.get("max_attention_logit")) is not None:
        clipped = f" ({record['qk_clipped']} clipped)" if record.get("qk_clipped") else ""
        logits = [f"logit {short(top)}{clipped}"]
    mfu = record["mfu"]
    parts = [
        f"iteration {record['iteration']:>{len(str(total))}}/{total}",
        loss,
        f"lr {record['lr']:.2e}".replace("e-0", "e-").replace("e+00", ""),
        norm,
        *loads,
        *logits,
        f"{rounded(record['tokens_per_second'])} tokens/s",
        f"MFU {mfu:.1%}" if mfu < 0.1 else f"MFU {mfu:.0%}",
        f"ETA {duration(left)}",
    ]
    bare = " | ".join(parts).removeprefix("iteration ")
    close = bare.replace(" | ", "  ")
    lines = [" | ".join(parts), bare, close, close.replace(f"  {parts[-2]}", "")]
    first = int(len(str(total)) > 4)
    return next((line for line in lines[first:] if len(line) <= WIDTH), lines[-1][:WIDTH])


def short(value: float) -> str:
    """Return a number in few digits: 0.012, 0.62, 1.23, 123, 12,345, 1.2e+06."""
    if not math.isfinite(value) or abs(value) >= 1e5:
        return f"{value:.1e}"
    return f"{value:#.2g}" if abs(value) < 1 else f"{value:,.{max(0, 3 - len(str(int(value))))}f}"


def _loss(value: float) -> str:
    return f"{value:.4f}" if not abs(value) >= 1e3 else f"{value:.2e}"


def rounded(value: float) -> str:
    """Return a rate in three digits: 812, 12.3k, 1.23M."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            return f"{value / size:#.3g}".rstrip(".") + unit
    return f"{value:#.3g}".rstrip(".")


def duration(seconds: float) -> str:
    """Return a time as 2:10, 1:02:10, or in days and hours from two days on."""
    seconds = round(min(seconds, 8e12))
    if seconds >= 2 * 86400:
        return f"{seconds // 86400} d {seconds % 86400 // 3600} h"
    hours, rest = divmod(seconds, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def flops(value: float) -> str:
    """Return FLOP/s as text, in TFLOP/s or GFLOP/s."""
    return f"{value / 1e12:,.1f} TFLOP/s" if value >= 1e12 else f"{value / 1e9:,.1f} GFLOP/s"


def finite_or_none(value: Any) -> Any:
    """Return the value, or None for an infinity or NaN, which JSON cannot hold."""
    if isinstance(value, list):
        return [finite_or_none(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
