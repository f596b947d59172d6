# SPDX-License-Identifier: Apache-2.0
"""Compute the batch size of each step, and convert between steps and samples.

The clock of a run is the number of samples consumed, and the batch size is a pure function of it.
So a resumed run needs no other state, and every layout sees the same batch sizes.
"""

import math
from collections.abc import Sequence

from training.settings.config import Config, UsageError

_SUFFIX = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
Schedule = tuple[tuple[int, int], ...]


def parse_schedule(text: str, seq_length: int) -> Schedule:
    """Read "0:768 250B:1536" into ((first sample, batch size), ...), sorted.

    A threshold counts tokens and may end in K, M, B or T; samples are threshold // seq_length.
    Raises UsageError as read_schedule does, and if two thresholds fall on one sample.
    """
    steps = [(tokens // seq_length, size) for tokens, size in read_schedule(text)]
    for (before, _), (after, _) in zip(steps, steps[1:], strict=False):
        if before == after:
            raise _wrong(
                text, f"two thresholds fall on sample {after} (a sample has {seq_length} tokens)"
            )
    return tuple(steps)


def read_schedule(text: str) -> Schedule:
    """Read "0:768 250B:1536" into ((token, batch size), ...), sorted.

    Raises UsageError unless the first threshold is 0 and every size is at least 1.
    """
    steps = []
    for entry in text.strip("'\" ").replace(",", " ").split():
        threshold, colon, size = entry.partition(":")
        if not colon:
            raise _wrong(text, f"{entry} is not TOKENS:SAMPLES")
        try:
            steps.append((count(threshold), count(size)))
        except ValueError as error:
            raise _wrong(text, str(error)) from None
    steps.sort()
    if not steps or steps[0][0] != 0:
        raise _wrong(text, "the first threshold must be 0")
    if min(size for _, size in steps) < 1:
        raise _wrong(text, "a batch holds at least 1 sample")
    return tuple(steps)


def count(word: str) -> int:
    """Parse a count such as 250B, 1.5K or 768. Raises ValueError."""
    factor = _SUFFIX.get(word[-1:].upper(), 1)
    try:
        value = float(word[:-1] if factor > 1 else word) * factor
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{word} is not a count such as 768, 300K or 250B")
    return int(value)


def _wrong(text: str, why: str) -> UsageError:
    return UsageError(f'--step-batch-size-schedule "{text}": {why}')


def schedule(config: Config) -> Schedule:
    """Return the run's schedule of batch sizes; a constant size is a schedule of one entry."""
    batch = config.batch
    return batch.step_batch_size_schedule or ((0, batch.global_batch_size),)


def steps_of(sizes: Sequence[Sequence[int]], consumed: int) -> list[list[int]]:
    """Return [first sample, batch size] of each run of equal steps, up to `consumed` samples."""
    found, at = [], 0
    for (_, size), following in zip(sizes, [*sizes[1:], (consumed, 0)], strict=True):
        steps = -(-(min(following[0], consumed) - at) // size)
        if steps > 0:
            found.append([at, size])
            at += steps * size
    return found


def global_batch_size(config: Config, consumed: int) -> int:
    """Return the number of samples in the step that starts after `consumed` samples."""
    return [size for first, size in schedule(config) if first <= consumed][-1]


def micro_batches(config: Config, consumed: int) -> int:
    """Return each rank's number of micro-batches in the step after `consumed` samples."""
    one = config.batch.micro_batch_size * config.parallel.data_parallel_size
    return global_batch_size(config, consumed) // one


def samples_after(config: Config, iterations: int) -> int:
    """Return the number of samples that the first `iterations` steps consume.

    A batch size ends with the first step that reaches the next threshold.
    """
    consumed, left = 0, iterations
    steps = schedule(config)
    for (_, size), following in zip(steps, [*steps[1:], (None, 0)], strict=True):
        taken = left if following[0] is None else -(-(following[0] - consumed) // size)
        taken = min(left, max(0, taken))
        consumed, left = consumed + taken * size, left - taken
    return consumed


def iterations_at(config: Config, samples: int, consumed: int = 0) -> int:
    """Return the number of steps from `consumed` samples to at least `samples`."""
    iterations = 0
    steps = schedule(config)
    for (_, size), following in zip(steps, [*steps[1:], (None, 0)], strict=True):
        end = samples if following[0] is None else min(samples, following[0])
        taken = max(0, -(-(end - consumed) // size))
        consumed, iterations = consumed + taken * size, iterations + taken
    return iterations


def total_iterations(config: Config, iteration: int = 0, consumed: int = 0) -> int:
    """Return the total number of steps of a run at `iteration`, after `consumed` samples.

    As in Megatron-LM, --train-samples with a constant batch size leaves out an incomplete last
    step; with a schedule the last step may go past --train-samples.
    """
    batch = config.batch
    if batch.train_iters is not None:
        return batch.train_iters
    assert batch.train_samples is not None, "parse() lets no run through without a length"
    if batch.step_batch_size_schedule is None:
        left = max(0, batch.train_samples - consumed)
        return iteration + left // batch.global_batch_size
    return iteration + iterations_at(config, batch.train_samples, consumed)


def total_samples(config: Config) -> int:
    """Return the number of samples the run consumes."""
    return samples_after(config, total_iterations(config))
