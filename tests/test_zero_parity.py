# SPDX-License-Identifier: Apache-2.0
"""The sharded optimizer: the same bits as the replicated one, and the serial twin's gradients."""

import pytest

from tests.twin import Twin, check, run_layout, same_bits

BASE = dict(tp=1, sp=False, recompute=None, tied=True, m=3, rows=12, lr=1e-2, clip=0.1)
WAYS = [  # level, gradients reduced under backward, weights gathered under forward, bucket
    dict(zero=0, overlap=True, bucket=500),
    dict(zero=1, overlap=True, gather=False, bucket=500),
    dict(zero=1, overlap=True, gather=True, bucket=3000),
    dict(zero=1, overlap=False, gather=True, bucket=10**9),
    dict(zero=2, overlap=True, gather=True, bucket=500),
    dict(zero=2, overlap=False, gather=False, bucket=3000),
    dict(zero=3, overlap=True, gather=True),
    dict(zero=3, overlap=False, gather=False),
]


def same(world, size: int, cases: list[dict], steps: int) -> None:
    """Hold every rank's losses, norms and weights of the cases against each other."""
    results = [world(size).run(run_layout, case, steps) for case in cases]
    assert len(set(results[0][0]["losses"])) == steps, "nothing was trained"
    for case, other in zip(cases[1:], results[1:], strict=True):
        for mine, theirs in zip(results[0], other, strict=True):
            assert mine["losses"] == theirs["losses"], case
            assert mine["norms"] == theirs["norms"], case
            assert mine["weights"].keys() == theirs["weights"].keys()
            assert same_bits(mine["weights"], theirs["weights"]), case


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dp, m", [(2, 1), (2, 3), (4, 3)])
def test_levels_change_no_bit(world, dtype, dp, m):
    """Twenty steps, clipped, tied embeddings, sizes that do not divide by dp."""
    same(world, dp, [BASE | dict(dp=dp, m=m, dtype=dtype) | way for way in WAYS], 20)


@pytest.mark.parametrize(
    "more",
    [
        dict(tp=2, sp=True, dp=2),
        dict(pp=2, dp=2, schedule="interleaved", v=2, m=2, layers=8),
        dict(pp=2, dp=2, schedule="zb-v", v=2, m=3, layers=8),
    ],
    ids=["tp 2 + sp", "interleaved pp 2", "zb-v pp 2"],
)
def test_levels_compose(world, more):
    same(world, 4, [BASE | dict(dtype="bfloat16") | more | way for way in WAYS], 4)


@pytest.mark.prove
def test_levels_compose_on_eight_ranks(world):
    more = dict(tp=2, sp=True, pp=2, dp=2, schedule="interleaved", v=2, m=2, layers=8)
    same(world, 8, [BASE | dict(dtype="float32") | more | way for way in WAYS], 4)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dp", [2, 4])
def test_every_gradient_is_the_twins(world, dp, tied):
    twin = Twin(tied, rows=12)
    (loss,), (norm,) = twin.train(1, lr=0.0, clip=0.0)
    case = BASE | dict(dp=dp, tied=tied, lr=0.0, clip=0.0, zero=1)
    check(world(dp).run(run_layout, case), twin, loss, norm)


@pytest.mark.parametrize("gather", [False, True])
def test_twenty_steps_follow_the_twin(world, gather):
    twin = Twin(tied=False, rows=12)
    losses, norms = twin.train(20, lr=1e-2, clip=0.5)
    case = BASE | dict(dp=2, tied=False, clip=0.5, zero=1, gather=gather)
    for result in world(2).run(run_layout, case, 20):
        assert result["losses"] == pytest.approx(losses, rel=1e-10)
        assert result["norms"] == pytest.approx(norms, rel=1e-10)


def test_the_ways_differ():
    assert len({tuple(sorted(way.items())) for way in WAYS}) == len(WAYS)
    assert {way["zero"] for way in WAYS} == {0, 1, 2, 3}
