# SPDX-License-Identifier: Apache-2.0
"""SwiGLU into rows of float8: bit by bit what is made of its result, and compiled for GPUs."""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="this platform has no triton")
from mpu.context import LayerContext
from mpu.kernels import float8, swiglu, swiglu_rows
from mpu.layers.float8 import rows as float8_rows
from mpu.layers.float8.recipe import Float8
from mpu.layers.float8.rows import row_bytes
from tests.mpu.kernels import elementwise
from tests.mpu.kernels.test_elementwise_ahead_of_time import OTHERS, launches, meta, resources
from tests.sampling import sampled

SIZES = {  # tokens and features: tiles that are full, and others that are not
    "blockwise": [(128, 128), (256, 256)],
    "mxfp8": [(32, 64), (160, 160)],
    "tensorwise": [(5, 16), (130, 144)],
}
DTYPES = (torch.bfloat16, torch.float32)


def same_bytes(got, want):
    """Return whether rows are the same bytes; a NaN has no sign."""
    nan = (got & want & 0x7F) == 0x7F
    return bool(((got == want) | nan & ((got ^ want) == 0x80)).all())


def both(comm, scaling, converts, few=False):
    """Compare what the kernels make with what the recipe makes of SwiGLU's result."""
    elementwise.as_on_a_gpu()
    float8.converts = swiglu_rows.converts = lambda x: converts
    cases = itertools.product(SIZES[scaling], DTYPES, ("e4m3", "hybrid"))
    for (n, f), dtype, name in itertools.islice(cases, 1 if few else None):
        recipe = Float8(scaling, name, LayerContext(dtype=dtype))
        g = torch.Generator().manual_seed(n * f)
        x = torch.randn(n, 1, 2 * f, generator=g) * torch.randn(n, 1, 1, generator=g).mul(3).exp()
        x, dy = x.to(dtype), torch.randn(n, 1, f, generator=g).to(dtype)
        if scaling != "tensorwise":
            x[1, 0, 2], x[3, 0, f + 5], x[4] = float("nan"), float("inf"), 0.0
        for given in (None, dy):
            found = []
            for on in (False, True):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(float8_rows, "on_triton", lambda x, on=on: on)

                    def result(x=x, given=given, on=on):
                        assert not on, "SwiGLU's result is made"
                        if given is None:
                            return swiglu.swiglu_forward(x)
                        return swiglu.swiglu_backward(x, given)

                    found.append(recipe.swiglu(x, given, True, result))
                    if not few:
                        alone = recipe.swiglu(x, given, False, result)
                        assert alone[1] is None and same_bytes(alone[0], found[-1][0])
            (want, turned), (got, other) = found
            assert want.shape == got.shape and turned.shape == other.shape
            assert same_bytes(got, want) and same_bytes(other, turned), (n, f, dtype, name)
            if given is not None and recipe.block != 32:
                scales = float8_rows.scales(turned, recipe.block)
                assert torch.equal(other.scales_in_fp32, float8_rows.scale_of(scales))


@pytest.mark.prove
@pytest.mark.parametrize("scaling, converts", [*itertools.product(SIZES, (False, True))])
def test_the_rows_are_those_of_swiglus_result(interpreted, scaling, converts):
    interpreted(1).run(both, scaling, converts)


@pytest.mark.parametrize("scaling", sampled([*SIZES], 3))
def test_some_rows_are_those_of_swiglus_result(interpreted, scaling):
    interpreted(1).run(both, scaling, True, True)


def counted():
    recipe = Float8("blockwise", "e4m3", LayerContext(dtype=torch.bfloat16))
    n, f = SIZES["blockwise"][-1]
    x, dy = torch.randn(n, 2 * f).bfloat16(), torch.randn(n, f).bfloat16()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(float8_rows, "on_triton", lambda x: True)
        for given in (None, dy):
            recipe.swiglu(x, given, True, None)


@pytest.mark.prove
def test_the_bytes_of_a_launch_are_those_declared(interpreted):
    (found,) = interpreted(1).run(elementwise.count, (counted,))[0].values()
    for bytes_counted, declared in found:
        assert bytes_counted == declared


def calls(block, back, n=8192, f=14336):
    x, dy, byte = meta(torch.bfloat16, n, 2 * f), meta(torch.bfloat16, n, f), torch.uint8
    k, form = 2 * f if back else f, float8.Codes(3, 7, 448.0, 8)
    turned = meta(byte, k, row_bytes(n, block))
    wide = meta(torch.float32, n // block if block else 1, k).t() if block != 32 else None
    given = dy if back else None
    swiglu_rows.swiglu_rows(
        x, given, None if block else meta(byte, 1), block, meta(byte, n, row_bytes(k, block)),
        turned, wide, form,
    )  # fmt: skip
    if not block:
        swiglu_rows.swiglu_scales(x, given, meta(byte, 1), form, float8_rows.TOP_TILE)


EACH = [(9, 128), (10, 32), (8, 0), (9, 0), (10, 0)]  # where scaled_mm multiplies them


@pytest.mark.parametrize(
    "major, block",
    [pytest.param(*c, marks=[] if c == (9, 128) else pytest.mark.prove) for c in EACH],
)
def test_compiles_and_spills_nothing(major, block, monkeypatch, tmp_path):
    monkeypatch.setitem(OTHERS, torch.uint8, "*u8")
    monkeypatch.setattr(swiglu_rows, "converts", lambda x: major >= 9)
    for back in (False, True):
        for kernel, given in launches(lambda back=back: calls(block, back), monkeypatch):
            registers, spilled = resources(kernel, given, major, tmp_path)
            which = f"{kernel.fn.__name__} {block} {'backward' if back else 'forward'}"
            print(f"{which} sm_{10 * major}: {registers} registers")
            assert not spilled, which
