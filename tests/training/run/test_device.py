# SPDX-License-Identifier: Apache-2.0
"""How exact CUDA's arithmetic is: the settings that a run makes before CUDA starts."""

import os
from types import SimpleNamespace

import pytest
import torch

from mpu.launch import Launch
from training.flags.parse import parse
from training.run import device as device_module
from training.run.device import choose_device, set_arithmetic
from training.settings.config import UsageError

FLAGS = """--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --lr 1e-3
    --train-iters 1 --mock-data --vocab-size 64"""


@pytest.fixture
def settings(monkeypatch):
    """Put torch's settings and the environment back."""
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"):
        monkeypatch.setenv(name, "")  # so that monkeypatch removes what the test leaves
        monkeypatch.delenv(name)
    matmul = torch.backends.cuda.matmul
    names = [f"allow_{kind}_reduced_precision_reduction" for kind in ("bf16", "fp16")]
    before = [getattr(matmul, name) for name in names]
    for name in names:
        setattr(matmul, name, True)
    yield matmul
    for name, value in zip(names, before, strict=True):
        setattr(matmul, name, value)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cuda.enable_cudnn_sdp(True)


def test_narrow_matmuls_are_summed_in_fp32(settings):
    set_arithmetic(deterministic=False)
    assert not settings.allow_bf16_reduced_precision_reduction
    assert not settings.allow_fp16_reduced_precision_reduction
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() and "NCCL_ALGO" not in os.environ


@pytest.mark.parametrize("way, told", [
    ("pass", False),
    ("b.cudnn.fp32_precision = 'tf32'", True),
    ("b.cuda.matmul.allow_tf32 = True", True),
    ("b.cudnn.rnn.fp32_precision = 'tf32'", False),
    ("b.mkldnn.matmul.fp32_precision = 'bf16'", True),
    ("torch.set_float32_matmul_precision('medium')", True),
])  # fmt: skip
def test_fp32_is_fp32_unless_a_flag_says_otherwise(settings, monkeypatch, way, told):
    """way: how a sitecustomize.py or a model's file may let torch round it."""
    monkeypatch.setattr(device_module, "keep_freed_memory", lambda: None)
    b, said = torch.backends, []
    parts = (b.cuda.matmul, b.cudnn.conv, b.cudnn.rnn, b.mkldnn.matmul, b.mkldnn.conv, b.mkldnn.rnn)
    b.cuda.matmul.fp32_precision = b.mkldnn.matmul.fp32_precision = "none"  # as when torch starts
    try:
        exec(way, {"b": b, "torch": torch})
        choose_device(parse(f"{FLAGS} --device cpu".split(), 1), Launch(), False, said.append)
        assert torch.get_float32_matmul_precision() == "highest"  # raises where names disagree
        assert not b.cuda.matmul.allow_tf32 and not b.cudnn.allow_tf32
        assert {part.fp32_precision for part in parts} <= {"ieee", "none"}
        line = "torch's fp32_precision: overridden, fp32 matmuls are computed in fp32"
        assert [each.startswith(line) for each in said] == [True] * told
        config = parse(f"{FLAGS} --device cpu --allow-tf32".split(), 1)
        choose_device(config, Launch(), False, said.append)
        assert b.cuda.matmul.allow_tf32 and b.cuda.matmul.fp32_precision == "tf32"
        assert b.cudnn.allow_tf32 and said[-1].startswith("--allow-tf32: fp32 matmuls round")
    finally:
        set_arithmetic(deterministic=False)
        b.cudnn.allow_tf32 = True  # torch's default


def test_deterministic_mode_takes_kernels_whose_bits_repeat(settings):
    set_arithmetic(deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory  # a pass over each new tensor
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["NCCL_ALGO"] == "Ring"


@pytest.mark.parametrize("mode", ["", " --deterministic-mode"])
def test_a_run_sets_them_before_it_asks_for_a_device(settings, monkeypatch, mode):
    """Asking torch for devices may start CUDA, which reads the environment then."""
    for name in [name for name in os.environ if "TF32" in name]:
        monkeypatch.delenv(name)
    asked, said = [], []
    config = parse(f"{FLAGS}{mode}".split(), 1)  # asks whether there is one; no library starts

    def available():
        asked.append((torch.are_deterministic_algorithms_enabled(), "NCCL_ALGO" in os.environ))
        assert not settings.allow_bf16_reduced_precision_reduction
        return True

    monkeypatch.setattr(torch.cuda, "is_available", available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    about = SimpleNamespace(name="NVIDIA H100", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    device = choose_device(config, Launch(3, 4, 3, 4), False, said.append)
    assert device == torch.device("cuda", 1)
    assert asked and set(asked) == {(bool(mode), bool(mode))}
    first, hidden, line = said
    assert hidden.startswith("this process sees 2 CUDA devices, but its node runs 4 ranks: ")
    assert first.startswith("device: cuda:1, NVIDIA H100, compute capability 9.0; ")
    assert line.startswith("environment of CUDA: CUDA_MODULE_LOADING=EAGER")


@pytest.mark.parametrize("count,ranks,more,told", [
    (8, 8, "", False), (8, 4, "", False), (1, 8, "", True), (4, 8, "", True),
    (1, 8, "--distributed-backend gloo", False),
])  # fmt: skip
def test_a_rank_that_does_not_see_its_neighbours_gpus_says_so(
    settings, monkeypatch, count, ranks, more, told
):
    """CUDA shares no memory with a GPU that it does not see (NVIDIA/nccl#1066)."""
    said = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    about = SimpleNamespace(name="NVIDIA H100", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    config = parse(f"{FLAGS} {more}".split(), 1)
    device = choose_device(config, Launch(5, 16, 5 % ranks, ranks), False, said.append)
    assert device.index == 5 % ranks % count
    assert any("--gpu-bind=none" in line for line in said) == told


@pytest.mark.parametrize("value,more,told", [
    ("1", "--zero-stage 3 --overlap-param-gather", True), ("1", "--zero-stage 3", False),
    ("1", "", False), ("32", "--zero-stage 3 --overlap-param-gather", False),
])  # fmt: skip
def test_one_queue_for_all_streams_is_told_where_gathers_run_ahead(
    settings, monkeypatch, value, more, told
):
    """Megatron-LM asks its users for 1, and refuses it for FSDP (its training/arguments.py)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    about = SimpleNamespace(name="NVIDIA H100", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value)
    said = []
    choose_device(parse(f"{FLAGS} {more}".split(), 2), Launch(0, 2, 0, 2), False, said.append)
    assert (device_module.ONE_QUEUE in said) == told
    assert f"CUDA_DEVICE_MAX_CONNECTIONS={value}" in said[-1]


@pytest.mark.parametrize("value,stages,refused", [
    ("1", 2, True), ("1", 1, False), ("0", 2, False), (None, 2, False),
])  # fmt: skip
def test_a_pipeline_refuses_launches_that_block(settings, monkeypatch, value, stages, refused):
    """mpu/pipeline/steps.py posts receives an action ahead, and a receive is a kernel."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    about = SimpleNamespace(name="NVIDIA H100", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    if value is not None:
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", value)
    config = parse(f"{FLAGS} --pipeline-model-parallel-size {stages}".split(), 2)
    if not refused:
        assert choose_device(config, Launch(1, 2, 1, 2), False, lambda line: None).index == 1
        return
    with pytest.raises(UsageError, match="CUDA_LAUNCH_BLOCKING is set and --pipeline-model-par"):
        choose_device(config, Launch(1, 2, 1, 2), False, lambda line: None)


def test_a_cpu_has_nothing_to_tell(settings, monkeypatch):
    monkeypatch.setattr(device_module, "keep_freed_memory", lambda: None)
    said = []
    cpu = parse(f"{FLAGS} --device cpu".split(), 1)
    assert choose_device(cpu, Launch(), False, said.append).type == "cpu" and not said
