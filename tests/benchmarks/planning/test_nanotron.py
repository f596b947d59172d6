# SPDX-License-Identifier: Apache-2.0
"""The allocator reserves as PyTorch's does, and nanotron's tensors add up to what was measured."""

from dataclasses import replace

import pytest

from benchmarks.planning.allocator import MIB, Allocator
from benchmarks.planning.nanotron import Stage, Step, reserved

ONE = Stage(
    layers=16, hidden=2048, ffn=8192, vocab=131072, tokens=4096, micro_batch=1, micro_batches=32,
    tp=1, dp=8, zero=0, first=True, last=True, tied=True, behind=0, ahead=True,
)  # fmt: skip


def test_segments_are_rounded_and_blocks_are_split_and_joined() -> None:
    memory = Allocator(1e12)
    first = memory.take(3 * MIB)
    assert memory.reserved == 20 * MIB
    rest = memory.take(16 * MIB)  # 17 MiB were left, 1 MiB of which is not split off
    assert memory.reserved == 20 * MIB and rest[0].size == 17 * MIB
    memory.give(first)
    memory.give(rest)
    whole = memory.take(20 * MIB)  # the two are one again
    assert memory.reserved == 20 * MIB
    memory.take(13 * MIB)
    assert memory.reserved == 34 * MIB  # 13 MiB are asked for as 14
    memory.take(100)
    assert memory.reserved == 36 * MIB  # a segment of small sizes
    memory.give(whole)
    assert memory.take(11 * MIB)[0] is whole[0]  # the smallest block that is large enough


def test_what_another_stream_has_used_waits_for_the_device() -> None:
    memory = Allocator(1e12)
    memory.ahead = 100
    memory.give(memory.take(16 * MIB), elsewhere=True)
    memory.take(16 * MIB)
    assert memory.reserved == 32 * MIB
    memory.clock = 100
    memory.take(16 * MIB)
    assert memory.reserved == 32 * MIB


def test_whole_free_segments_are_given_back_at_the_limit() -> None:
    memory = Allocator(50 * MIB)
    memory.give(memory.take(30 * MIB))
    memory.take(40 * MIB)
    assert (memory.reserved, memory.most, memory.full) == (40 * MIB, 40 * MIB, False)
    memory.take(20 * MIB)
    assert memory.full


def test_a_step_frees_what_it_takes() -> None:
    for stage in (ONE, replace(ONE, tp=4), replace(ONE, last=False, behind=3, micro_batches=9)):
        step = Step(replace(stage, layers=2), 1e15)
        step.set_up()
        kept = live(step)
        step.batch()
        step.batch()
        buffers = 2 * 2 * step.one if stage.tp > 1 else 0
        assert live(step) == kept + buffers


def live(step: Step) -> int:
    """Return the bytes of blocks that are not free."""
    free = [key[0] for pool in step.memory._free for key in pool]
    return step.memory.reserved - sum(free)


@pytest.mark.parametrize(
    ("stage", "measured"),
    [  # runs of the Ultra-Scale Playbook (Hugging Face, Apache-2.0), GiB
        (ONE, 36.7),
        (replace(ONE, zero=1, dp=256, micro_batches=1), 21.7),
        (replace(ONE, tp=4, tokens=32768, micro_batch=8, micro_batches=8, zero=1, dp=4), 33.7),
        (replace(ONE, layers=11, last=False, behind=1, zero=1, dp=16, tokens=8192, micro_batch=2,
                 micro_batches=8), 24.5),
        (replace(ONE, layers=3, last=False, behind=7, dp=1, tp=8, tokens=131072, micro_batch=32,
                 micro_batches=8), 63.9),
    ],
)  # fmt: skip
def test_runs_that_were_measured(stage: Stage, measured: float) -> None:
    gib, fits = reserved(stage, 80.0)
    assert fits and gib == pytest.approx(measured, rel=0.08)


def test_what_does_not_fit_is_told() -> None:
    assert not reserved(replace(ONE, tokens=65536, micro_batch=16, micro_batches=2), 80.0)[1]
