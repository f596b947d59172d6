# SPDX-License-Identifier: Apache-2.0
"""Seconds of kernels and collectives: known answers, units, and more work never takes less time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forecast.device_file import Device, DeviceFileError, read_device
from forecast.rehearsal.events import Launch
from forecast.rehearsal.links import Span, collective_seconds, message_seconds, spans
from forecast.rehearsal.roofline import (
    attention_seconds,
    launch_seconds,
    matmul_dtype,
    matmul_seconds,
    memory_seconds,
)
from tests.forecast.rehearsal.clock_device import HERE, device

SIZES = st.integers(1, 20000)
H100 = read_device("h100")


def test_a_matmul_that_fills_the_sms_takes_its_flops_over_the_peak() -> None:
    fast = device(bandwidth=1e9)  # 10 tiles of 2 x 2 on 10 SMs: one wave
    assert matmul_seconds(fast, 4, 10, 50, "bfloat16") == pytest.approx(2 * 4 * 10 * 50 / 1000)


def test_tiles_and_waves_are_whole() -> None:
    fast = device(bandwidth=1e9, tile_cost=1e9)  # smaller tiles are no help
    one = matmul_seconds(fast, 2, 20, 64, "bfloat16")  # 10 tiles
    assert matmul_seconds(fast, 2, 22, 64, "bfloat16") == pytest.approx(one * 9 / 8)  # 88 eighths


def test_a_matmul_of_few_numbers_is_bound_by_memory() -> None:
    seconds = matmul_seconds(device(), 1000, 1, 1000, "bfloat16")
    assert seconds == pytest.approx((1e6 * 2 + 1000 * 2 + 2 * 1000) / 100)


def test_a_kernel_starts_before_it_works() -> None:
    assert memory_seconds(device(kernel_seconds=3), 200) == 5
    assert attention_seconds(device(kernel_seconds=3), 1000, 0, "bfloat16") == 5
    assert attention_seconds(device(), 1000, 0, "bfloat16", backward=True) == 2.5


def test_a_recorded_kernel_is_told_by_its_shapes() -> None:
    shapes = ((64, 4096, 128), (64, 128, 4096), (64, 4096, 4096))
    flops, moved = 2.0 * 64 * 4096 * 4096 * 128, 2 * 64 * (2 * 4096 * 128 + 4096 * 4096)
    bmm = Launch("aten::bmm", 0, shapes, "bfloat16", (), (), moved, flops, HERE)
    assert launch_seconds(H100, bmm) == matmul_seconds(H100, 4096, 4096, 128, "bfloat16", 64)
    biased = ((512,), (1024, 256), (256, 512), (1024, 512))
    addmm = Launch("aten::addmm", 0, biased, "bfloat16", (), (), 1, 1.0, HERE)
    assert launch_seconds(H100, addmm) == matmul_seconds(H100, 1024, 512, 256, "bfloat16")
    add = Launch("aten::add", 0, (), "bfloat16", (), (), 10**9, 0.0, HERE)
    assert launch_seconds(H100, add) == memory_seconds(H100, 10**9)
    flash = "aten::_scaled_dot_product_flash_attention_backward.default"
    back = Launch(flash, 0, (), "bfloat16", (), (), 10**6, 1e12, HERE)
    assert launch_seconds(H100, back) == attention_seconds(
        H100, 1e12, 10**6, "bfloat16", backward=True
    )


def test_the_operands_dtype_is_found_where_the_result_s_is_another() -> None:
    shapes = ((512, 256), (256, 128), (512, 128))
    operands, result = 512 * 256 + 256 * 128, 512 * 128
    for operand_bytes, dtype in ((2, "bfloat16"), (4, "float32")):
        moved = operand_bytes * operands + 4 * result
        product = Launch("aten::mm.dtype", 0, shapes, "float32", (), (), moved, 1.0, HERE)
        assert matmul_dtype(product) == dtype
    scaled = Launch("aten::_scaled_mm", 0, shapes, "bfloat16", (), (), 1, 1.0, HERE)
    assert matmul_dtype(scaled) == "float8"
    assert launch_seconds(H100, scaled) < launch_seconds(H100, scaled._replace(op="aten::mm"))


def test_a_copy_from_the_host_takes_the_host_s_link() -> None:
    copy = Launch("memcpy HtoD", 0, (), "int64", (), (), 64 * 10**9, 0.0, HERE)
    assert launch_seconds(H100, copy) == pytest.approx(1, rel=0.01)


@settings(max_examples=60, deadline=None)
@given(m=SIZES, n=SIZES, k=SIZES)
def test_no_matmul_beats_the_peak_and_more_work_takes_no_less(m: int, n: int, k: int) -> None:
    seconds = matmul_seconds(H100, m, n, k, "bfloat16")
    assert seconds >= 2.0 * m * n * k / H100.peak("bfloat16")
    assert seconds >= 2.0 * (m * k + k * n + m * n) / H100["bandwidth"]
    assert seconds >= H100["kernel_seconds"]
    for more in ((2 * m, n, k), (m, 2 * n, k), (m, n, 2 * k)):
        assert matmul_seconds(H100, *more, "bfloat16") >= 0.999 * seconds
    assert matmul_seconds(H100, m, n, k, "bfloat16", batch=3) >= 0.999 * seconds
    assert matmul_seconds(H100, m, n, k, "bfloat16", sms=100) >= 0.999 * seconds


def test_a_group_s_place_on_the_levels_is_found() -> None:
    round_ = device()  # nodes of 4
    assert spans(round_.blocks, (0, 1, 2, 3)) == [Span(0, 4, 1)]
    assert spans(round_.blocks, (0, 4, 8)) == [Span(1, 3, 1)]
    assert spans(round_.blocks, tuple(range(8))) == [Span(0, 4, 1), Span(1, 2, 4)]


def test_collectives_take_what_their_bytes_take_on_the_slowest_level() -> None:
    round_ = device()
    inside, across, both = (0, 1, 2, 3), (0, 4, 8, 12), tuple(range(8))
    assert collective_seconds(round_, "all_gather", 10, inside) == pytest.approx(3)
    assert collective_seconds(round_, "reduce_scatter", 40, inside) == pytest.approx(3)
    assert collective_seconds(round_, "all_reduce", 40, inside) == pytest.approx(6)
    assert collective_seconds(round_, "all_gather", 10, across) == pytest.approx(30)
    assert collective_seconds(round_, "all_gather", 4, both) == pytest.approx(7)  # four cards
    assert collective_seconds(round_, "all_to_all", 80, both) == pytest.approx(40)
    assert collective_seconds(round_, "all_to_all", 40, inside) == pytest.approx(3)
    assert collective_seconds(round_, "all_reduce", 40, (5,)) == 0
    assert collective_seconds(round_.changed(oversubscription=2), "all_gather", 10, across) == 60
    assert message_seconds(round_, 10, 0, 1) == 1 and message_seconds(round_, 10, 0, 4) == 10
    with pytest.raises(ValueError, match="send is no collective"):
        collective_seconds(round_, "send", 1, inside)


def test_a_small_collective_costs_its_steps_and_not_its_bytes() -> None:
    ring = [collective_seconds(H100, "all_gather", 8, range(n)) for n in (2, 4, 8)]
    assert ring == sorted(ring) and ring[2] < 3e-5 + H100["collective_start"]
    assert collective_seconds(H100, "all_reduce", 8, range(64)) > ring[2]
    big = collective_seconds(H100, "all_reduce", 8e9, range(8))
    assert big == pytest.approx(2 * 7 / 8 * 8e9 / (450e9 * H100["link_share"]), rel=0.02)


@settings(max_examples=60, deadline=None)
@given(
    verb=st.sampled_from(("all_gather", "reduce_scatter", "all_reduce", "all_to_all")),
    sent=st.integers(1, 10**10),
    nodes=st.integers(1, 64),
    step=st.sampled_from((1, 2, 8)),
)
def test_more_bytes_take_no_less_and_no_link_is_beaten(
    verb: str, sent: int, nodes: int, step: int
) -> None:
    group = tuple(range(0, 8 * nodes, step))
    seconds = collective_seconds(H100, verb, sent, group)
    assert collective_seconds(H100, verb, 2 * sent, group) >= seconds
    if len(group) > 1 and verb != "all_to_all":
        leaves = sent * (len(group) - 1) / (1 if verb == "all_gather" else len(group))
        assert seconds >= leaves / 450e9


def test_a_type_that_the_device_does_not_multiply_is_refused() -> None:
    a100: Device = read_device("a100")
    with pytest.raises(DeviceFileError, match="NVIDIA A100 SXM has no matmuls of float8_e4m3fn"):
        matmul_seconds(a100, 64, 64, 64, "float8_e4m3fn")
