# SPDX-License-Identifier: Apache-2.0
"""Where another package's kernels cannot be taken, flag, value and way round are told."""

import pytest

from training.config import UsageError
from training.flags.parse import parse

BASE = """--mock-data --vocab-size 1000 --num-layers 2 --hidden-size 64 --num-attention-heads 4
    --seq-length 64 --train-iters 10 --lr 1e-3 --micro-batch-size 1 --bf16"""


@pytest.mark.parametrize(
    "flags, world, words",
    [
        ("--norm-backend apex --device cpu", 1, "--norm-backend apex needs --device cuda; .* weft"),
        ("--norm-backend te --fp64", 1, "--norm-backend te has no fp64: with --fp64 use weft"),
        ("--norm-backend apex --rehearse", 1, "--norm-backend apex runs .* rehearse with weft"),
        (
            "--core-attention-backend te --context-parallel-size 2",
            2,
            "--core-attention-backend te at --context-parallel-size 2: .* use torch",
        ),
        (
            "--core-attention-backend te --device cpu",
            1,
            "--core-attention-backend te needs --device cuda; on a CPU use torch",
        ),
    ],
)
def test_refused(flags, world, words):
    base = BASE.replace("--bf16", "") if "--fp64" in flags else BASE
    with pytest.raises(UsageError, match=words):
        parse([*base.split(), *flags.split()], world)


def test_taken():
    flags = "--norm-backend te --core-attention-backend te --dry-run --device cuda"
    p = parse([*BASE.split(), *flags.split()], 1).parallel
    assert (p.norm_backend, p.core_attention_backend) == ("te", "te")
