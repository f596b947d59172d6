# SPDX-License-Identifier: Apache-2.0
"""The whole model against its serial twin (tests/model/twin.py), in fp64: loss, gradient norm and
EVERY parameter gradient, over tensor and data parallelism, recomputation, tied embeddings, masks.
"""

import itertools
import random

import pytest

from tests.model.twin import Twin, compare, run_layout
from tests.sampling import sampled


def cases(world: int) -> list[dict]:
    """List every case of the matrix that fills `world` ranks."""
    keys = ("tp", "dp", "sp", "recompute", "tied", "m")
    values = ((1, 2, 4), (1, 2), (False, True), (None, "selective", "full"), (False, True), (1, 3))
    every = [dict(zip(keys, v, strict=True)) for v in itertools.product(*values)]
    return [c for c in every if c["tp"] * c["dp"] == world and not (c["sp"] and c["tp"] == 1)]


@pytest.fixture(scope="module")
def twins():
    """Return a function: case -> twin with the gradients of global batch 0, its loss and norm."""
    made = {}
    for tied, masks in itertools.product((False, True), (False, True)):
        twin = Twin(tied)
        (loss,), (norm,) = twin.train(1, lr=0.0, clip=0.0, masks=masks)
        made[tied, masks] = (twin, loss, norm)
    return lambda case: made[case["tied"], case.get("masks", False)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_sample_of_the_matrix(world, twins, size):
    every = cases(size)
    compare(world, twins, size, random.Random(size).sample(every, min(8, len(every))))


@pytest.mark.prove
@pytest.mark.parametrize("size", [2, 4, 8])
def test_more_of_the_matrix(world, twins, size):
    every = cases(size)
    compare(world, twins, size, random.Random(9).sample(every, len(every) // 2))


def over_paths(tp: int, dp: int) -> list[dict]:
    """List cases of every path of the linear layers' parts (--tp-comm-overlap)."""
    ways = itertools.product(("ring", "symmetric", "auto"), (None, "selective", "full"), (1, 3))
    base = dict(tp=tp, dp=dp, sp=True, tied=False)
    return [base | dict(path=path, recompute=r, m=m) for path, r, m in ways]


@pytest.mark.parametrize("path", sampled(["symmetric", "ring"], 2))
def test_paths(world, twins, path):
    compare(world, twins, 2, [c for c in over_paths(2, 1) if c["path"] == path and c["m"] == 3][:2])


@pytest.mark.prove
@pytest.mark.parametrize("tp, dp, pp", [(2, 2, 1), (4, 1, 1), (2, 1, 2)])
def test_more_paths(world, twins, tp, dp, pp):
    """Also where shared memory is not available, tied, masked, sharded, in a pipeline that defers
    weight gradients.
    """
    some = over_paths(tp, dp)
    some += [c | dict(zero=3, masks=True) for c in some if dp > 1 and c["recompute"] != "full"]
    some += [c | dict(tied=True, memory=False) for c in some if c["m"] == 1]
    if pp > 1:
        some = [c | dict(pp=pp, schedule="zb-h1", recompute=None) for c in some if c["m"] == 3]
    compare(world, twins, tp * dp * pp, random.Random(9).sample(some, len(some) // 2))


@pytest.mark.parametrize("size, tp", sampled([(4, 2), (2, 2), (2, 1), (1, 1)], 2))
def test_masked_documents(world, twins, size, tp):
    """Document masks, restarted positions and a loss mask that falls unevenly on the ranks."""
    base = dict(tp=tp, dp=size // tp, sp=tp > 1, tied=False, masks=True)
    some = [base | {"recompute": r, "m": m} for r in (None, "selective") for m in (1, 3)]
    compare(world, twins, size, some)


@pytest.mark.parametrize("size, tp", sampled([(2, 2), (1, 1), (2, 1)], 3))
def test_twenty_steps_follow_the_twin(world, size, tp):
    twin = Twin(tied=False)
    losses, norms = twin.train(20, lr=1e-2, clip=0.5)
    case = dict(tp=tp, dp=size // tp, sp=tp > 1, recompute=None, tied=False, m=1, lr=1e-2, clip=0.5)
    for result in world(size).run(run_layout, case, 20):
        assert result["losses"] == pytest.approx(losses, rel=1e-10)
        assert result["norms"] == pytest.approx(norms, rel=1e-10)
