# SPDX-License-Identifier: Apache-2.0
"""Tell how much memory a rank was measured to hold, beside what the dry run states.

What stays from step to step is in training/plan/rank_memory.py, the most that comes and goes in a
step in training/plan/buffers.py.
"""

from collections.abc import Mapping

from mpu.zero.optimizer import Optimizer
from mpu.zero.param_and_grad_buffer import ParamAndGradBuffer
from training.config import Config
from training.plan import buffers, rank_memory
from training.plan.model_profile import ModelProvider


def of(config: Config, provider: ModelProvider, optimizer: Optimizer) -> list[str]:
    """Measure this rank and return the lines: the buckets, then one a kind of memory.

    For after a run's second step: the first one learns the order in which level 3 uses its blocks,
    so that it gathers none ahead. Waits for nothing on the device.
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
    return [text, *lines(config, provider, optimizer.memory(), peaks, optimizer.grid.pp.rank)]


def transient(sink: ParamAndGradBuffer) -> dict[str, int]:
    """Return the most bytes that a step has allocated on top, by the names of buffers.transient."""
    gathered = sink.gatherer.peak if sink.gatherer else 0
    return {"whole gradients": sink.live.peak, "gathered weights": gathered}


def lines(
    config: Config,
    provider: ModelProvider,
    measured: Mapping[str, int],
    peaks: Mapping[str, int],
    pp_rank: int = 0,
) -> list[str]:
    """Return one line a kind: bytes measured and stated, and why they might differ.

    measured: Optimizer.memory(). peaks: of what a step allocates on top, by the names of
    buffers.transient; a kind that is neither measured nor stated has no line.
    """
    kept = rank_memory.state(config, rank_memory.flats(config, provider, pp_rank))
    stated = dict.fromkeys(peaks, 0)
    if rank_memory.level(config) >= 2:  # below, a step allocates neither
        stated = buffers.transient(config, provider, pp_rank)
    out = []
    for kind, found in measured.items():
        why = "the formula is of the model as it is built on meta tensors"
        out.append(_line(kind, found, kept[kind], why))
    for kind, found in peaks.items():
        if found or stated[kind]:
            why = (
                "the formula is of the second step on, with the most micro-batches; "
                "a block that mpu.gradients.use has touched is whole until its backward"
            )
            out.append(_line(f"{kind}, at most", found, stated[kind], why))
    return out


def _line(kind: str, found: int, said: int, why: str) -> str:
    text = f"{kind:<25} {found:>15,} bytes"
    if found == said:
        return f"{text}, equal to the formula"
    more = f"{abs(found - said):,} {'more' if found > said else 'fewer'}"
    return f"{text}, {more} than the formula's {said:,}: {why}"
