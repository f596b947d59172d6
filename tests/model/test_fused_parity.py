# SPDX-License-Identifier: Apache-2.0
"""Layouts of the matrix of test_parity.py in fp64 with every fused operation of a CPU on: norm with
the residual add, RoPE, SwiGLU, the loss's rows (csrc/fused.cpp) and the loss in chunks.

Triton's kernels on the same matrix: tests/mpu/kernels/test_model_parity.py.
"""

import random
from itertools import cycle

import pytest

from mpu import native
from tests.model.fused_on import CSRC, on_csrc
from tests.model.test_parity import cases, twins  # noqa: F401  # a fixture
from tests.model.twin import check


def fused(size: int) -> list[dict]:
    """List the matrix with the loss in chunks, of 13 columns and of all; ZeRO stages take turns."""
    zero, chunk = cycle((0, 1, 3)), cycle((13, 200))
    return [
        case | {"chunk": next(chunk), "zero": next(zero) if case["dp"] > 1 else 0}
        for case in cases(size)
    ]


def compare(world, twin_of, size: int, some: list[dict]) -> None:
    if native.load() is None:
        pytest.skip(native.reason())
    for first in range(0, len(some), 20):  # a world answers within its time-out
        part = some[first : first + 20]
        results = world(size).run(on_csrc, part)
        for i, case in enumerate(part):
            for result in results:
                assert result[i]["called"].keys() == CSRC, case
            check([result[i] for result in results], *twin_of(case))


@pytest.mark.parametrize("size", [2, 4])
def test_a_sample_of_the_matrix(world, twins, size):  # noqa: F811
    compare(world, twins, size, random.Random(size).sample(fused(size), 4 // size))


@pytest.mark.prove
@pytest.mark.parametrize("size", [1, 2, 4])
def test_more_of_the_matrix(world, twins, size):  # noqa: F811
    compare(world, twins, size, fused(size)[::3])
