# SPDX-License-Identifier: Apache-2.0
"""Report how much memory a rank was measured to use, beside what the dry run states.

The dry run's formulas are in estimate/rank_memory.py, for what stays from step to step, and in
estimate/buffers.py, for the most that a step allocates on top.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from estimate import buffers, rank_memory
from estimate.model_profile import ModelProvider
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
    return brief(in_full(config, provider, optimizer))


def brief(report: list[str]) -> list[str]:
    """Return the report as one line where every kind is equal to its formula."""
    buckets, *kinds = report
    if not all(line.endswith(EQUAL) for line in kinds):
        return report
    sizes = [line.removesuffix(f" bytes{EQUAL}").rpartition(" ") for line in kinds]
    shown = ", ".join(f"{kind.strip()} {size}" for kind, _, size in sizes if size != "0")
    return [f"{buckets}; bytes, as the formulas state them: {shown}"]


def in_full(config: Config, provider: ModelProvider, optimizer: Optimizer) -> list[str]:
    """Measure this rank and return the lines: the buckets, then one a kind of memory.

    Call it after a run's second step: in the first, ZeRO stage 3 still learns the order of its
    blocks and gathers none ahead. It does not wait for the device.
    """
    sink = optimizer.sink
    peaks = transient(sink)
    count = len(sink.buckets)
    text = f"rank {optimizer.grid.rank} has its weights in {count} bucket{'s' * (count > 1)}"
    if sink.zero_stage == 3:
        text += ", a transformer block in each, and what lies outside of blocks"
    else:
        how = "--ddp-bucket-size" if config.parallel.ddp_bucket_size else "chosen together"
        text += f" of about {sink.bucket_size:,} elements ({how})"
    ranks = {b.layout.sharing.cut: b.shard.rank for b in sink.buckets if b.shard is not None}
    found = optimizer.memory()
    return [text, *lines(config, provider, found, peaks, optimizer.grid.pp.rank, ranks)]


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
    nor stated has no line. ranks: as layout.memory takes them.
    """
    kept = rank_memory.state(config, rank_memory.flats(config, provider, pp_rank), ranks)
    stated = dict.fromkeys(peaks, 0)
    if rank_memory.level(config) >= 2:  # below stage 2 a step allocates neither
        stated = buffers.transient(config, provider, pp_rank)
    out = []
    for kind, found in measured.items():
        why = "the formula is of the model as it is built on meta tensors"
        out.append(_line(kind, found, kept[kind], why))
    for kind, found in peaks.items():
        if found or stated[kind]:
            why = (
                "the formula holds from the second step on, with the most micro-batches; "
                "a block that mpu.gradients.use has touched is whole until its backward"
            )
            out.append(_line(f"{kind}, at most", found, stated[kind], why))
    return out


def _line(kind: str, found: int, said: int, why: str) -> str:
    text = f"{kind:<25} {found:>15,} bytes"
    if found == said:
        return f"{text}{EQUAL}"
    more = f"{abs(found - said):,} {'more' if found > said else 'fewer'}"
    return f"{text}, {more} than the formula's {said:,}: {why}"


@contextmanager
def enough() -> Iterator[None]:
    """Raise UsageError, in a sentence, where the block finds no memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        said = str(error).splitlines() or ["MemoryError"]
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not any(
            "can't allocate memory" in line for line in said
        ):
            raise
        raise UsageError(
            f"there is not enough memory: {said[0][:300]} (--dry-run prints what each rank needs)"
        ) from None


def empty_cache(config: Config, device: torch.device, level: int) -> None:
    """Empty CUDA's cache where --empty-unused-memory-level is at least `level`.

    1: before an update, and after the forwards of an evaluation. 2: after an update. Each time the
    device is waited for, and what is freed is asked for again in the next step.
    """
    if config.fault.empty_unused_memory_level >= level and device.type == "cuda":
        torch.cuda.empty_cache()
