# SPDX-License-Identifier: Apache-2.0
"""Batch sizes over a run: golden schedules, and closed forms against counting step by step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.settings.arguments import BatchConfig, ModelConfig, ParallelConfig
from training.settings.batch_size import (
    global_batch_size,
    iterations_at,
    micro_batches,
    parse_schedule,
    samples_after,
    total_iterations,
    total_samples,
)
from training.settings.config import Config, UsageError


def config(steps=None, **batch):
    if steps:
        batch |= {"step_batch_size_schedule": steps, "global_batch_size": steps[0][1]}
    return Config(ModelConfig(2, 64, 4, 32), batch=BatchConfig(**batch))


def test_thresholds_count_tokens_with_suffixes():
    assert parse_schedule("0:768 250B:1536 500B:3072 750B:6144", 8192) == (
        (0, 768),
        (30517578, 1536),
        (61035156, 3072),
        (91552734, 6144),
    )
    assert parse_schedule("'1.5K:4,0:2 3M:8 1T:16'", 1000) == (
        (0, 2),
        (1, 4),
        (3000, 8),
        (10**9, 16),
    )


@pytest.mark.parametrize(
    "text,why",
    [
        ("", "first threshold must be 0"),
        ("1K:4", "first threshold must be 0"),
        ("0:4 8", "8 is not TOKENS:SAMPLES"),
        ("0:4 x:8", "x is not a count"),
        ("0:4 -5:8", "-5 is not a count"),
        ("0:4 nan:8", "nan is not a count"),
        ("0:0", "at least 1 sample"),
        ("0:4 10:8", "two thresholds fall on sample 0"),
    ],
)
def test_mistakes_are_told(text, why):
    with pytest.raises(UsageError, match=f"--step-batch-size-schedule.*{why}"):
        parse_schedule(text, 1000)


def test_size_at_a_sample():
    run = config(((0, 4), (10, 8), (100, 16)), train_iters=1)
    assert [global_batch_size(run, n) for n in (0, 9, 10, 99, 100, 10**9)] == [4, 4, 8, 8, 16, 16]
    assert global_batch_size(config(global_batch_size=6), 10**6) == 6


def test_micro_batches_of_a_rank():
    run = config(((0, 8), (10, 16)), micro_batch_size=2)
    wide = Config(run.model, ParallelConfig(world_size=4, tensor_model_parallel_size=2), run.batch)
    assert (micro_batches(wide, 0), micro_batches(wide, 10)) == (2, 4)


schedules = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 9)), min_size=1, max_size=5).map(
    lambda gaps: tuple((sum(g for g, _ in gaps[:i]), size) for i, (_, size) in enumerate(gaps))
)


@given(schedules, st.integers(0, 120))
def test_samples_after_is_counting(steps, iterations):
    run, consumed = config(steps), 0
    for _ in range(iterations):
        consumed += global_batch_size(run, consumed)
    assert samples_after(run, iterations) == consumed


@given(schedules, st.integers(0, 400))
def test_iterations_at_is_counting(steps, samples):
    run, consumed, iterations = config(steps), 0, 0
    while consumed < samples:
        consumed += global_batch_size(run, consumed)
        iterations += 1
    assert iterations_at(run, samples) == iterations


def test_length_of_a_run():
    assert total_iterations(config(global_batch_size=4, train_iters=7)) == 7
    assert total_samples(config(global_batch_size=4, train_iters=7)) == 28
    # a constant batch leaves out the incomplete last step; a schedule takes it whole
    assert total_iterations(config(global_batch_size=4, train_samples=30)) == 7
    assert total_samples(config(global_batch_size=4, train_samples=30)) == 28
    varying = config(((0, 4), (10, 8)), train_samples=30)
    assert (total_iterations(varying), total_samples(varying)) == (6, 36)
