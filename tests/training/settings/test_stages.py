# SPDX-License-Identifier: Apache-2.0
"""Where stages begin, against counting step by step."""

import random

import pytest

from training.settings.batch_size import steps_of
from training.settings.config import Stage, UsageError
from training.settings.stages import begun, plan, stage_at


def staged(*numbers: tuple[int, int]) -> list[Stage]:
    """Return stages of (start_tokens, seq_length)."""
    return [
        Stage(f"s{i}", start, ("data",), (("seq_length", length),))
        for i, (start, length) in enumerate(numbers)
    ]


def counted(stages: list[Stage], sizes: list[tuple[int, int]], steps: int):
    """Return (samples, tokens, stage, size) before each step, one step after the other."""
    samples = tokens = stage = size_at = 0
    for _ in range(steps):
        while stage + 1 < len(stages) and tokens >= stages[stage + 1].start_tokens:
            stage += 1
        length = stages[stage].length
        while size_at + 1 < len(sizes) and (sizes[size_at + 1][0] - tokens) < length:
            size_at += 1
        size = sizes[size_at][1]
        yield samples, tokens, stage, size
        samples, tokens = samples + size, tokens + size * length


@pytest.mark.parametrize("seed", range(12))
def test_a_plan_is_counting(seed):
    rng = random.Random(seed)
    starts = [0, *sorted(rng.sample(range(200, 20_000), rng.randrange(4)))]
    stages = staged(*((start, rng.choice((8, 16, 40))) for start in starts))
    sizes = [(0, 4)]
    for token in sorted(rng.sample(range(100, 20_000), rng.randrange(4))):
        sizes.append((token, rng.choice((2, 4, 6, 8))))
    try:
        placed, by_sample = plan("file", stages, tuple(sizes))
    except UsageError as error:
        assert "has no step" in str(error)
        assert {stage for *_, stage, _ in counted(stages, sizes, 4000)} != {*range(len(stages))}
        return
    assert [sample for sample, _ in by_sample] == sorted({sample for sample, _ in by_sample})
    for samples, tokens, stage, size in counted(stages, sizes, 1500):
        assert stage_at(placed, samples) == stage
        first = placed[stage]
        assert first.first_token + (samples - first.first_sample) * first.length == tokens
        assert [n for at, n in by_sample if at <= samples][-1] == size
    assert begun(placed, 0) == [] and begun(placed, 1) == placed[:1]


def test_a_stage_without_a_step_is_refused():
    with pytest.raises(UsageError, match="stage 's1' has no step of 32 tokens before stage 's2'"):
        plan("a.json", staged((0, 8), (100, 8), (120, 8)), ((0, 4),))
    assert len(plan("a.json", staged((0, 8), (100, 8), (129, 8)), ((0, 4),))[0]) == 3


def test_the_same_steps_have_the_same_sizes():
    assert steps_of([[0, 8], [34, 16]], 1000) == steps_of([[0, 8], [40, 16]], 1000)
    assert steps_of([[0, 8], [34, 16]], 40) == [[0, 8]] == steps_of([[0, 8]], 40)
    assert steps_of([[0, 8], [34, 16]], 56) == [[0, 8], [40, 16]]
    assert steps_of([[0, 8]], 0) == []
