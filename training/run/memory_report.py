# SPDX-License-Identifier: Apache-2.0
"""Refuse to start on a host with too little memory, and report a rank's memory."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from mpu.grid import Grid
from mpu.optim.optimizer import Optimizer
from mpu.zero.param_and_grad_buffer import ParamAndGradBuffer
from training.run.log import Log
from training.run.state import Run
from training.run.step import CONTINUE, DONE, Decision, Step
from training.run.text import in_units
from training.settings.config import Config, UsageError

STATE = ("parameters", "gradients", "masters", "moments")  # their size depends on the model


class MemoryReport:
    """Logs this rank's memory after the second step; by then every buffer has been in use."""

    def __init__(self, run: Run, log: Log) -> None:
        self.run, self.log = run, log
        self._at = run.iteration + 2

    def after_step(self, step: Step) -> Decision:
        """Log the memory once the second step is done."""
        if step.iteration < self._at:
            return CONTINUE
        self.log.note(report(self.run.optimizer))
        return DONE


def report(optimizer: Optimizer) -> str:
    """Return a line with the bytes of this rank's state, and the peaks of a step's buffers."""
    found = optimizer.memory()
    found |= {f"{kind} at most": n for kind, n in transient(optimizer.sink).items()}
    shown = ", ".join(f"{kind} {size:,}" for kind, size in found.items() if size)
    return f"memory of rank {optimizer.grid.rank} in bytes: {shown}"


def buckets(config: Config, sink: ParamAndGradBuffer, rank: int) -> str:
    """Return a line about the buckets that hold this rank's weights."""
    count = len(sink.weight_buckets)
    text = f"rank {rank} has its weights in {count} bucket{'s' * (count != 1)}"
    if sink.zero_stage == 3:
        return f"{text}: one per transformer block, and the parameters outside of blocks"
    how = "--ddp-bucket-size" if config.parallel.ddp_bucket_size else "the default"
    return f"{text} of about {sink.bucket_size:,} elements ({how})"


def transient(sink: ParamAndGradBuffer) -> dict[str, int]:
    """Return the peak bytes that a step allocated on top of the rank's state, by kind."""
    gathered = sink.gatherer.peak if sink.gatherer else 0
    return {"unsharded gradients": sink.live.peak, "gathered weights": gathered}


def check_host(
    config: Config,
    grid: Grid,
    device: torch.device,
    forecast: Callable[[], Sequence[Mapping[str, int]]],
) -> None:
    """Raise UsageError if the ranks of this host need more memory than it has available.

    Called before anything is allocated, and only effective on CPUs: a host that swaps hangs for
    minutes, while a GPU raises at once. forecast: returns the bytes of each pipeline rank by kind,
    and takes a second; it is not called for runs that surely fit (`at_most`).
    """
    launch = grid.launch
    free = available() if device.type == "cpu" else None
    if free is None or at_most(config) * launch.local_world < free:
        return
    places = {rank: i for row in grid.groups("pp").tolist() for i, rank in enumerate(row)}
    first = launch.rank - launch.local_rank
    ranks = [places[r] for r in range(first, first + launch.local_world) if r in places]
    kinds = forecast()
    total = sum(sum(kinds[r].values()) for r in ranks)
    if total <= free:
        return
    largest = max((kinds[r] for r in ranks), key=lambda each: sum(each.values()))
    kind, b, m = max(largest, key=lambda name: largest[name]), config.batch, config.model
    sizes = f"--num-layers {m.num_layers} or --hidden-size {m.hidden_size}"
    if kind not in STATE:
        sizes = f"--micro-batch-size {b.micro_batch_size} or --seq-length {m.seq_length}"
    raise UsageError(
        f"this host has {in_units(free)} of memory available, and its {len(ranks)} rank(s) need "
        f"{in_units(total)}, {in_units(largest[kind])} of each for {kind}: lower {sizes} "
        "(--dry-run prints each kind)"
    )


def at_most(config: Config) -> float:
    """Return an upper bound on the bytes of a rank: cheap to compute, many times too large."""
    m, b, p = config.model, config.batch, config.parallel
    widest = max(m.ffn_hidden_size or 0, m.hidden_size, m.padded_vocab_size(1))
    tokens, pipeline = b.micro_batch_size * m.seq_length, p.pipeline_model_parallel_size
    if pipeline > 1:  # all micro-batches of a step may be in flight
        tokens *= max(1, b.global_batch_size // b.micro_batch_size)
    scores = m.num_attention_heads * m.seq_length
    layer = 256 * m.hidden_size * widest + 128 * tokens * (widest + scores)
    return float((m.num_layers + 2) * layer)


def available(root: Path = Path("/")) -> int | None:
    """Return the bytes of memory that this host and this process's control groups have available.

    Swap does not count. If the system reports neither, return the total memory; None if that is
    unknown too.
    """
    found = []
    with suppress(OSError, ValueError, IndexError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        found.append(int(fields["MemAvailable"].split()[0]) * 1024)
    with suppress(OSError, ValueError, KeyError, IndexError):
        found += _group(root)
    if not found and hasattr(os, "sysconf"):
        with suppress(OSError, ValueError):
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found, default=None)


def _group(root: Path) -> list[int]:
    """Return the bytes left below the limit of each control group of this process (v2 and v1).

    File pages count as free: the kernel reclaims them first.
    """
    left = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        number, kinds, at = line.split(":", 2)
        top, files = root / "sys/fs/cgroup", ["file"]
        names = ["memory.max", "memory.current"]
        if number != "0":
            if "memory" not in kinds.split(","):
                continue
            top, files = top / "memory", ["total_inactive_file", "total_active_file"]
            names = ["memory.limit_in_bytes", "memory.usage_in_bytes"]
        place = top / at.lstrip("/")
        for folder in (place, *place.parents):
            with suppress(OSError, ValueError, KeyError):  # no such file; "max"
                limit, used = (int((folder / name).read_text()) for name in names)
                words = (folder / "memory.stat").read_text().split()
                stat = dict(zip(words[::2], words[1::2], strict=True))
                left.append(limit - used + sum(int(stat[name]) for name in files))
            if folder == top:
                break
    return left


@contextmanager
def enough() -> Iterator[None]:
    """Raise UsageError, with one sentence, if the block runs out of memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        message = str(error).splitlines() or ["MemoryError"]
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not any(
            "can't allocate memory" in line for line in message
        ):
            raise
        raise UsageError(
            f"there is not enough memory: {message[0][:300]} (--dry-run prints what each rank "
            "needs)"
        ) from None
