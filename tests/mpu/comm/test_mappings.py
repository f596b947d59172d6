# SPDX-License-Identifier: Apache-2.0
"""Each backward is its forward's transpose: summed over ranks, <f(x), dy> = <x, backward(dy)>."""

import pytest
import torch

from mpu.comm import mappings
from mpu.comm.collectives import all_reduce

# name: (rows a rank gives, rows it gets), t ranks, and whether x / y are copies on all ranks
PAIRS = {
    "copy_to_tensor_model_parallel_region": (4, 4, True, False),
    "reduce_from_tensor_model_parallel_region": (4, 4, False, True),
    "gather_from_sequence_parallel_region": (4, 8, False, False),
    "reduce_scatter_to_sequence_parallel_region": (8, 4, False, False),
}


def transpose(comm, name: str) -> None:
    rows, out_rows, x_same, y_same = PAIRS[name]
    axis = comm.grid(2).tp
    own = torch.Generator().manual_seed(comm.rank)
    same = torch.Generator().manual_seed(99)
    x = torch.randn(rows, 3, dtype=torch.float64, generator=same if x_same else own)
    dy = torch.randn(out_rows, 3, dtype=torch.float64, generator=same if y_same else own)
    x.requires_grad_()
    y = getattr(mappings, name)(x, axis)
    assert y.shape == dy.shape
    y.backward(dy)
    left = (y.detach() * dy).sum().view(1) / (2 if y_same else 1)
    right = (x.detach() * x.grad).sum().view(1) / (2 if x_same else 1)
    torch.testing.assert_close(
        all_reduce(left, axis)[0], all_reduce(right, axis)[0], rtol=1e-13, atol=0
    )


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_is_its_own_transpose(world, name):
    world(2).run(transpose, name)
