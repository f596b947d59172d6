# SPDX-License-Identifier: Apache-2.0
"""The rows of experts, added and given gradients by kernels: torch's operations are the twin."""

import pytest
import torch

pytest.importorskip("triton", reason="this platform has no triton")

from mpu.kernels import expert_rows
from mpu.layers import dispatch
from tests.mpu.kernels.elementwise import as_on_a_gpu, count, units
from tests.mpu.kernels.test_elementwise_ahead_of_time import launches, meta, resources
from tests.sampling import sampled

CASES = [  # tokens, experts a token, width, how many of ten pairs are elsewhere, padded
    (7, 2, 24, 0, False), (5, 1, 130, 0, False), (9, 8, 33, 5, False), (4, 3, 1, 9, False),
    (6, 2, 5000, 3, False), (8, 4, 17, 2, True), (3, 2, 8, 10, False),
]  # fmt: skip


def drawn(case, dtype):
    """Return rows, the pair of each, the place of each pair, weights and gradients of the sums."""
    tokens, k, width, elsewhere, padded = case
    pairs = torch.randperm(tokens * k)
    here = pairs[: len(pairs) - len(pairs) * elsewhere // 10]
    n = len(here) + 3 * padded  # the last three of no pair
    flat = torch.full((n,), tokens * k)
    flat[: len(here)] = here
    place = torch.full((tokens * k,), n + 5)
    place[here] = torch.arange(len(here))
    rows, dy = (torch.randn(shape, dtype=torch.float64).bfloat16().to(dtype)
                for shape in ((n, width), (tokens, width)))  # fmt: skip
    rows[len(here) :] = 0
    wide = torch.promote_types(dtype, torch.float32)
    weights = torch.rand(tokens, k, dtype=torch.float64).to(wide)
    return rows, flat, place.view(tokens, k), weights, dy


def near(got, exact, most) -> bool:
    """Return whether a result is so many units from the exact one, of zeros the same."""
    return units(got, exact) < most if exact.any() else not got.any()


def equals(comm, dtype) -> None:
    as_on_a_gpu()
    torch.manual_seed(0)
    for case in CASES:
        rows, flat, place, weights, dy = drawn(case, dtype)
        padded = case[-1]
        for given in (None, weights):
            want = dispatch._sum(rows, place, given, padded)
            exact = dispatch._sum(
                rows.double(), place, None if given is None else given.double(), padded
            )
            got = dispatch._sum(rows, place, given, padded, kernels=True)
            assert got.shape == want.shape and got.dtype == want.dtype
            assert near(got, exact, max(2.0, 1.5 * units(want, exact))), (dtype, case)
        wide = (x.double() for x in (rows, weights))
        exact_of = dispatch._gradients(*wide, flat, place, dy.double(), padded)
        got_of = dispatch._gradients_by_kernel(rows, weights, place, dy, padded)
        for got, exact in zip(got_of, exact_of, strict=True):
            assert near(got, exact, 8.0), (dtype, case)
        assert not got_of[0][(flat == place.numel()).nonzero()].any()


@pytest.mark.parametrize("dtype", sampled([torch.bfloat16, torch.float32, torch.float64], 3))
def test_the_kernels_do_what_torchs_operations_do(interpreted, dtype):
    """Odd widths, rows elsewhere, experts without rows, places that are padded."""
    interpreted(1).run(equals, dtype)


def all_here(dtype):
    rows, flat, place, weights, dy = drawn((7, 3, 40, 0, False), dtype)
    for given in (weights, None):
        dispatch._sum(rows, place, given, kernels=True)
    dispatch._gradients_by_kernel(rows, weights, place, dy, False)


def test_the_bytes_of_a_launch_are_those_declared(interpreted):
    """dy is read once for each of a token's experts, and declared once: it is near at hand."""
    found = interpreted(1).run(count, (all_here, torch.bfloat16))[0]
    assert len(found) == 2
    for counted, declared in found["sum_rows_kernel"]:
        assert counted == declared
    ((counted, declared),) = found["combine_backward_kernel"]
    assert counted == declared


def calls(dtype, tokens, k, width):
    wide = torch.promote_types(dtype, torch.float32)
    rows, dy = meta(dtype, tokens * k, width), meta(dtype, tokens, width)
    place = torch.empty(tokens, k, dtype=torch.long, device="meta")
    weights = meta(wide, tokens, k)
    for given in (weights, None):
        expert_rows.sum_rows(rows, place, given, dy)
    expert_rows.combine_backward(rows, place, weights, dy, rows, weights)


@pytest.mark.parametrize("major", sampled([9, 8, 10], 3))
@pytest.mark.parametrize("sizes", [(8192, 8, 2048), (8192, 2, 4096)], ids=["Qwen3", "Mixtral"])
def test_compiles_and_spills_nothing(major, sizes, monkeypatch, tmp_path):
    for kernel, given in launches(lambda: calls(torch.bfloat16, *sizes), monkeypatch):
        registers, spilled = resources(kernel, given, major, tmp_path)
        print(f"{kernel.fn.__name__} {sizes} sm_{10 * major}: {registers} registers")
        assert not spilled
