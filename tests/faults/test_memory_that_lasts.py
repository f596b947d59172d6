# SPDX-License-Identifier: Apache-2.0
"""Memory, descriptors, threads and shared memory over 3,000 steps of tiny real runs.

tests/run_ranks.py samples every so many steps. The long form takes every path, the short form 200
steps of one with experts and one without. benchmarks/bench_memory.py has bytes a step.
"""

import json
from dataclasses import dataclass
from statistics import median

import pytest

from tests.launcher import Launcher
from tests.sampling import sampled

MODEL = (
    "--mock-data --vocab-size 64 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 "
    "--seq-length 8 --lr 1e-3 --log-interval 10"
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
    "experts": (1, "--num-layers 2 --num-workers 0 --micro-batch-size 16 --num-experts 4"),
    "ep 2, all-to-all": (
        2, "--num-layers 2 --num-workers 0 --micro-batch-size 16 --num-experts 4 "
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
    ),
    "saves behind, evaluations, workers": (
        2, "--num-layers 2 --num-workers 2 --save {dir}/saved --async-save --save-interval 200 "
        "--keep-last-k 2 --eval-interval 100 --eval-iters 2",
    ),
}  # fmt: skip
LIMIT = 560.0  # seconds of a run


@dataclass
class Sample:
    """What a rank held after a step: bytes resident, bytes mapped without a file (shared), Python's
    small blocks after a collection of garbage, and bytes in use of what C and C++ allocate (heap).
    """

    step: int
    resident: int
    descriptors: int
    threads: int
    shared: int
    blocks: int
    heap: int


def run(launcher: Launcher, path: str, steps: int, every: int) -> list[list[Sample]]:
    """Run a path; return each rank's samples."""
    ranks, flags = PATHS[path]
    argv = [*MODEL.split(), *flags.split(), "--train-iters", str(steps)]
    # torch's flight recorder fills up by 1 kB for each of 2,000 collectives over gloo
    env = {"TORCH_FR_BUFFER_SIZE": "0"}
    result = launcher.run(ranks, argv, sample=every, limit=LIMIT, env=env)
    assert result.codes == [0] * ranks, result.said(0)
    files = [result.folder / f"samples.{rank}" for rank in range(ranks)]
    return [[Sample(*json.loads(x)) for x in f.read_text().splitlines()] for f in files]


def slope(samples: list[Sample], what: str = "resident") -> float:
    """Return what a step adds to a number, by least squares."""
    steps, sizes = [s.step for s in samples], [getattr(s, what) for s in samples]
    middle, size = sum(steps) / len(steps), sum(sizes) / len(sizes)
    rises = sum((a - middle) * (b - size) for a, b in zip(steps, sizes, strict=True))
    return rises / sum((a - middle) ** 2 for a in steps)


def check_constant(samples: list[Sample], blocks: float, heap: float) -> None:
    """Hold the second half of the samples to what the first half showed, and what Python and C have
    allocated to at most so many blocks and bytes a step.
    """
    half = len(samples) // 2
    for name in ("descriptors", "threads", "shared"):
        early, late = (
            [getattr(s, name) for s in part] for part in (samples[:half], samples[half:])
        )
        assert median(late) == median(early), f"{name}: {early} then {late}"
    for name, most in (("blocks", blocks), ("heap", heap)):
        found = slope(samples, name)
        assert found <= most, f"{name}: {found:.2f} a step, {[getattr(s, name) for s in samples]}"


@pytest.mark.prove
@pytest.mark.parametrize("path", PATHS)
def test_nothing_grows_over_3000_steps(launcher: Launcher, path: str) -> None:
    for samples in run(launcher, path, 3000, 20):
        late = [s for s in samples if s.step > 1000]
        assert slope(late) <= 1024, f"{slope(late):.0f} bytes a step: {late[0]} to {late[-1]}"
        check_constant(late, blocks=0.1, heap=64)


@pytest.mark.parametrize("path", sampled(["plain", "experts"], 2))
def test_nothing_grows_over_200_steps(launcher: Launcher, path: str) -> None:
    for samples in run(launcher, path, 200, 10):
        late = [s for s in samples if s.step > 80]
        assert slope(late) <= 16 * 1024, f"{slope(late):.0f} bytes a step"
        check_constant(late, blocks=4, heap=2048)  # windows of the last steps fill up
