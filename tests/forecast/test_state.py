# SPDX-License-Identifier: Apache-2.0
"""The bytes that a rank keeps from step to step, as recorded, against those worked out by hand.

The blocks are those of test_buckets.py.
"""

import pytest
import torch

import pretrain_llama
from forecast.recording import HOST, STATE, record
from mpu.host_memory import HostMemory
from tests.sampling import sampled
from tests.training.small_llama import PIPELINE, read

K = 1024
UNTIED = "--untie-embeddings-and-output-weights"
SP = "--tensor-model-parallel-size 2 --sequence-parallel"
ENDS = "--pipeline-model-parallel-size 2 --num-layers 4 --pipeline-model-parallel-layout Ett|ttL"


def recorded(more, world=1, rank=0):
    return record(read(more, world), pretrain_llama, [rank])[rank]


# level, flags, ranks, pipeline rank; blocks of weights, gradients, masters, moments times bytes
HELD = [
    ("", 1, 0, (116 * 4, 116 * 4, 0, 116 * 8)),
    (f"--bf16 {UNTIED}", 4, 0, (136 * 2, 136 * 4, 136 * 4, 136 * 8)),
    ("--fp64", 8, 0, (120 * 8, 120 * 8, 0, 120 * 16)),
    ("--zero-stage 1", 4, 0, (116 * 4, 116 * 4, 0, 29 * 8)),
    ("--zero-stage 1 --bf16", 8, 0, (120 * 2, 120 * 4, 15 * 4, 15 * 8)),
    (
        "--zero-stage 1 --bf16 --main-grads-dtype bf16",
        4,
        0,
        (116 * 2, 116 * 2 + 29 * 4, 29 * 4, 29 * 8),
    ),
    (f"{ENDS} --zero-stage 1", 4, 1, (86 * 4, 86 * 4, 0, 43 * 8)),
    ("--zero-stage 2 --bf16", 4, 0, (116 * 2, 29 * 4, 29 * 4, 29 * 8)),
    (f"--zero-stage 2 {SP}", 4, 0, (64 * 4, 32 * 4, 0, 32 * 8)),
    (
        "--zero-stage 2 --num-distributed-optimizer-instances 2 --main-grads-dtype bf16 --bf16",
        8,
        0,
        (120 * 2, 30 * 4, 30 * 4, 30 * 8),
    ),
    (f"--zero-stage 3 --bf16 {UNTIED}", 4, 0, (34 * 2, 34 * 4, 34 * 4, 34 * 8)),
    # one rank alone: nothing is shared, but bf16 gradients still need a sum in fp32
    (f"--zero-stage 3 {UNTIED}", 1, 0, (135 * 4, 135 * 4, 0, 135 * 8)),
    (
        f"--zero-stage 2 --bf16 --main-grads-dtype bf16 {UNTIED}",
        1,
        0,
        (135 * 2, 135 * (2 + 4), 135 * 4, 135 * 8),
    ),
    # norms stand apart, whole: 58 blocks over 2 ranks, and 8
    (f"--zero-stage 3 {SP}", 4, 0, ((29 + 8) * 4, 33 * 4, 0, 33 * 8)),
    (f"--zero-stage 3 {ENDS}", 4, 1, ((33 + 20) * 4, 43 * 4, 0, 43 * 8)),
]


@pytest.mark.parametrize(
    "more,world,rank,sizes", sampled(HELD, 3), ids=[h[0] or "plain" for h in HELD]
)
def test_state_by_hand(more, world, rank, sizes):
    start = recorded(more, world, rank).start
    assert tuple(start[kind] for kind in STATE) == tuple(size * K for size in sizes)


@pytest.mark.parametrize("more,each", [("--bf16", 4 * 4 + 2), ("", 4 * 4)])
def test_state_in_host_memory(more, each):
    """A gradient, a master and two moments in fp32, and bf16 weights on their way up; and the
    update's own few numbers.
    """
    found = recorded(f"--optimizer-cpu-offload --zero-stage 1 {more}", 4)
    assert found.start["masters"] == found.start["moments"] == 0
    assert 0 <= found.most(HOST) - 29 * K * each < 64
    assert found.copied()[1] - 29 * K * (2 if more else 4) == 0


def test_ranks_of_a_pipeline_have_host_memory_of_their_own():
    """Two layers each, 64 blocks, the embedding, 1, at both ends, and the last norm, 1. Nothing of
    the process stays replaced.
    """
    before = HostMemory.empty, HostMemory.zeros, torch.UntypedStorage.resize_
    found = record(read(f"{PIPELINE} 16 --optimizer-cpu-offload", 4), pretrain_llama)
    blocks = {rank: found[rank].most(HOST) // (K * 4 * 4) for rank in sorted(found)}
    assert blocks == {0: 65, 1: 64, 2: 64, 3: 66}
    assert (HostMemory.empty, HostMemory.zeros, torch.UntypedStorage.resize_) == before


@pytest.mark.parametrize("more", ["--zero-stage 1", "--optimizer-cpu-offload --device cpu"])
def test_nothing_is_in_host_memory(more):
    found = recorded(more, 4)
    assert (found.most(HOST), *found.copied()) == (0, 0, 0)
    assert found.start["moments"] > 0


def test_state_that_leaves_between_steps():
    """34 blocks: a master and two moments in fp32 go down under the first forward, and come up when
    the last gradients are there.
    """
    more = f"--optimizer-state-offload --bf16 --zero-stage 1 {UNTIED} --global-batch-size 16"
    found = recorded(more, 4)
    assert (34 * K * 3 * 4,) * 3 == (found.most(HOST), *found.copied())
    state = [(m.action, m.kinds["masters"] // K, m.kinds["moments"] // K) for m in found.moments()]
    there, away = (34 * 4, 34 * 8), (0, 0)
    kinds = [getattr(action, "kind", action) for action, *_ in state]
    assert kinds == ["F", "B", "F", "B", "sums of gradients", "update"]
    assert [tuple(sizes) for _, *sizes in state] == [there, away, away, there, there, there]
