# SPDX-License-Identifier: Apache-2.0
"""Decide together: that all ranks were given the same flags, when to stop, and who is profiled."""

import signal
import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store

from mpu.comm.collectives import Handle, all_reduce
from mpu.grid import Axis
from training.config import Config, RunConfig, UsageError, differing_keys


def compare_flags(config: Config, rank: int, world: int, store: Store) -> None:
    """Refuse flags that differ between ranks, on all of them, before the first collective."""
    store.set(f"weft/flags/{rank}", config.canonical_json())
    if rank == 0:
        verdict, mine = "", config.canonical_json()
        for other in range(1, world):
            different = differing_keys(mine, store.get(f"weft/flags/{other}").decode())
            if different:
                key, (here, there) = next(iter(different.items()))
                verdict = f"{key} is {here!r} on rank 0 and {there!r} on rank {other}: all ranks "
                verdict += "must be given the same flags"
                break
        store.set("weft/flags/verdict", verdict)
    verdict = store.get("weft/flags/verdict").decode()
    if verdict:
        raise UsageError(verdict)


class StopSignal:
    """Let SIGTERM or Ctrl-C end the run after the current step, saved; a second one ends it at
    once.
    """

    def __init__(self) -> None:
        self.received = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        self.received = True
        again = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, again)


class Agreement:
    """Agree over all ranks on stopping, one step late, so that no step waits for the answer."""

    def __init__(self, world: Axis) -> None:
        self.world = world
        self.pending: Tensor | None = None
        self.handle = Handle()

    def ask(self, stop: bool, found_inf: Tensor) -> tuple[bool, bool]:
        """Give this step's flags; return last step's: (a rank was told to stop, update skipped)."""
        last, handle = self.pending, self.handle
        flags = torch.stack([found_inf.new_tensor(float(stop)), found_inf])
        self.pending, self.handle = all_reduce(flags, self.world, async_op=True)
        if last is None:
            return False, False
        handle.wait()
        told, skipped = last.tolist()
        return told > 0, skipped > 0

    def close(self) -> None:
        """Wait for what is in flight: a process group must not be destroyed under it."""
        self.handle.wait()


def time_is_up(settings: RunConfig, iteration: int, started: float) -> bool:
    """Apply --exit-interval and --exit-duration-in-mins; `started` is a time.monotonic()."""
    minutes = settings.exit_duration_in_mins
    late = minutes is not None and time.monotonic() - started > 60 * minutes
    return late or (settings.exit_interval is not None and iteration % settings.exit_interval == 0)


def profiler(config: Config, rank: int) -> Any:
    """Return the torch profiler of --profile on the ranks that asked for it, else a null context.

    Steps [start, end) are traced; the trace goes to --tensorboard-dir, or ./profile.
    """
    log = config.log
    if not log.profile or rank not in log.profile_ranks:
        return nullcontext()
    wait = max(0, log.profile_step_start - 1)
    steps = log.profile_step_end - log.profile_step_start
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=wait, warmup=1, active=steps, repeat=1),
        on_trace_ready=torch.profiler.tensorboard_trace_handler(
            log.tensorboard_dir or "profile", f"rank{rank}"
        ),
    )
