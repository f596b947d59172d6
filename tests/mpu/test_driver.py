# SPDX-License-Identifier: Apache-2.0
"""A GPU that is here and cannot be used is an error with its reason, never a silent CPU run."""

import os

import pytest
import torch

import pretrain_llama
from mpu import driver
from mpu.accelerators import unusable_gpu
from mpu.launch import Launch
from training.flags.parse import parse
from training.run.device import choose_device
from training.settings.config import UsageError

FLAGS = """--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --lr 1e-3
    --train-iters 1 --mock-data --vocab-size 64""".split()
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Mon Apr 18 03:06:35 UTC\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs)\n"
NEW = CLOSED.replace("535.161.08", "580.65.06")
OLD_SAID = "The NVIDIA driver on your system is too old (found version 12020). Please update"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return machine(driver's text, files in /dev, CUDA of torch, what torch says)."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(driver, "ROOT", tmp_path)

    def make(text="", files=(), cuda="13.0", said=""):
        (tmp_path / "dev").mkdir(exist_ok=True)
        for name in files:
            (tmp_path / "dev" / name).touch()
        if text:
            (tmp_path / "proc/driver/nvidia").mkdir(parents=True, exist_ok=True)
            (tmp_path / "proc/driver/nvidia/version").write_text(text)

        def init():
            raise RuntimeError(said)

        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "init", init)
        return tmp_path

    return make


GPU = ("nvidia0", "nvidiactl")
CASES = {
    "a driver older than the wheel": (
        (CLOSED, GPU, "13.0", OLD_SAID),
        ("machine has NVIDIA driver 535.161.08", "built for CUDA 13.0", "(found version 12020)",
         "needs driver 580 or newer: update the driver, or install torch for CUDA 12"),
    ),
    "a driver too old for any wheel": (
        (CLOSED.replace("535.161.08", "470.82.01"), GPU, "12.6", ""),
        ("NVIDIA driver 470.82.01", "CUDA 12.6 needs driver 525 or newer: update the driver;",),
    ),
    "a CPU build of torch": (
        (OPEN, GPU, None, ""),
        ("NVIDIA driver 570.86.15", f"torch {torch.__version__} is built without CUDA",
         "CUDA 12 (https", "CUDA 13 needs driver 580"),
    ),
    "a CPU build where the driver is new": (
        (NEW, GPU, None, ""), ("install a torch that is built for CUDA;",),
    ),
    "a container without its GPUs": ((NEW, (), "13.0", ""), ("docker run --gpus all",)),
    "a device file without a driver that is seen": (
        ("", GPU, "13.0", ""), ("this machine has /dev/nvidia0",),
    ),
    "MIG without an instance": ((NEW, GPU, "13.0", ""), ("MIG mode needs an instance",)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_gpu_that_cannot_be_used_is_said(machine, name, capsys):
    about, words = CASES[name]
    root = machine(*about)
    assert pretrain_llama.main([*FLAGS]) == 2
    said = capsys.readouterr().err.replace(str(root), "")
    assert all(word in said for word in words), said
    assert "or train on the CPU with --device cpu" in said and said.count("\n") == 1


def test_what_the_user_asks_for_is_obeyed(machine, monkeypatch):
    machine(CLOSED, GPU)
    assert parse([*FLAGS, "--device", "cpu"], 1).parallel.device == "cpu"
    assert parse([*FLAGS, "--dry-run"], 1).run.dry_run
    for hidden in ("", "-1", " -1,0", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert parse(FLAGS, 1).parallel.device is None, hidden
    for seen in ("7", "MIG-0123"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
        with pytest.raises(UsageError, match=r"CUDA 13\.0 needs driver 580"):
            parse(FLAGS, 1)
    machine(NEW, GPU)
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES is 'MIG-0123', which may name"):
        parse(FLAGS, 1)
    with pytest.raises(UsageError, match=r"--device cuda: this machine has NVIDIA driver 580"):
        parse([*FLAGS, "--device", "cuda"], 1)


def test_a_machine_without_a_gpu_trains_on_its_cpu(machine):
    machine("", (), None)
    assert unusable_gpu() == "" and parse(FLAGS, 1).parallel.device is None
    with pytest.raises(UsageError, match="--device cuda: this process sees no CUDA device"):
        parse([*FLAGS, "--device", "cuda"], 1)


def test_a_device_file_that_may_not_be_opened(machine, monkeypatch):
    """As in a container whose cgroup denies the device."""
    machine(NEW, GPU)

    def denied(path, flags):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "open", denied)
    assert unusable_gpu().endswith("dev/nvidia0 cannot be opened: Operation not permitted")


def test_ranks_that_would_share_a_gpu_over_nccl(monkeypatch):
    """An instance of MIG is one device to a process, however many there are."""
    for name, value in (("is_available", True), ("device_count", 1), ("set_device", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *about, value=value: value)
    about = type("Properties", (), {"name": "NVIDIA H100", "major": 9, "minor": 0})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    config, notes, launch = parse([*FLAGS], 1), [], Launch(1, 2, 1, 2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    with pytest.raises(UsageError, match="2 ranks were started on this node, which has 1 CUDA dev"):
        choose_device(config, launch, False, notes.append)
    gloo = parse([*FLAGS, "--distributed-backend", "gloo"], 1)
    assert choose_device(gloo, launch, False, notes.append).index == 0
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")  # srun: each rank may have its own
    assert choose_device(config, launch, False, notes.append).index == 0
    assert notes[0].startswith("device: cuda:0, NVIDIA H100, compute capability 9.0; ")
