# SPDX-License-Identifier: Apache-2.0
"""The kernels of float8's rows in Triton's interpreter, bit by bit, and compiled for GPUs."""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="this platform has no triton")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mpu.kernels import float8 as kernels
from mpu.layers.float8 import rows as float8_rows
from mpu.layers.float8.rows import E4M3, E5M2, encode, made, remade, row_scales, scale_of
from mpu.layers.float8.rows import scales as scales_of
from tests.mpu.kernels import elementwise
from tests.mpu.kernels.test_ahead_of_time import spilled
from tests.sampling import sampled

SIZES = [
    (33, 160, 0), (40, 160, 32), (128, 384, 128), (130, 128, 128), (1, 16, 0), (8, 1024, 32),
    (34, 1040, 0),
]  # fmt: skip
ODD = (448.0, 57344.0, 1e-30, 2.0**-140, -0.0, 464.0, -61440.0, 3e38)


def numbers(n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of many magnitudes, every code of both formats and halfway between, and odd ones."""
    g = torch.Generator().manual_seed(n * k)
    x = torch.randn(n, k, generator=g) * torch.randn(n, 1, generator=g).mul(4).exp()
    x[-1, :8] = torch.tensor(ODD)
    if n > 8:
        x[1, 2], x[3, 5], x[5] = float("nan"), -float("inf"), 0.0
    if n > 32:
        known = torch.arange(k).clamp(max=255).to(torch.uint8).view(torch.float8_e4m3fn).float()
        x[8], x[9] = known, (known + known.roll(1)) / 2
        x[8:10] = x[8:10].nan_to_num(448.0)
    return x.to(dtype)


def both(comm, first: int, every: int, converts: bool) -> None:
    """Compare what the kernels make with what torch makes, of x, of x^T and of rows.

    converts: as where an instruction rounds to float8; torch's own cast stands in for it.
    """
    elementwise.as_on_a_gpu()
    kernels.converts = lambda x: converts
    cases = itertools.product(SIZES, (E4M3, E5M2), (torch.float32, torch.bfloat16))
    for (n, k, block), form, dtype in itertools.islice(cases, first, None, every):
        x = numbers(n, k, dtype)
        for given in (x, x.t().contiguous().t()):
            found = {}
            for on in (False, True):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(float8_rows, "on_triton", lambda x, on=on: on)
                    scales = row_scales(given, block, form)
                    top = scales.amax(0, keepdim=True).expand(n, -1)  # as tensorwise has it
                    rows = [encode(given, scales, form), encode(given, top, form)]
                    rows += [made(given, block, form)]
                    patch.setattr(kernels, "MAX_ROW", 64)
                    rows += [made(given, block, form, block == 128 == n)]
                    if on:
                        noted = made(given, block, form, wide=True).scales_in_fp32
                        assert torch.equal(noted, scale_of(scales_of(rows[2], block)))
                        assert noted.stride() == (1, n if noted.shape[1] > 1 else 1)
                    if not n % (block or 1):
                        rows += [remade(rows[0], block, form, agree=agree) for agree in (None, id)]
                    if not block:
                        sound = given.nan_to_num(1.0, 1.0, 1.0)
                        top = row_scales(sound, 0, form).amax(0, keepdim=True).expand(n, -1)
                        rows.append(remade(encode(sound, top, form), 0, form, same=True))
                    found[on] = [scales, *rows]
            for what, (want, got) in enumerate(zip(*found.values(), strict=True)):
                real = 0 if what == 0 else k if what < 5 else n  # codes of a row
                signs = (want[:, :real] ^ got[:, :real]) == 0x80
                same = (want[:, :real] == got[:, :real]) | signs & (want[:, :real] & 0x7F == 0x7F)
                assert same.all(), (n, k, block, form.dtype, dtype, what)  # a NaN has no sign
                assert torch.equal(want[:, real:], got[:, real:])


# first, every, converts
WAYS = [(1, 29, False), (0, 11, True), (5, 11, False), (9, 11, True)]


@pytest.mark.parametrize("first, every, converts", sampled(WAYS, len(WAYS)))
def test_the_kernels_make_the_bytes_that_torch_makes(interpreted, first, every, converts):
    interpreted(1).run(both, first, every, converts)


EACH = [(9, "bf16"), (8, "fp32"), (10, "rows")]


@pytest.mark.parametrize("major, of", sampled(EACH, 3))
def test_compiles_and_spills_nothing(major, of, tmp_path):
    two, one = (kernels.row_scales_kernel, kernels.encode_kernel), kernels.rows_kernel
    cases = [(kernel, block, None) for kernel in two for block in (0, 32, 128)]
    cases += [(one, 32, False), (one, 128, False)]
    cases += [(one, 128, True)] if of != "rows" else []  # squares are those of weights
    cases += [(one, 0, k) for k in (512, 4096, 14336, 16384, 0)]
    for kernel, block, how in cases:
        if kernel is one:
            x = torch.empty(1, how or 1, device="meta") if of != "rows" and not block else None
            x = torch.empty(1, 1, device="meta").t() if x is None else x
            given = kernels.Numbers(x, 1, how if how and not block else 10**6)
            tile = kernels.tile_of(given, block, how is True)
        else:
            tile = dict(ROWS=kernels.ROWS, STEP=kernels.STEP, num_warps=kernels.WARPS)
            if kernel is kernels.row_scales_kernel and not block:
                x = torch.empty(1, 1, device="meta")
                tile = kernels.piece_of(kernels.Numbers(x, 1, 1, 0 if of == "rows" else None))
        options = {"num_warps": tile.pop("num_warps")}
        constants = dict(FROM_ROWS=of == "rows", BLOCK=block, FRACTION=3, BIAS=7, SHIFT=8,
                         TOP=448.0, CONVERTS=major >= 9, SQUARE=how is True, **tile)  # fmt: skip
        constants = {n: v for n, v in constants.items() if n in kernel.arg_names}
        types = {"x": "*u8" if of == "rows" else f"*{of}", "out": "*u8", "scales": "*u8"}
        types |= {"wide": "*fp32"}
        along = "along_n" if of == "rows" else "along_k"  # 1, which a launch finds out
        signature = {n: types.get(n, "i32") for n in kernel.arg_names}
        signature |= dict.fromkeys((*constants, along), "constexpr")
        divisible = (*types, "k", "length", "along_n", "along_k", "codes")
        attrs = {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(kernel.arg_names)
            if name in divisible and signature[name] != "constexpr"
        }
        source = ASTSource(kernel.jitted, signature, constants | {along: 1}, attrs)
        asm = triton.compile(source, target=GPUTarget("cuda", 10 * major, 32), options=options).asm
        assert not spilled(asm, tmp_path), (kernel.fn.__name__, block)
        rounds = kernel is not kernels.row_scales_kernel and major >= 9
        assert ("cvt.rn.satfinite.e4m3x2.f32" in asm["ptx"]) == rounds
