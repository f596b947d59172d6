# SPDX-License-Identifier: Apache-2.0
"""The flags of context parallelism: what is refused, what is said, what it makes of ZeRO."""

import pytest

from training.flags.parse import parse
from training.settings.config import UsageError

BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --group-query-attention "
    "--num-query-groups 4 --seq-length 48 --lr 1e-3 --train-iters 2 --mock-data --vocab-size 100 "
    "--device cpu"
)
CP, TP = "--context-parallel-size", "--tensor-model-parallel-size 2 --sequence-parallel"


def read(more: str, world: int):
    return parse([*BASE.split(), *more.split()], world)


MISTAKES = [  # flags, ranks, what the sentence holds
    (f"{CP} 5", 5, "--seq-length 48 is not a multiple of --context-parallel-size 5"),
    (f"{CP} 16 {TP}", 32, "--context-parallel-size 16 x --tensor-model-parallel-size 2 = 32"),
    (f"{CP} 2 --cp-comm-type allgather", 2, "--cp-comm-type allgather: must be one of p2p, all_"),
    (f"{CP} 4 --hierarchical-context-parallel-sizes 2 2", 4, "without a replacement; use --cp-c"),
    (f"{CP} 6 --cp-comm-type a2a", 6, "over which --cp-comm-type a2a cuts them"),
    (f"{CP} 3 --num-query-groups 2 --num-attention-heads 6 --cp-comm-type a2a --hidden-size 60", 3,
     "--num-query-groups 2 = 2 and --context-parallel-size 3: --cp-comm-type a2a needs one"),
    (f"{CP} 2 --zero-stage 1 --num-distributed-optimizer-instances 4", 2,
     "4 does not divide the 2 data- and context-parallel ranks"),
]  # fmt: skip


@pytest.mark.parametrize("more, world, sentence", MISTAKES, ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_one_sentence(more, world, sentence):
    with pytest.raises(UsageError) as mistake:
        read(more, world)
    assert sentence in str(mistake.value)
    assert "\n" not in str(mistake.value) and len(str(mistake.value)) < 300


@pytest.mark.parametrize(
    "more, world",
    [
        (f"{CP} 2", 2),
        (f"{CP} 8 --cp-comm-type a2a", 8),  # 4 key/value heads, each replicated
        (f"{CP} 3 --cp-comm-type all_gather", 3),
        (f"{CP} 2 --cp-comm-type a2a {TP}", 4),
        ("--cp-comm-type p2p", 1),  # as Megatron's scripts have it at size 1
    ],
)
def test_what_goes_together_says_nothing(more, world):
    assert read(more, world).notes == ()


def test_gradient_ranks_are_dp_times_cp():
    p = read(f"{CP} 2 --zero-stage 1", 6).parallel
    assert (p.data_parallel_size, p.gradient_ranks, p.shard_size) == (3, 6, 6)
    assert read(f"{CP} 2", 2).batch.global_batch_size == 1, "samples are shared by dp alone"
