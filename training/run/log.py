# SPDX-License-Identifier: Apache-2.0
"""The log of a run: its lines and records, which go to the outputs of output.py.

Every value arrives as a plain Python float that is already reduced over all ranks. Rank 0 writes;
on any other rank the methods that write return at once.
"""

import math
import resource
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpu.host_memory import read_values
from training.run.output import Outputs
from training.run.peak_flops import peak_flops
from training.run.step import CONTINUE, Decision, Step
from training.run.text import duration, flops, step_line
from training.run.time_left import TimeLeft
from training.settings.arguments import LogConfig


@dataclass
class Interval:
    """Counts since the last line."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    data_wait: float = 0.0  # seconds

    def add(self, tokens: int, seconds: float, data_wait: float) -> None:
        """Count one more step."""
        self.steps, self.tokens = self.steps + 1, self.tokens + tokens
        self.seconds, self.data_wait = self.seconds + seconds, self.data_wait + data_wait


class Log:
    """Write the log of one run.

    `flops_per_token`: model FLOPs of forward and backward for one token.
    `total_samples` (of a run counted in samples) takes precedence over `total_iterations` in the
    estimate of the time left. `start_iteration`: the iteration of the checkpoint, 0 for a new run;
    later TensorBoard events, of a run that went further, are hidden. tokens_at, stage_at: functions
    of the samples consumed; stage_at is None without stages. still_due(iteration): how many times
    each kind of work between steps remains after an iteration. on_line: called at each step's line.
    Raises ValueError if a file cannot be written or a requested package is missing.
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
        stage_at: Callable[[int], str] | None = None,
        still_due: Callable[[int], Mapping[str, int]] = lambda iteration: {},
        on_line: Callable[[], None] = lambda: None,
    ) -> None:
        self.config, self.device = config, torch.device(device)
        self.flops_per_token = flops_per_token
        self.total_iterations, self.total_samples = total_iterations, total_samples
        self.interval = Interval()
        self.left, self.still_due, self.on_line = TimeLeft(), still_due, on_line
        self.losses: dict[int, Tensor] = {}  # of the steps since the last line, by iteration
        self.mean_loss, self.began, self.trained = math.nan, time.monotonic(), False
        self.saved_in = (run_config or {}).get("checkpoint.save")
        self.length = (run_config or {}).get("model.seq_length", 0)
        self.start_iteration = start_iteration
        self.held_out: dict[str, list[tuple[int, float]]] = {}  # of a set: (iteration, loss)
        self.stage_at, self.stage = stage_at, ""
        self.tokens_at = tokens_at or (lambda samples: samples * self.length)
        self.out: Outputs | None = None  # on rank 0 only
        if rank:
            return
        total = total_samples or total_iterations
        self.out = Outputs(config, start_iteration, total, run_config)
        peak, source = peak_flops(self.device, dtype)
        self.peak = peak * world_size
        self.note(f"MFU: percent of {world_size} x {flops(peak)}, {source}")

    def at_interval(self, iteration: int) -> bool:
        """Return whether step() writes at this iteration, so that the values are needed."""
        return iteration % self.config.log_interval == 0 or iteration == self.total_iterations

    def after_step(self, step: Step) -> Decision:
        """Count a step, with its values; write a line where one is due."""
        if self.stage_at and (stage := self.stage_at(step.consumed)) != self.stage:
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
        """Return a step's values, {} unless it is logged; waits for the device.

        params: returns the parameters' norm. more: returns other values; called on every rank. At a
        --log-interval above 1, mean_loss is the mean of the steps since the last line, and
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
        """Count one step; every --log-interval iterations, write a record of the interval.

        samples, loss, grad_norm and lr belong to this step, not to the interval, and are read only
        where at_interval(iteration). step_seconds and data_wait_seconds are means over the steps of
        the interval; tokens_per_second counts all ranks. more: mean_loss and step_losses of
        `values`, and other values.
        """
        if self.out is None:
            return
        interval = self.interval
        interval.add(tokens, seconds, data_wait_seconds)
        if self.out.bar is not None:
            self.out.advance(consumed_samples if self.total_samples else iteration)
        if not self.at_interval(iteration):
            return
        rate = interval.tokens / interval.seconds
        record = {
            "iteration": iteration,
            "consumed_samples": consumed_samples,
            **({"consumed_tokens": self.tokens_at(consumed_samples)} if self.length else {}),
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens_per_second": rate,
            "step_seconds": interval.seconds / interval.steps,
            "peak_memory_bytes": peak_memory(self.device),
            **cuda_memory(self.device),
            "data_wait_seconds": interval.data_wait / interval.steps,
            "model_flops_per_second": rate * self.flops_per_token,
            "mfu": rate * self.flops_per_token / self.peak,
            **more,
        }
        self.left.step(record["step_seconds"])
        self.trained, self.mean_loss = True, more.get("mean_loss", loss)
        self.interval = Interval()
        steps: float = self.total_iterations - iteration
        if self.total_samples:
            steps = (self.total_samples - consumed_samples) / samples
        left = self.left.seconds(max(0, steps), self.still_due(iteration))
        self.on_line()
        self.out.print(step_line(record, self.total_iterations, left))
        self.out.write(record)

    def timing(self, kind: str) -> AbstractContextManager[None]:
        """Measure the block's time, as one kind of work between steps: see `still_due`."""
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

        bytes_per_token: bytes of text per token; 0 if the tokens represent no text. part: the
        name of one of several sets.
        """
        if self.out is None:
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
        self.out.print(line)
        self.out.write(record)

    def finished(self, iteration: int, only_evaluated: bool = False) -> None:
        """Print that the run is over, its last iteration, and where its result is saved.

        With --eval-at-start, print also each validation loss before and after training.
        """
        if self.out is None:
            return
        if only_evaluated:
            self.out.print(
                f"evaluated at iteration {iteration}: --skip-train trains and saves nothing"
            )
            return
        for part, ((begin, before), *later) in self.held_out.items():
            if begin == self.start_iteration and later:
                step = f"iteration {begin + 1}" if begin else "the first step"
                at, after = later[-1]
                end = "at the end" if at == self.total_iterations else f"at iteration {at}"
                of = part and f"-{part}"
                self.out.print(f"validation{of} loss {before:.4f} before {step}, {after:.4f} {end}")
        if iteration < self.total_iterations:
            return
        where = f"; saved in {self.saved_in}" if self.saved_in else "; not saved (no --save)"
        if self.trained:
            took = duration(time.monotonic() - self.began)
            loss = f"loss {self.mean_loss:.4f}"
            self.out.print(f"finished: {iteration} iterations, {loss}, {took}{where}")
        else:
            of = f"of {self.total_iterations}"
            self.out.print(f"nothing to do: iteration {iteration} {of} is already done")

    def note(self, text: str) -> None:
        """Print a line, above the live bar where there is one."""
        if self.out is not None:
            self.out.print(text)

    def close(self) -> None:
        """Close every output and restore the terminal."""
        if self.out is not None:
            self.out.close()

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def peak_memory(device: torch.device) -> int:
    """Return this rank's peak bytes: the allocator's on CUDA, the whole process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def cuda_memory(device: torch.device) -> dict[str, float]:
    """Return the bytes allocated now and those that the allocator reserves; {} on a CPU."""
    if device.type != "cuda":
        return {}
    return {
        "memory_allocated_bytes": torch.cuda.memory_allocated(device),
        "memory_reserved_bytes": torch.cuda.memory_reserved(device),
    }
