# SPDX-License-Identifier: Apache-2.0
"""Masters and moments in host memory under weights on a GPU; `make gpu-check` runs it.

Copies are exact and the host's AdamW is the CPU's, so the bits are those of a run on the CPU.
"""

import pytest
import torch

from tests.mpu.optim.test_offload import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_bits_of_the_cpu(dtype):
    got, want = train(dtype, offloaded=True, device="cuda"), train(dtype, offloaded=False)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
