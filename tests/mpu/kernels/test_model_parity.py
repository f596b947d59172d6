# SPDX-License-Identifier: Apache-2.0
"""Layouts of tests/model/test_parity.py with Triton's kernels, in its interpreter.

tests/model/test_parity.py itself runs in csrc/fused.cpp. In fp64, each gradient within
1e-12 of the serial twin's norm: norm with the residual add, RoPE, SwiGLU. The kernels of the loss
know no fp64, so csrc does it there. In fp32 all of them run, for two steps, within 1e-4.
"""

import random

import pytest

pytest.importorskip("triton", reason="this platform has no triton")

from tests.model.fused_on import KERNELS, on_kernels
from tests.model.test_parity import cases, twins  # noqa: F401  # a fixture
from tests.model.twin import Twin, check

NARROW = dict(dtype="float32", lr=1e-2)


def compare(world, twin_of, size: int, some: list[dict]) -> None:
    for case in some:  # one a call: a world answers within its time-out
        results = [of_rank for (of_rank,) in world(size).run(on_kernels, [case])]
        assert all(result["called"].keys() == KERNELS["float64"] for result in results), case
        check(results, *twin_of(case))


def compare_narrow(world, size: int, some: list[dict]) -> None:
    for case in some:
        results = [of_rank for (of_rank,) in world(size).run(on_kernels, [case | NARROW], 2)]
        twin = Twin(case["tied"])
        losses, norms = twin.train(2, lr=1e-2, clip=0.0, masks=case.get("masks", False))
        for result in results:
            assert result["called"].keys() == KERNELS["float32"], case
            assert result["losses"] == pytest.approx(losses, rel=1e-4)
        check(results, twin, losses[0], norms[0], within=1e-4)


def one(seed: int, m: int) -> list[dict]:
    """Draw a layout of two ranks that cut tensors: the interpreter takes seconds a micro-batch."""
    return [random.Random(seed).choice([c for c in cases(2) if c["m"] == m and c["tp"] == 2])]


@pytest.mark.prove
def test_a_sample_in_fp64(interpreted, twins):  # noqa: F811
    compare(interpreted, twins, 2, one(4, m=3))


@pytest.mark.prove
def test_a_sample_in_fp32(interpreted):
    compare_narrow(interpreted, 2, one(5, m=1))
