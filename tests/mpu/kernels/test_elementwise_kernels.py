# SPDX-License-Identifier: Apache-2.0
"""The kernels of RMSNorm, RoPE and SwiGLU in Triton's interpreter: against float64, and bytes."""

import pytest
import torch

pytest.importorskip("triton", reason="this platform has no triton")

from tests.mpu.kernels.elementwise import (
    MOST,
    OPERATIONS,
    block,
    count,
    long_norm,
    norm,
    rope,
    run_cases,
    swiglu,
)

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
SHAPES = {norm: ((0, 7), (1, 7), (3, 17), (37, 64), (5, 1025), (200, 6))}
SHAPES[rope] = ((1, 1), (3, 17), (2, 64))
SHAPES[long_norm] = ((1, 7), (3, 17), (13, 64), (5, 90))
SHAPES[swiglu] = ((1, 1), *SHAPES[norm][2:-1])


CASES = [
    (operation, dtype, *shape, added)
    for operation in (*OPERATIONS, long_norm)
    for dtype in DTYPES
    for shape in SHAPES[operation]
    for added in (False, True)
]


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.prove)])
def test_kernels_equal_float64_to_some_units_in_the_last_place(interpreted, every):
    """Forward, backward, and the weight's gradient; odd shapes, every dtype, both variants."""
    seen = set()
    for worst in interpreted(1).run(run_cases, CASES[::every]):
        for (name, dtype), found in worst.items():
            assert found <= MOST[name], (name, dtype, found)
            seen.add((name, dtype))
    assert len(seen) == len(SHAPES) * len(DTYPES)


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.prove), torch.bfloat16]
)
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_bytes_of_a_launch_are_those_declared(interpreted, operation, dtype, added):
    found = interpreted(1).run(count, (operation, dtype, 5, 40, added))[0]
    kernels = {norm: 3, rope: 1, swiglu: 2}[operation]
    assert len(found) == kernels
    for name, launches in found.items():
        for counted, declared in launches:
            assert counted == declared, name


def test_layers_over_the_kernels_are_those_of_a_cpu(interpreted):
    """Outputs, the input's gradient and every weight's, of two micro-batches."""
    world = interpreted(1)
    found, wanted = (world.run(block, triton)[0] for triton in (True, False))
    assert len(found) == len(wanted) == 7
    for got, want in zip(found, wanted, strict=True):
        assert (got - want).norm() <= 1e-6 * want.norm()
