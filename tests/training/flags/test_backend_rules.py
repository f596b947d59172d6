# SPDX-License-Identifier: Apache-2.0
"""Kernels that cannot be taken are refused with flag, value and rule; --attention-backend."""

import pytest

from training.flags.compute_rules import attention_works
from training.flags.parse import parse
from training.settings.config import UsageError

BASE = """--mock-data --vocab-size 1000 --num-layers 2 --hidden-size 64 --num-attention-heads 4
    --seq-length 64 --train-iters 10 --lr 1e-3 --micro-batch-size 1 --bf16"""


@pytest.mark.parametrize(
    "flags, world, words",
    [
        ("--norm-backend apex --device cpu", 1, "--norm-backend apex needs --device cuda; .* weft"),
        ("--norm-backend apex --rehearse", 1, "--norm-backend apex runs .* rehearse with weft"),
        (
            "--attention-backend te --device cpu",
            1,
            "--attention-backend te needs --device cuda; on a CPU use auto",
        ),
        ("--attention-backend fused --dry-run --kv-channels 136", 1, "--kv-channels 136: cuDNN"),
        ("--attention-backend fused --dry-run --reset-attention-mask", 1, "plan for each new le"),
        ("--attention-backend fused --dry-run --deterministic-mode", 1, "not deterministic"),
        ("--core-attention-backend te --attention-backend=fused", 1, "both set --attention-"),
        ("--qk-layernorm --model-file mine.py", 1, "--model-file is mine.py: give one of"),
        ("--flash-attention-version 5", 1, "must be one of 2, 3, 4"),
    ],
)
def test_refused(flags, world, words):
    base = BASE.replace("--bf16", "") if "--fp64" in flags else BASE
    with pytest.raises(UsageError, match=words):
        parse([*base.split(), *flags.split()], world)


def test_taken():
    flags = "--norm-backend te --core-attention-backend te --dry-run --device cuda"
    p = parse([*BASE.split(), *flags.split()], 1).parallel
    assert (p.norm_backend, p.attention_backend) == ("te", "te")


@pytest.mark.parametrize(
    "flags, backend",
    [
        ("", "auto"),
        ("--core-attention-backend torch", "auto"),
        ("--core-attention-backend torch --attention-backend auto", "auto"),
        ("--attention-backend flash --attention-backend unfused", "unfused"),  # argparse's last
        ("--layernorm-epsilon 1e-5 --norm-epsilon 0.00001 --attention-backend local", "local"),
    ],
)
def test_names_that_mean_the_same_are_taken(flags, backend):
    config = parse([*BASE.split(), *flags.split(), "--dry-run"], 1)
    assert config.parallel.attention_backend == backend


@pytest.mark.parametrize("backend", ["flash", "fused"])
def test_a_cpu_runs_scripts_that_name_a_kernel_of_cuda(backend):
    """As they stand in public scripts, with a note; also in fp32 and with documents."""
    flags = f"--attention-backend {backend} --device cpu --reset-attention-mask"
    config = parse([*BASE.replace("--bf16", "").split(), *flags.split()], 1)
    assert [note for note in config.notes if "its kernels need CUDA" in note]


@pytest.mark.parametrize(
    "flags, works",
    [
        ("", ("rows",)),
        ("--reset-attention-mask", ("documents",)),
        ("--context-parallel-size 2", ("blocks",)),
        ("--context-parallel-size 2 --cp-comm-type a2a", ("rows",)),
        ("--context-parallel-size 2 --reset-attention-mask", ("documents",)),
    ],
)
def test_the_work_of_a_step(flags, works):
    world = 2 if "context" in flags else 1
    assert attention_works(parse([*BASE.split(), *flags.split()], world)) == works
