# SPDX-License-Identifier: Apache-2.0
"""Memory, descriptors, threads and shared memory over 5,000 steps of tiny real runs.

tests/run_ranks.py samples /proc/self every so many steps. The long form takes every path, the short
form 300 steps of one.
"""

import json
from dataclasses import dataclass
from statistics import median

import pytest

from tests.launcher import Launcher

MODEL = (
    "--mock-data --vocab-size 64 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 "
    "--seq-length 8 --lr 1e-3 --log-interval 100"
)
PATHS = {  # name: (ranks, flags)
    "plain": (1, "--num-layers 2 --num-workers 0"),
    "tp 2, sp, shared memory": (
        2, "--num-layers 2 --num-workers 0 --tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "tp 2, ring, no shared memory": (
        2, "--num-layers 2 --num-workers 0 --tensor-model-parallel-size 2 --sequence-parallel "
        "--tp-comm-overlap ring --no-shared-memory",
    ),
    "pp 2, interleaved": (
        2, "--num-layers 4 --num-workers 0 --pipeline-model-parallel-size 2 --global-batch-size 2 "
        "--num-virtual-stages-per-pipeline-rank 2",
    ),
    "dp 2, ZeRO 3, overlap": (
        2, "--num-layers 2 --num-workers 0 --zero-stage 3 --overlap-grad-reduce "
        "--overlap-param-gather",
    ),
    "saves behind, evaluations, workers": (
        2, "--num-layers 2 --num-workers 2 --save {dir}/saved --async-save --save-interval 200 "
        "--keep-last-k 2 --eval-interval 100 --eval-iters 2",
    ),
}  # fmt: skip
LIMIT = 560.0  # seconds of a run


@dataclass
class Sample:
    """What /proc/self said after a step. resident: bytes; shared: bytes mapped without a file."""

    step: int
    resident: int
    descriptors: int
    threads: int
    shared: int


def run(launcher: Launcher, path: str, steps: int, every: int) -> list[list[Sample]]:
    """Run a path; return each rank's samples."""
    ranks, flags = PATHS[path]
    argv = [*MODEL.split(), *flags.split(), "--train-iters", str(steps)]
    result = launcher.run(ranks, argv, sample=every, limit=LIMIT)
    assert result.codes == [0] * ranks, result.said(0)
    files = [result.folder / f"samples.{rank}" for rank in range(ranks)]
    return [[Sample(*json.loads(x)) for x in f.read_text().splitlines()] for f in files]


def slope(samples: list[Sample]) -> float:
    """Return the bytes that a step adds to resident memory, by least squares."""
    steps, sizes = [s.step for s in samples], [s.resident for s in samples]
    middle, size = sum(steps) / len(steps), sum(sizes) / len(sizes)
    rises = sum((a - middle) * (b - size) for a, b in zip(steps, sizes, strict=True))
    return rises / sum((a - middle) ** 2 for a in steps)


def check_constant(samples: list[Sample]) -> None:
    """Hold the second half of the samples to what the first half showed."""
    half = len(samples) // 2
    for name in ("descriptors", "threads", "shared"):
        early, late = (
            [getattr(s, name) for s in part] for part in (samples[:half], samples[half:])
        )
        assert median(late) == median(early), f"{name}: {early} then {late}"


@pytest.mark.prove
@pytest.mark.parametrize("path", PATHS)
def test_nothing_grows_over_5000_steps(launcher: Launcher, path: str) -> None:
    for samples in run(launcher, path, 5000, 20):
        late = [s for s in samples if s.step > 1000]
        assert slope(late) <= 1024, f"{slope(late):.0f} bytes a step: {late[0]} to {late[-1]}"
        check_constant(late)


def test_nothing_grows_over_300_steps(launcher: Launcher) -> None:
    for samples in run(launcher, "plain", 300, 10):
        late = [s for s in samples if s.step > 100]
        assert slope(late) <= 16 * 1024, f"{slope(late):.0f} bytes a step"
        check_constant(late)
