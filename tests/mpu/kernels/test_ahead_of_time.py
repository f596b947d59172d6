# SPDX-License-Identifier: Apache-2.0
"""Every overlap kernel compiles for GPUs, without one, and has the instructions it needs.

The protocol needs acquire and release at system scope; the speed needs wgmma and TMA on a Hopper,
reads that are under way together, and registers that nothing is spilled from.
"""

import re
import subprocess
from itertools import groupby, product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="this platform has no triton")
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mpu.kernels import all_gather_matmul, matmul_reduce_scatter, signals
from mpu.kernels.product import blocks_for, choose_blocks
from tests.sampling import sampled

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TYPES = {BF16: tl.bfloat16, FP16: tl.float16, FP32: tl.float32}
TABLES = {"inbox", "arrived", "outbox", "raises"}


def compiled(kernel, dtype=BF16, major=9, warps=8, stages=3, **constants):
    """Compile a kernel; ptxas accepts it, too, or this raises."""
    types = {name: "*i64" for name in TABLES} | {"counters": "*i32", "error": "i64"}
    types |= {name: f"*{TYPES[dtype]}" for name in ("x", "w", "there", "y", "out")}
    types |= {"tickets": "*i32", "epoch": "*i32", "patience": "i64"}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    assert not set(constants) - set(signature)
    # what a launch finds out about its arguments: addresses and sizes that 16 divides
    runtime = {"x", "w", "y", "out", "there", "n", "k", "stride_n", "stride_k", "tickets", *TABLES}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name in runtime and name not in constants
    }
    source = ASTSource(getattr(kernel, "jitted", kernel), signature, constants, attrs)
    options, target = {"num_warps": warps, "num_stages": stages}, GPUTarget("cuda", 10 * major, 32)
    return triton.compile(source, target=target, options=options).asm


def spilled(asm, tmp_path):
    """Return the bytes of a thread's stack, which none of these kernels has but for spills."""
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    said = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True)
    return int(re.search(r"STACK:(\d+)", said.stdout)[1])


def has(asm, *patterns):
    for pattern in patterns:
        assert re.search(pattern, asm["ptx"]), f"the PTX has no {pattern}"


def most_reads(asm):
    """Return how many reads of 16 bytes come one after another, with no use of them between."""
    order = re.findall(r"\b(ld\.global\.v4|st\.global|st\.shared|add\.f32)", asm["ptx"])
    return max(len(list(run)) for what, run in groupby(order) if what.startswith("ld"))


ACQUIRE, RELEASE = r"ld\.global\.sys\.acquire\.b32", r"st\.release\.sys\.global\.u32"
COUNT, FENCE = r"atom\.global\.gpu\.acq_rel\.add", r"fence\.proxy\.async\.global"
POLL = r"atom\.global\.sys\.acquire\.add"  # of several flags at once
TICKET = r"atom\.global\.gpu\.relaxed\.add"
TMA, WGMMA = r"cp\.async\.bulk\.tensor", r"wgmma\.mma_async"


def tiles_of(dtype, major, aligned, more):
    """Return the constants and options of the blocks that a run takes for 8192 rows a rank."""
    b = blocks_for(dtype, major, 8192, aligned)
    constants = dict(
        BLOCK_M=b.m, BLOCK_N=b.n, BLOCK_K=b.k, GROUP=b.group, ROWS=True, TMA=b.tma, DOT_F32=False,
        WORLD=8, PRECISION="ieee", RAISE=signals.raise_flag,
        warps=b.warps, stages=b.stages,
    )  # fmt: skip
    return constants | more


def gather(dtype, major=9, aligned=True, **more):
    constants = tiles_of(dtype, major, aligned, more) | dict(
        PUSHERS=all_gather_matmul.PUSHERS, PUSH_M=all_gather_matmul.PUSH_ROWS,
        WAIT=signals.wait_flag,
        PUSH_K=all_gather_matmul.push_columns(blocks_for(dtype, major, 8192, aligned), dtype),
    )  # fmt: skip
    return compiled(all_gather_matmul.all_gather_matmul_kernel, dtype, major, **constants)


def scatter(dtype, major=9, aligned=True, **more):
    constants = tiles_of(dtype, major, aligned, more)
    return compiled(matmul_reduce_scatter.matmul_scatter_kernel, dtype, major, **constants)


def add(dtype=BF16, world=8):
    rows, columns = matmul_reduce_scatter.REDUCE_ROWS, matmul_reduce_scatter.REDUCE_COLUMNS
    constants = dict(WORLD=world, BLOCK_M=rows, BLOCK_N=columns, warps=4)
    return compiled(matmul_reduce_scatter.reduce_kernel, dtype, **constants)


def test_all_gather_matmul_on_a_hopper(tmp_path):
    asm = gather(BF16)
    has(asm, ACQUIRE, RELEASE, COUNT, TICKET, FENCE, TMA, WGMMA)
    assert not spilled(asm, tmp_path)


def test_all_gather_matmul_of_rows_that_tma_cannot_take(tmp_path):
    asm = gather(FP16, aligned=False, ROWS=False)
    has(asm, ACQUIRE, WGMMA)
    assert not re.search(TMA, asm["ptx"]) and not re.search(FENCE, asm["ptx"])
    assert not spilled(asm, tmp_path)


def test_matmul_scatter_on_a_hopper(tmp_path):
    asm = scatter(BF16, ROWS=False)
    has(asm, RELEASE, COUNT, TICKET, TMA, WGMMA)
    assert not spilled(asm, tmp_path)


@pytest.mark.parametrize("major", sampled([9, 8, 10], 3))
def test_fp32_is_not_rounded_to_tf32_and_not_spilled(major, tmp_path):
    for asm in (gather(FP32, major), scatter(FP32, major)):
        has(asm, r"fma\.rn\.f32", *([TMA] if major >= 9 else []))
        assert "tf32" not in asm["ptx"] and not spilled(asm, tmp_path)


@pytest.mark.prove
@pytest.mark.parametrize("major", [8, 9, 10])
def test_no_kernel_of_a_run_is_spilled(major, tmp_path):
    for dtype, rows, aligned in product((BF16, FP16, FP32), (True, False), (True, False)):
        how = dict(aligned=aligned, ROWS=rows)
        for asm in (gather(dtype, major, **how), scatter(dtype, major, **how)):
            assert not spilled(asm, tmp_path), (dtype, how)


@pytest.mark.parametrize(("dtype", "world"), sampled([(BF16, 8), (FP32, 16)], 2))
def test_the_sum_at_the_owner_reads_all_ranks_parts_at_once(dtype, world, tmp_path):
    asm = add(dtype, world)
    has(asm, POLL, r"add(\.rn)?\.f32")
    elements = matmul_reduce_scatter.REDUCE_ROWS * matmul_reduce_scatter.REDUCE_COLUMNS
    assert most_reads(asm) == 8 * elements * dtype.itemsize // (16 * 128)
    assert not spilled(asm, tmp_path)


@triton.jit
def push_kernel(x, there, m, k, PUSH_M: tl.constexpr, PUSH_K: tl.constexpr):
    all_gather_matmul.push_tile(x, there, tl.arange(0, PUSH_M), m, k, PUSH_K)


def test_a_pusher_reads_several_pieces_before_it_writes_one():
    rows, columns = all_gather_matmul.PUSH_ROWS, all_gather_matmul.push_columns
    asm = compiled(push_kernel, PUSH_M=rows, PUSH_K=columns(blocks_for(BF16, 9, 8192, True), BF16))
    assert most_reads(asm) == all_gather_matmul.PIECES * all_gather_matmul.PUSH_BYTES // 16


def test_flags_by_themselves():
    raising = compiled(signals.raise_flags_kernel, RAISE=signals.raise_flag)
    has(raising, RELEASE)
    assert "atom." not in raising["ptx"]  # which would cross the link and back
    has(compiled(signals.wait_flags_kernel, WORLD=8, STEP=1), POLL)


def test_a_program_for_each_sm_but_those_left(monkeypatch):
    hopper = SimpleNamespace(major=9, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: hopper)
    x, w = torch.zeros(256, 64, dtype=BF16), torch.zeros(8, 64, dtype=BF16)
    for left, programs in ((0, 132), (16, 116), (200, 1)):
        assert choose_blocks(x, w, 256, left).programs == programs
    ragged = x[:, :3].contiguous(), w[:, :3].contiguous()
    assert choose_blocks(x, w, 256).tma and not choose_blocks(*ragged, 256).tma
