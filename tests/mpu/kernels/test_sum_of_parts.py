# SPDX-License-Identifier: Apache-2.0
"""The sum of a ring's parts in Triton's interpreter, bit by bit, and compiled for GPUs."""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="this platform has no triton")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mpu.comm import collectives
from mpu.kernels import sum_of_parts as kernels
from tests.mpu.kernels.test_ahead_of_time import spilled


def both(comm) -> None:
    """The order of torch's sum; its bits, but in bf16, which the interpreter cuts off."""
    g = torch.Generator().manual_seed(0)
    kinds = (torch.float32, torch.bfloat16, torch.float64)
    for dtype, count, shape in itertools.product(kinds, (2, 3, 8), ((5, 3, 7), (2, 1024), (1,))):
        parts = torch.randn(count, *shape, generator=g).mul(9).exp().to(dtype)
        parts[::2] *= -1
        made, want = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
        kernels.sum_of_parts(parts, made)
        collectives.sum_of_parts(parts, want)
        if dtype == torch.bfloat16:
            assert ((made - want).abs() <= want.abs() * 2.0**-7).all()
        else:
            assert torch.equal(made, want), (dtype, count, shape)
            backwards = torch.empty_like(want)
            kernels.sum_of_parts(parts.flip(0), backwards)
            assert count == 2 or shape == (1,) or not torch.equal(backwards, want)


def test_the_kernel_adds_in_torchs_order(interpreted):
    interpreted(1).run(both)


@pytest.mark.parametrize("major, dtype", [(9, "bf16"), (8, "fp32")])
def test_compiles_and_spills_nothing(major, dtype, tmp_path):
    constants = {"COUNT": 8, "BLOCK": kernels.BLOCK}
    names = kernels.sum_of_parts_kernel.arg_names
    types = {"parts": f"*{dtype}", "out": f"*{dtype}", "n": "i32"}
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in types}
    source = ASTSource(kernels.sum_of_parts_kernel.jitted, signature, constants, attrs)
    options = {"num_warps": kernels.WARPS}
    asm = triton.compile(source, target=GPUTarget("cuda", 10 * major, 32), options=options).asm
    assert not spilled(asm, tmp_path)
    assert asm["ptx"].count("ld.global.v4") >= 8  # each part by 16 bytes
