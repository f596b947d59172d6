# SPDX-License-Identifier: Apache-2.0
"""The largest logits by Triton: in its interpreter against float64, and compiled for GPUs.

bf16 numbers multiply exactly in fp32, so d products added in fp32 are within d eps of the sum of
their sizes, whatever the order.
"""

import random

import pytest
import torch

pytest.importorskip("triton", reason="this platform has no triton")

from mpu.kernels import max_logits as kernels
from mpu.layers.attention import max_logits
from mpu.layers.attention.blocks import blocks
from mpu.layers.packed_seq_params import PackedSeqParams
from tests.mpu.kernels.elementwise import as_on_a_gpu
from tests.mpu.kernels.test_elementwise_ahead_of_time import compiled, launches
from tests.mpu.layers.attention.test_max_logits import plain

EPS = 2.0**-23


def drawn(seed):
    """Return a case: sizes, documents (None: whole rows), a window, the first of the queries."""
    chance = random.Random(seed)
    g, d = chance.choice([1, 1, 2, 3]), chance.choice([2, 10, 16, 24, 80])
    a, s = g * chance.choice([1, 1, 2, 4]), chance.choice([1, 2, 15, 16, 17, 33, 50, 70])
    documents = None
    if seed % 3 == 0:
        cuts = sorted({0, s, *(chance.randrange(s + 1) for _ in range(chance.choice([2, 90])))})
        documents = tuple(end - begin for begin, end in zip(cuts, cuts[1:], strict=False))
    b = 1 if documents else chance.choice([1, 2])
    window = chance.choice([0, 0, 1, 5, 16, 40, 1000])
    return b, a, g, s, d, documents, window, chance.choice([0, 0, s // 2])


def tensors(case, odd):
    """Return q and k as attention has them, slices of qkv [s, b, n, d]; v is poisoned.

    odd: some numbers are not finite.
    """
    b, a, g, s, d = case[:5]
    qkv = torch.randn(s, b, a + 2 * g, d).bfloat16()
    qkv[:, :, a + g :] = torch.nan
    for _ in range(3 if odd else 0):
        at = tuple(random.randrange(n) for n in (s, b, a + g, d))
        qkv[at] = random.choice([torch.nan, torch.inf, -torch.inf])
    return [x.permute(1, 2, 0, 3) for x in qkv.split([a, g, g], 2)[:2]]


def bounded(got, want, q, k):
    """Hold maxima to those of float64; what is not finite must be infinite in both."""
    sizes = (x.double().abs().nan_to_num(0, 0) for x in (q, k))
    most = next(sizes).sum(3).amax() * next(sizes).amax()
    for mine, exact in zip(got.double(), want, strict=True):
        if exact.isfinite():
            assert abs(mine - exact) <= 2 * EPS * most, (mine, exact)
        else:
            assert mine == exact, (mine, exact)


def on_kernel(comm, seeds):
    """Note whole rows, or blocks of the last queries, by the kernel; return how many of each."""
    as_on_a_gpu()
    torch.set_num_threads(1)
    launched, count = kernels.max_logits, dict.fromkeys(("rows", "blocks", "odd"), 0)
    for seed in seeds:
        random.seed(seed)
        torch.manual_seed(seed)
        case, calls = drawn(seed), []
        _, a, _, s, d, documents, window, first = case
        q, k = tensors(case, odd=seed % 5 == 4)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(max_logits, "by_kernel", lambda noted, q, k: True)

            def counted(*given, calls=calls, **more):
                calls.append(1)
                launched(*given, **more)

            patch.setattr(kernels, "max_logits", counted)
            before = torch.randn(a) * 3
            before[0] = -torch.inf
            noted = before.clone()
            if first:
                todo = blocks(range(first, s), documents or (s,), window)
                max_logits.note_maxima(max_logits.Noted(noted), q[:, :, first:], k, todo, first)
                assert len(calls) == len(todo)
            else:
                packed = PackedSeqParams.of(documents) if documents else None
                max_logits.note_rows(max_logits.Noted(noted), q, k, packed, window)
                assert len(calls) == 1
        count["blocks" if first else "rows"] += 1
        want = plain(q, k, documents or (s,), window, first)
        count["odd"] += bool(want.isinf().any())
        bounded(noted, torch.maximum(want, before.double()), q, k)
    return count


@pytest.mark.parametrize(
    "seeds", [range(7), pytest.param(range(7, 60), marks=pytest.mark.prove)], ids=["few", "many"]
)
def test_equals_float64(interpreted, seeds):
    """Any sizes, groups, strides, documents and windows; parts of a row; numbers not finite."""
    (found,) = interpreted(1).run(on_kernel, seeds)
    assert all(found.values()), found


SHARED = 99 * 1024  # bytes that a block may have on GPUs that have least: 8.6, 8.9 and 12.0
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    "major, d, dtype, packed",
    [
        (9, 128, BF16, True),
        *(
            pytest.param(major, d, dtype, d == 64, marks=pytest.mark.prove)
            for major, d, dtype in (
                (8, 64, BF16), (8, 256, FP16), (9, 80, FP16), (9, 192, BF16), (10, 96, BF16),
                (10, 128, FP16),
            )
        ),
    ],
)
def test_compiles_and_spills_nothing(major, d, dtype, packed, monkeypatch, tmp_path):
    """On tensor cores, in a block's shared memory; a NaN stays one until the end."""
    qkv = torch.empty(4096, 1 if packed else 2, 48, d, dtype=dtype, device="meta")
    q, k, _ = (x.permute(1, 2, 0, 3) for x in qkv.split([32, 8, 8], 2))
    noted = torch.empty(32, device="meta")
    ends = torch.empty(9, dtype=torch.int32, device="meta") if packed else None
    for causal in (True, False)[: 1 + (d == 64)]:
        given = lambda causal=causal: kernels.max_logits(q, k, noted, causal=causal, ends=ends)  # noqa: E731
        ((kernel, arguments),) = launches(given, monkeypatch)
        registers, spilled, made = compiled(kernel, arguments, major, tmp_path)
        print(f"d {d}, sm_{10 * major}: {registers} registers, {made.metadata.shared} bytes shared")
        assert not spilled and made.metadata.shared <= SHARED
        matmul = {8: "mma.sync", 9: "wgmma.mma_async", 10: "tcgen05.mma"}[major]
        assert matmul in made.asm["ptx"] and "max.NaN.f32" in made.asm["ptx"]
        assert "cp.async.cg" in made.asm["ptx"], "keys are not read ahead, 16 bytes at a time"
