# SPDX-License-Identifier: Apache-2.0
"""Refuse what a host has no memory for, and report what a rank was measured to use.

Both go by the dry run's formulas: estimate/rank_memory.py for what stays from step to step,
estimate/buffers.py for the most that a step allocates on top, estimate/activations.py for what a
backward reads.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from estimate import activations, buffers, dry_run, rank_memory
from estimate.model_profile import ModelProvider
from mpu.grid import Grid
from mpu.optim.optimizer import Optimizer
from mpu.zero.param_and_grad_buffer import ParamAndGradBuffer
from training.config import Config, UsageError
from training.run.log import Log
from training.run.state import Run
from training.run.step import CONTINUE, Decision, Step

EQUAL = ", equal to the formula"


class MemoryReport:
    """Notes this rank's memory after the second step; by then every buffer has been in use."""

    def __init__(self, run: Run, provider: ModelProvider, log: Log) -> None:
        self.run, self.provider, self.log = run, provider, log
        self._at = run.iteration + 2

    def after_step(self, step: Step) -> Decision:
        """Note it where that step was made."""
        if step.iteration == self._at:
            for line in report(self.run.config, self.provider, self.run.optimizer):
                self.log.note(line)
        return CONTINUE


def report(config: Config, provider: ModelProvider, optimizer: Optimizer) -> list[str]:
    """Measure this rank; return one line where all is as the formulas state, else `in_full`."""
    return brief(in_full(config, provider, optimizer), optimizer.grid.rank)


def brief(kinds: list[str], rank: int) -> list[str]:
    """Return the lines of the kinds as one where each is equal to its formula."""
    if not all(line.endswith(EQUAL) for line in kinds):
        return kinds
    sizes = [line.removesuffix(f" bytes{EQUAL}").rpartition(" ") for line in kinds]
    shown = ", ".join(f"{kind.strip()} {size}" for kind, _, size in sizes if size != "0")
    return [f"memory of rank {rank} in bytes, as --dry-run computes it: {shown}"]


def buckets(config: Config, sink: ParamAndGradBuffer, rank: int) -> str:
    """Return a line about the buckets that hold this rank's weights."""
    count = len(sink.weight_buckets)
    text = f"rank {rank} has its weights in {count} bucket{'s' * (count != 1)}"
    if sink.zero_stage == 3:
        return f"{text}, one transformer block each, and the parameters outside of blocks"
    how = "--ddp-bucket-size" if config.parallel.ddp_bucket_size else "the default"
    return f"{text} of about {sink.bucket_size:,} elements ({how})"


def in_full(config: Config, provider: ModelProvider, optimizer: Optimizer) -> list[str]:
    """Measure this rank and return a line for each kind of memory.

    Call it after a run's second step: in the first, ZeRO stage 3 still learns the order of its
    blocks and gathers none ahead. It does not wait for the device.
    """
    sink = optimizer.sink
    each = sink.weight_buckets
    ranks = {b.layout.sharing.cut: b.shard.rank for b in each if b.shard is not None}
    found, peaks = optimizer.memory(), transient(sink)
    return lines(config, provider, found, peaks, optimizer.grid.pp.rank, ranks)


def transient(sink: ParamAndGradBuffer) -> dict[str, int]:
    """Return the peak bytes that a step allocated on top, named as in buffers.transient."""
    gathered = sink.gatherer.peak if sink.gatherer else 0
    return {"whole gradients": sink.live.peak, "gathered weights": gathered}


def lines(
    config: Config,
    provider: ModelProvider,
    measured: Mapping[str, int],
    peaks: Mapping[str, int],
    pp_rank: int = 0,
    ranks: Mapping[str, int] | None = None,
) -> list[str]:
    """Return one line a kind: bytes measured and stated, and why they might differ.

    measured: Optimizer.memory(). peaks: transient(sink); of these, a kind that is neither measured
    nor stated has no line. ranks: as bucket_layout.memory takes them.
    """
    kept = rank_memory.flats(config, provider, pp_rank, frozen=True)
    of_kinds = rank_memory.state(config, kept, ranks)
    stated = dict.fromkeys(peaks, 0)
    if rank_memory.level(config) >= 2:  # below stage 2 a step allocates neither
        stated = buffers.transient(config, provider, pp_rank)
    out = []
    for kind, found in measured.items():
        why = "the formula is for the model as built on meta tensors"
        out.append(_line(kind, found, of_kinds[kind], why))
    for kind, found in peaks.items():
        if found or stated[kind]:
            why = (
                "the formula is for the second step on, with the most micro-batches; "
                "a block read by mpu.gradients.use stays gathered until its backward"
            )
            out.append(_line(f"{kind}, at most", found, stated[kind], why))
    return out


def _line(kind: str, found: int, stated: int, why: str) -> str:
    text = f"{kind:<25} {found:>15,} bytes"
    if found == stated:
        return f"{text}{EQUAL}"
    more = f"{abs(found - stated):,} {'more' if found > stated else 'fewer'}"
    return f"{text}, {more} than the formula's {stated:,}: {why}"


def check_host(config: Config, provider: ModelProvider, grid: Grid, device: torch.device) -> None:
    """Raise UsageError where the ranks of this host need more memory than it has available.

    It is asked before anything is allocated, of a CPU's memory only: a host that swaps does not
    answer for minutes, while a GPU refuses at once. A run that is far too small for that is not
    traced, which takes a second (`at_most`).
    """
    launch = grid.launch
    free = available() if device.type == "cpu" else None
    if free is None or at_most(config) * launch.local_world < free:
        return
    places = {rank: i for row in grid.groups("pp") for i, rank in enumerate(row)}
    first = launch.rank - launch.local_rank
    ranks = [places[r] for r in range(first, first + launch.local_world) if r in places]
    peaks = activations.peaks(config, provider)
    kinds = {r: dry_run.memory(config, provider, r, peaks[r]) for r in set(ranks)}
    total = sum(sum(kinds[r].values()) for r in ranks)
    if total <= free:
        return
    fullest = max(kinds.values(), key=lambda each: sum(each.values()))
    kind = max(fullest, key=lambda name: fullest[name])
    units, b, m = dry_run.in_units, config.batch, config.model
    sizes = f"--num-layers {m.num_layers} or --hidden-size {m.hidden_size}"
    if kind not in dry_run.STATE:
        sizes = f"--micro-batch-size {b.micro_batch_size} or --seq-length {m.seq_length}"
    raise UsageError(
        f"this host has {units(free)} of memory available, and its {len(ranks)} rank(s) need "
        f"{units(total)}, {units(fullest[kind])} of each for {kind}: lower {sizes} "
        "(--dry-run prints each kind)"
    )


def at_most(config: Config) -> float:
    """Return bytes that a rank's run surely stays below: a cheap bound, many times too large."""
    m, b, p = config.model, config.batch, config.parallel
    widest = max(m.ffn_hidden_size or 0, m.hidden_size, m.padded_vocab_size(1))
    tokens, pipeline = b.micro_batch_size * m.seq_length, p.pipeline_model_parallel_size
    if pipeline > 1:  # as many micro-batches as a step has may be in flight
        tokens *= max(1, b.global_batch_size // b.micro_batch_size)
    scores = m.num_attention_heads * m.seq_length
    layer = 256 * m.hidden_size * widest + 128 * tokens * (widest + scores)
    return float((m.num_layers + 2) * layer)


def available(root: Path = Path("/")) -> int | None:
    """Return the bytes of memory that this host, or this process's control group, can still give.

    Swap does not count. None where the system does not say.
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
    """Return what each control group above this process leaves of its limit, versions 2 and 1.

    Pages of files count as free: the kernel gives them up first.
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
    """Raise UsageError, in a sentence, where the block finds no memory."""
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


def empty_cache(config: Config, device: torch.device, level: int) -> None:
    """Empty CUDA's cache where --empty-unused-memory-level is at least `level`.

    1: before an update, and after the forwards of an evaluation. 2: after an update. Each time the
    device is waited for, and what is freed is asked for again in the next step.
    """
    if config.fault.empty_unused_memory_level >= level and device.type == "cuda":
        torch.cuda.empty_cache()
