# SPDX-License-Identifier: Apache-2.0
"""What a launch hands to the driver is what Triton hands to it, where Triton is not asked again.

The driver is a stand-in that notes what it is given. A compiled kernel is known by its code.
"""

from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="this platform has no triton")
from benchmarks import bench_launch
from benchmarks.bench_launch import by_triton, launch_of, stand_in
from mpu.kernels import expert_rows, rms_norm, swiglu
from mpu.kernels.launch import Kernel

BF16 = torch.bfloat16


def given_to_the_driver(driver, call):
    """Return the grid, stream, kernel and arguments of what a call launches."""
    driver.launched = []
    call()
    (each,) = driver.launched
    address = [x.data_ptr() if isinstance(x, torch.Tensor) else x or 0 for x in each[9:]]
    return each[:4], each[4], address


def agrees(driver, calls):
    """Compare the launch of each call, by Triton and by us, three times in turn."""
    repeats = [launch_of(call) for call in calls]
    want = [given_to_the_driver(driver, lambda r=r: r(by_triton)) for r in repeats]
    for _ in range(3):
        for repeat, wanted in zip(repeats, want, strict=True):
            assert given_to_the_driver(driver, lambda r=repeat: r(Kernel.launch)) == wanted
    return {kernel for _, kernel, _ in want}


@pytest.fixture(scope="module")
def driver():
    """One stand-in for all tests: a compiled kernel keeps the driver that it was loaded by."""
    with stand_in() as made:
        yield made


def test_what_is_found_is_what_triton_would_launch(driver):
    x, w = torch.ones(16, 64, dtype=BF16), torch.ones(64, dtype=BF16)
    odd = torch.ones(1025, dtype=BF16)[1:].view(16, 64)  # at an address that 16 does not divide
    pairs = [(x, None), (x, x), (odd, None), (x.float(), None), (x[:, :24].contiguous(), None)]
    pairs += [(x.clone(), x.clone())]  # as (x, x)

    def norm(x, branch):
        return rms_norm.norm_forward(x, branch, w[: x.shape[1]].to(x.dtype), 1e-5)

    assert len(agrees(driver, [partial(norm, *pair) for pair in pairs])) == 5  # a kernel each
    (call,) = rms_norm.norm_forward_kernel._calls.values()
    assert len(call.compiled) == 5

    place, shares = torch.zeros(16, 2, dtype=torch.int64), torch.ones(16, 2)
    rows = (1, 2, 3, 16)
    agrees(driver, [partial(expert_rows.sum_rows, x[:n], place, shares, x) for n in rows])


@pytest.mark.prove
@pytest.mark.parametrize("name", bench_launch.calls())
def test_each_kernel_is_launched_as_triton_launches_it(name, driver):
    agrees(driver, [bench_launch.calls()[name]])


def test_sizes_that_change_with_each_call_do_not_pile_up(driver, monkeypatch):
    monkeypatch.setattr("mpu.kernels.launch.KEPT", 3)
    for n in range(2, 9):
        swiglu.swiglu_forward(torch.ones(n, 32))
    assert all(len(c.compiled) <= 3 for c in swiglu.swiglu_forward_kernel._calls.values())
