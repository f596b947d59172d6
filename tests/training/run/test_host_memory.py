# SPDX-License-Identifier: Apache-2.0
"""Sizes that a CPU's host has no memory for are refused before anything is allocated."""

import pytest
import torch

import pretrain_llama
from forecast import dry_run
from mpu.grid import Grid
from mpu.launch import Launch
from tests.sampling import sampled
from training.flags.parse import parse
from training.run import memory_report as memory
from training.settings.config import UsageError

FLAGS = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --lr 1e-3
    --train-iters 1 --mock-data --vocab-size 100 --device cpu --micro-batch-size 1""".split()


REAL = pretrain_llama.build


def build(config, grid, device, monitor):
    assert device.type == "meta", "something was allocated"
    return REAL(config, grid, device, monitor)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--num-layers 60 --hidden-size 16384", "--num-layers 60 or --hidden-size 16384"),
        pytest.param(
            "--seq-length 1000000",
            "for activations: lower --micro-batch-size 1 or --seq-l",
            marks=pytest.mark.prove,
        ),
        pytest.param("--vocab-size 2000000000", "1 rank(s) need", marks=pytest.mark.prove),
    ],
)
def test_sizes_that_cannot_fit_are_one_sentence(more, says, monkeypatch, capsys):
    monkeypatch.setattr(pretrain_llama, "build", build)
    monkeypatch.setattr(memory, "available", lambda: 4 * 10**9)
    assert pretrain_llama.main([*FLAGS, *more.split()]) == 2
    said = capsys.readouterr().err
    assert "this host has 4 GB of memory available" in said and says in said
    assert said.count("\n") == 1


def test_it_is_the_dry_runs_number_of_all_ranks_of_the_host(monkeypatch):
    """Two stages of a pipeline on one host need what both need; alone on theirs, less."""
    sizes = "--hidden-size 256 --micro-batch-size 2 --seq-length 64 --global-batch-size 8"
    config = parse([*FLAGS, *sizes.split(), "--pipeline-model-parallel-size", "2"], 2)
    kinds = dry_run.memory_of_ranks(config, pretrain_llama)
    each = [sum(of_rank.values()) for of_rank in kinds]
    for local, need in ((2, sum(each)), (1, each[1])):
        launch = Launch(1, 2, local - 1, local)
        grid = Grid(2, 1, 1, 2, launch)
        for free, refused in ((need, False), (need - 1, True)):
            monkeypatch.setattr(memory, "available", lambda free=free: free)
            cpu = torch.device("cpu")
            if refused:
                with pytest.raises(UsageError, match=rf"{local} rank\(s\) need"):
                    memory.check_host(config, grid, cpu, lambda: kinds)
            else:
                memory.check_host(config, grid, cpu, lambda: kinds)
            memory.check_host(config, grid, torch.device("meta"), lambda: kinds)


@pytest.mark.parametrize(
    "more",
    sampled(
        [
            "--pipeline-model-parallel-size 2 --global-batch-size 16 --pipeline-schedule gpipe",
            "",
            "--vocab-size 50000 --micro-batch-size 4 --global-batch-size 16",
            "--seq-length 2048 --ffn-hidden-size 4096",
            "--hidden-size 512 --num-layers 8 --fp64",
            "--pipeline-model-parallel-size 2 --global-batch-size 16 --seq-length 1024",
        ],
        6,
    ),
)
def test_the_cheap_bound_is_above_the_dry_run(more):
    config = parse([*FLAGS, *more.split()], 2 if "pipeline" in more else 1)
    for kinds in dry_run.memory_of_ranks(config, pretrain_llama):
        assert 0 < sum(kinds.values()) < memory.at_most(config)


def test_what_is_available_is_the_least_of_the_host_and_its_groups(tmp_path):
    def write(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    assert memory.available(tmp_path) == 4000 * 1024
    write("proc/self/cgroup", "0::/a/b\n")
    write("sys/fs/cgroup/a/b/memory.max", "max\n")
    write("sys/fs/cgroup/a/b/memory.current", "5\n")
    write("sys/fs/cgroup/a/memory.max", "3000000\n")
    write("sys/fs/cgroup/a/memory.current", "2500000\n")
    write("sys/fs/cgroup/a/memory.stat", "anon 1\nfile 100000\n")
    assert memory.available(tmp_path) == 600_000
    write("proc/self/cgroup", "9:name=x:/\n4:memory:/c\n3:cpu,cpuacct:/\n0::/\n")
    write("sys/fs/cgroup/memory/c/memory.limit_in_bytes", "1000000\n")
    write("sys/fs/cgroup/memory/c/memory.usage_in_bytes", "700000\n")
    stat = "total_inactive_file 20000\ntotal_active_file 30000\n"
    write("sys/fs/cgroup/memory/c/memory.stat", stat)
    assert memory.available(tmp_path) == 350_000
    (tmp_path / "proc/meminfo").unlink()
    assert memory.available(tmp_path) == 350_000
