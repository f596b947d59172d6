# SPDX-License-Identifier: Apache-2.0
"""Weight gradients of experts in one launch: against float64 and the loop; compiled."""

import pytest
import torch

pytest.importorskip("triton", reason="this platform has no triton")
from mpu.kernels import grouped_wgrad
from mpu.layers import experts
from tests.mpu.kernels.elementwise import count
from tests.mpu.kernels.test_elementwise_ahead_of_time import launches, meta, resources
from tests.sampling import sampled

CASES = [  # rows of each expert, o, i
    ([5, 0, 17, 1], 33, 18), ([0, 0, 0], 16, 16), ([16, 32], 16, 48), ([0, 7, 0], 40, 3),
]  # fmt: skip


def drawn(each, o, i):
    """Return rows x, dy, their counts, and gradients of each expert."""
    g = torch.Generator().manual_seed(sum(each) + o * i)
    x, dy = (torch.randn(sum(each), width, generator=g).bfloat16() for width in (i, o))
    counts = experts.Counts.of(each, torch.tensor(each, dtype=torch.int64))
    return x, dy, counts, torch.randn(len(each), o, i, generator=g)


def against_float64_and_the_loop(comm):
    recipe, sums = experts.PaddedRows(), 2.0**-24
    for each, o, i in CASES:
        x, dy, counts, main = drawn(each, o, i)
        for fresh in (False, True):
            exact = torch.zeros_like(main).double() if fresh else main.double()
            size = exact.abs()
            for e, low, high in experts.runs(counts):
                exact[e] += dy[low:high].double().t() @ x[low:high].double()
                size[e] += dy[low:high].double().t().abs() @ x[low:high].double().abs()
            limit, found = (max(each) + 2) * sums * size, []
            for on in (True, False):
                grads = torch.full_like(main, torch.nan) if fresh else main.clone()
                rows = (x, dy) if on else (x.float(), dy.float())  # a CPU rounds each to bf16
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(experts.available, "launches", lambda x, on=on: on)
                    experts.grouped_wgrad(grads, fresh, *rows, counts, recipe)
                assert ((grads - exact).abs() <= limit).all(), (each, o, i, fresh, on)
                found.append(grads)
            none = [e for e, n in enumerate(each) if not n]
            assert torch.equal(found[0][none], found[1][none])


def test_gradients_are_those_of_float64_and_of_the_loop(interpreted):
    interpreted(1).run(against_float64_and_the_loop)


def one_launch():
    for fresh in (False, True):
        x, dy, counts, main = drawn([5, 17, 16], 32, 48)
        grouped_wgrad.grouped_wgrad(x, dy, counts.ends, main, fresh)


@pytest.mark.prove
def test_the_bytes_of_a_launch_are_those_declared(interpreted):
    """But for the ends of three experts."""
    (found,) = interpreted(1).run(count, (one_launch,))[0].values()
    for counted, declared in found:
        assert 0 <= counted - declared <= 3 * 4


def calls(experts, rows, o, i):
    main, ends = meta(torch.float32, experts, o, i), meta(torch.int32, experts)
    x, dy = meta(torch.bfloat16, rows, i), meta(torch.bfloat16, rows, o)
    for fresh in (False, True):
        grouped_wgrad.grouped_wgrad(x, dy, ends, main, fresh)


QWEN3, MIXTRAL = (128, 65536, 1536, 2048), (8, 16384, 28672, 4096)


@pytest.mark.parametrize("major", sampled([9, 8, 10], 3))
@pytest.mark.parametrize(
    "sizes", [QWEN3, pytest.param(MIXTRAL, marks=pytest.mark.prove)], ids=["Qwen3", "Mixtral"]
)
def test_compiles_and_spills_nothing(major, sizes, monkeypatch, tmp_path):
    for kernel, given in launches(lambda: calls(*sizes), monkeypatch):
        registers, spilled = resources(kernel, given, major, tmp_path)
        print(f"{kernel.fn.__name__} {sizes} sm_{10 * major}: {registers} registers")
        assert not spilled
