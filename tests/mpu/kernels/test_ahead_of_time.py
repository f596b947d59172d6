# SPDX-License-Identifier: Apache-2.0
"""Every overlap kernel compiles for a Hopper GPU, without one, and has the instructions it needs.

The protocol needs acquire and release at system scope; the speed needs wgmma and TMA.
"""

import re

import pytest

pytest.importorskip("triton", reason="this platform has no triton")
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mpu.kernels import all_gather_matmul, matmul_reduce_scatter, signals

ELEMENT = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32, "fp8e4nv": tl.float8e4nv}
TABLES = {
    "inbox", "arrived", "outbox", "raises", "scale_inbox", "scale_outbox",
}  # fmt: skip
BLOCKS = dict(BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, GROUP=8, ROWS=True, TMA=True, DOT_F32=False)


def ptx_of(kernel, element="bf16", warps=8, **constants):
    """Compile a kernel and return its PTX; ptxas accepts it, too, or this raises."""
    types = {name: "*i64" for name in TABLES} | {"counters": "*i32", "error": "i64"}
    types |= {name: f"*{element}" for name in ("x", "w")} | {"patience": "i64"}
    types |= {name: "*bf16" if element == "fp8e4nv" else f"*{element}" for name in ("y", "out")}
    types |= {name: "*fp32" for name in ("x_scales", "w_scales")}
    if kernel is matmul_reduce_scatter.matmul_scatter_kernel or "SCALED" in constants:
        constants.setdefault("SCALED", element == "fp8e4nv")
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    assert not set(constants) - set(signature)
    # what a launch finds out about its arguments: addresses and sizes that 16 divides
    runtime = {"x", "w", "y", "out", "n", "k", "stride_n", "stride_k", *TABLES}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name in runtime and name not in constants
    }
    source = ASTSource(kernel, signature, constants, attrs)
    options = {"num_warps": warps, "num_stages": 3}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.asm["cubin"]
    return compiled.asm["ptx"]


def has(ptx, *patterns):
    for pattern in patterns:
        assert re.search(pattern, ptx), f"the PTX has no {pattern}"


ACQUIRE, RELEASE = r"ld\.global\.sys\.acquire\.b32", r"atom\.global\.sys\.release\.exch"
COUNT, FENCE = r"atom\.global\.gpu\.acq_rel\.add", r"fence\.proxy\.async\.global"
TMA, WGMMA = r"cp\.async\.bulk\.tensor", r"wgmma\.mma_async"


def gather(element, pushers=16, **more):
    constants = BLOCKS | dict(
        PUSHERS=pushers, PUSH_M=16, PUSH_K=512, WORLD=8, SCALED=element == "fp8e4nv",
        PRECISION="ieee", WAIT=signals.wait_flag, RAISE=signals.raise_flag,
    )  # fmt: skip
    warps = more.pop("warps", 8)
    return ptx_of(all_gather_matmul.all_gather_matmul_kernel, element, warps, **(constants | more))


def scatter(element, **more):
    constants = BLOCKS | dict(
        WORLD=8, WIRE=tl.bfloat16, PRECISION="ieee", RAISE=signals.raise_flag
    )  # fmt: skip
    warps = more.pop("warps", 8)
    return ptx_of(matmul_reduce_scatter.matmul_scatter_kernel, element, warps, **(constants | more))


@pytest.mark.parametrize("element", ["bf16", "fp8e4nv"])
def test_all_gather_matmul_on_a_hopper(element):
    depth = 128 if element == "fp8e4nv" else 64
    has(gather(element, BLOCK_K=depth), ACQUIRE, RELEASE, COUNT, FENCE, TMA, WGMMA)


def test_all_gather_matmul_of_rows_that_tma_cannot_take():
    ptx = gather("fp16", pushers=0, TMA=False, ROWS=False)
    has(ptx, ACQUIRE, WGMMA)
    assert not re.search(TMA, ptx) and not re.search(FENCE, ptx)


@pytest.mark.parametrize("element", ["bf16", "fp8e4nv"])
def test_matmul_scatter_on_a_hopper(element):
    has(scatter(element, ROWS=element == "fp8e4nv"), RELEASE, COUNT, TMA, WGMMA)


def test_fp32_is_not_rounded_to_tf32():
    small = dict(BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, warps=4)
    for ptx in (gather("fp32", **small), scatter("fp32", WIRE=tl.float32, **small)):
        has(ptx, r"fma\.rn\.f32", TMA)
        assert "tf32" not in ptx


def test_the_sum_at_the_owner():
    constants = dict(WORLD=8, WIRE=tl.bfloat16, BLOCK_M=16, BLOCK_N=256, WAIT=signals.wait_flag)
    has(ptx_of(matmul_reduce_scatter.reduce_kernel, **constants), ACQUIRE, r"add(\.rn)?\.f32")


def test_flags_by_themselves():
    has(ptx_of(signals.raise_flags_kernel, RAISE=signals.raise_flag), RELEASE)
    has(ptx_of(signals.wait_flags_kernel, WAIT=signals.wait_flag), ACQUIRE)
