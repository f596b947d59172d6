# SPDX-License-Identifier: Apache-2.0
"""GPUs are found by the driver's name and by one's own; others are refused with the reason."""

import pytest

from training.run.gpus import GPUS, UnknownGpu, named, of_driver


@pytest.mark.parametrize(
    ("driver", "name", "tflops", "gigabytes"),
    [
        ("NVIDIA H100 80GB HBM3", "h100", 989.4, 80),
        ("NVIDIA H100 PCIe", "h100-pcie", 756.0, 80),
        ("NVIDIA H100 NVL", "h100-nvl", 835.0, 94),
        ("NVIDIA H200", "h200", 989.4, 141),
        ("NVIDIA GH200 480GB", "gh200", 989.4, 96),
        ("NVIDIA H20", "h20", 148.0, 96),
        ("NVIDIA A100-SXM4-80GB", "a100", 312.0, 80),
        ("NVIDIA A100-SXM4-40GB", "a100-40", 312.0, 40),
        ("NVIDIA A100-PCIE-40GB", "a100-40-pcie", 312.0, 40),
        ("NVIDIA A100 80GB PCIe", "a100-pcie", 312.0, 80),
        ("NVIDIA B200", "b200", 2250.0, 180),
        ("NVIDIA L4", "l4", 121.0, 24),
        ("NVIDIA L40S", "l40s", 362.0, 48),
        ("NVIDIA A10G", "a10g", 70.0, 24),
        ("NVIDIA GeForce RTX 4090", "rtx-4090", 165.2, 24),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada", 364.2, 48),
    ],
)
def test_a_gpu_by_the_drivers_name(driver, name, tflops, gigabytes):
    gpu = of_driver(driver)
    assert gpu is named(name)
    assert (gpu.bf16, gpu.memory) == (tflops * 1e12, gigabytes * 1e9)


def test_what_the_driver_names_otherwise_is_unknown():
    assert of_driver("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None  # a seventh of an H100
    for other in ("RTX 4090 Laptop GPU", "RTX 4090 D", "RTX 3090 Ti"):
        assert of_driver(f"NVIDIA GeForce {other}") is None
    assert of_driver("NVIDIA GeForce GTX 1080") is None


@pytest.mark.parametrize("name", ["rtx-4090", "RTX 4090", "4090", "NVIDIA GeForce RTX 4090"])
def test_a_gpu_by_ones_own_name(name):
    assert named(name).name == "rtx-4090"


@pytest.mark.parametrize(
    ("name", "why"),
    [("MI300X", "AMD's ROCm"), ("V100", "no bfloat16"), ("h1000", "is no GPU known by name")],
)
def test_other_gpus_are_refused_with_the_reason(name, why):
    with pytest.raises(UnknownGpu, match=f"^{name}.* {why}.*h100, .*rtx-4090"):
        named(name)


def test_rows_make_sense():
    assert len({gpu.name for gpu in GPUS}) == len(GPUS) > 25
    for gpu in GPUS:
        has_float8 = gpu.capability >= (8, 9)
        assert gpu.float8 == pytest.approx(2 * gpu.bf16 * has_float8, rel=0.013), gpu.name
        assert gpu.fp32 <= 1.01 * gpu.tf32 <= gpu.bf16, gpu.name
        assert gpu.host <= gpu.link or gpu.link_gpus == 8, gpu.name
        assert 20e9 < gpu.memory < 300e9 and len(gpu.source) > 15, gpu.name
