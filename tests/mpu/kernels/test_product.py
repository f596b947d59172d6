# SPDX-License-Identifier: Apache-2.0
"""What the overlap kernels' products ask of a GPU and of torch's settings."""

from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="this platform has no triton")

from mpu.kernels.product import Blocks, blocks_for, constants

# bytes of shared memory that a block may have, by compute capability (CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability")
SHARED = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}


@pytest.fixture
def precision():
    """Put torch's setting back; its old name raises where only the new one was set."""
    yield torch.backends.cuda.matmul
    torch.set_float32_matmul_precision("highest")


def test_the_precision_of_fp32_is_read_however_it_was_set(precision):
    weight = torch.zeros(16, 16)
    asked = lambda: constants(Blocks(16, 16, 16), weight)["PRECISION"]  # noqa: E731
    assert asked() == "ieee"
    torch.set_float32_matmul_precision("high")
    assert asked() == "tf32"
    torch.set_float32_matmul_precision("highest")
    assert asked() == "ieee"
    precision.fp32_precision = "tf32"
    with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
        torch.get_float32_matmul_precision()
    assert asked() == "tf32"


@pytest.mark.parametrize("capability", SHARED)
def test_tiles_fit_shared_memory(capability):
    dtypes = (torch.bfloat16, torch.float32)
    for dtype, rows, aligned in product(dtypes, (64, 4096), (True, False)):
        blocks = blocks_for(dtype, capability[0], rows, aligned)
        bytes_of_stage = (blocks.m + blocks.n) * blocks.k * dtype.itemsize
        assert bytes_of_stage * blocks.stages <= SHARED[capability] * 1024, (dtype, rows)
