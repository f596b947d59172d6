# SPDX-License-Identifier: Apache-2.0
"""The sharded optimizer has the replicated one's bits, and the serial twin's gradients."""

import pytest

from tests.model.twin import Twin, check, run_layout, same_bits
from tests.sampling import sampled

BASE = dict(tp=1, sp=False, recompute=None, tied=True, m=3, rows=12, lr=1e-2, clip=0.1)
WAYS = [  # level, gradients reduced under backward, weights gathered ahead, bucket
    dict(zero=0, overlap=True, bucket=500),
    dict(zero=1, overlap=True, gather=False, bucket=500),
    dict(zero=3, overlap=True, gather=True),
    dict(zero=2, overlap=True, gather=True, bucket=3000),
    dict(zero=1, overlap=False, gather=True, bucket=10**9),
    dict(zero=2, overlap=False, gather=False, bucket=500),
    dict(zero=3, overlap=False, gather=False),
    dict(zero=1, overlap=True, bucket=3000, offload=True),
    dict(zero=3, overlap=True, gather=True, offload=True),
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


@pytest.mark.parametrize(
    "dp, m, dtype, ways",
    [
        (2, 3, "float32", WAYS[:3]),
        pytest.param(2, 1, "bfloat16", WAYS[::3], marks=pytest.mark.prove),
        pytest.param(2, 1, "float32", WAYS, marks=pytest.mark.prove),
        pytest.param(4, 3, "bfloat16", WAYS, marks=pytest.mark.prove),
    ],
)
def test_levels_change_no_bit(world, dp, m, dtype, ways):
    """Six steps, clipped, tied embeddings, sizes that do not divide by dp."""
    cases = [BASE | dict(dp=dp, m=m, dtype=dtype) | way for way in ways]
    same(world, dp, cases, 6)


@pytest.mark.parametrize("ways", [WAYS[1:3]])
@pytest.mark.parametrize(
    "more",
    [
        dict(tp=2, sp=True, dp=2),
        pytest.param(
            dict(pp=2, dp=2, schedule="interleaved", v=2, m=2, layers=8), marks=pytest.mark.prove
        ),
        pytest.param(
            dict(pp=2, dp=2, schedule="zb-v", v=2, m=3, layers=8), marks=pytest.mark.prove
        ),
        pytest.param(dict(tp=2, dp=2, recompute="full", layers=5), marks=pytest.mark.prove),
    ],
    ids=["tp 2 + sp", "interleaved pp 2", "zb-v pp 2", "recompute"],
)
def test_levels_compose(world, more, ways):
    same(world, 4, [BASE | dict(dtype="bfloat16") | more | way for way in ways], 4)


@pytest.mark.prove
def test_levels_compose_on_eight_ranks(world):
    more = dict(tp=2, sp=True, pp=2, dp=2, schedule="interleaved", v=2, m=2, layers=8)
    same(world, 8, [BASE | dict(dtype="bfloat16") | more | way for way in WAYS], 2)


@pytest.mark.parametrize(
    "dp, zero, tied",
    sampled([(2, 3, False), (4, 2, True), (4, 1, True), (2, 1, False)], 2),
)
def test_every_gradient_is_the_twins(world, dp, zero, tied):
    twin = Twin(tied, rows=12)
    (loss,), (norm,) = twin.train(1, lr=0.0, clip=0.0)
    case = BASE | dict(dp=dp, tied=tied, lr=0.0, clip=0.0, zero=zero, gather=True)
    check(world(dp).run(run_layout, case), twin, loss, norm)


def follow(world, dp: int, ways: list[dict], rel: float, steps: int = 20) -> list[list[dict]]:
    """Hold steps in fp64 (unless the ways say otherwise) against the serial twin."""
    twin = Twin(tied=False, rows=12)
    losses, norms = twin.train(steps, lr=1e-2, clip=0.5)
    every = []
    for way in ways:
        results = world(dp).run(run_layout, BASE | dict(dp=dp, tied=False, clip=0.5) | way, steps)
        for result in results:
            assert result["losses"] == pytest.approx(losses, rel=rel), way
            assert result["norms"] == pytest.approx(norms, rel=rel), way
        every.append(results)
    return every


@pytest.mark.prove
def test_twenty_steps_follow_the_twin(world):
    ways = [dict(zero=z, gather=g) for z, g in ((1, False), (1, True), (2, True), (3, True))]
    follow(world, 2, ways, rel=1e-10)


@pytest.mark.prove
def test_sums_of_each_micro_batch_and_by_instances_follow_the_twin(world):
    """Other orders of addition, so other bits than the levels': to 1e-10 over a run in fp64."""
    each = [dict(zero=2, each=True), dict(zero=3, each=True, overlap=False)]
    follow(world, 2, each, rel=1e-10, steps=8)
    ways = [
        dict(zero=zero, instances=instances, gather=gather, each=each)
        for zero, instances, gather, each in (
            (1, 2, True, False),
            (3, 2, True, True),
            (2, 4, False, False),
        )
    ]
    results = follow(world, 4, ways, rel=1e-10, steps=8)
    for ranks in results:
        for other in ranks[1:]:
            assert same_bits(ranks[0]["weights"], other["weights"]), "instances went apart"


@pytest.mark.prove
def test_narrow_gradients_follow_the_twin(world):
    """bf16 on the wire, and bf16 sums over micro-batches: near the twin, and not fp32's bits."""
    plain = dict(zero=1, dtype="bfloat16", m=3)
    ways = [plain, plain | dict(wire=True), plain | dict(main="bf16")]
    ways += [way | dict(zero=zero) for way in ways[1:] for zero in (3,)]
    ways.append(plain | dict(zero=0, wire=True))
    results = [ranks[0] for ranks in follow(world, 2, ways, rel=0.02, steps=3)]
    exact, wire, main, *others = (result["weights"] for result in results)
    assert not same_bits(exact, wire) and not same_bits(exact, main)
    for one, other in zip((wire, main, wire), others, strict=True):
        assert same_bits(one, other), "the level made a difference"
