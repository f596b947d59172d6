# SPDX-License-Identifier: Apache-2.0
"""The whole model with fewer key/value heads than tensor-parallel ranks, against its serial twin.

In fp64: loss, gradient norm and EVERY parameter gradient (mpu/layers/qkv.py says how heads are
shared).
"""

import itertools
import random

import pytest

from tests.model.twin import Twin, compare
from tests.sampling import sampled

SIZES = {"kv_channels": 8}  # a head over four ranks: two columns each


def cases(world: int) -> list[dict]:
    """List every case that fills `world` ranks: heads shared by 2 or 4 ranks."""
    every = []
    ways = itertools.product(
        ((1, 2), (1, 4), (2, 4)), (1, 2), (1, 2), (False, True), (0, 1, 3), (False, True),
        (None, "selective", "full"), (1, 3),
    )  # fmt: skip
    for (groups, tp), dp, pp, sp, zero, tied, recompute, m in ways:
        if tp * dp * pp != world or (zero and dp == 1) or (pp == 2 and m == 1):
            continue
        case = dict(tp=tp, dp=dp, pp=pp, sp=sp, zero=zero, tied=tied, recompute=recompute, m=m)
        every.append(case | {"sizes": SIZES | {"num_query_groups": groups}})
    return every


@pytest.fixture(scope="module")
def twins():
    """Return a function: case -> twin with the gradients of global batch 0, its loss and norm."""
    made: dict[tuple, tuple] = {}

    def of(case: dict) -> tuple:
        file = {"file": case["file"]} if "file" in case else {}
        masks = case.get("masks", False)
        key = (case["tied"], masks, case["sizes"]["num_query_groups"], *file.values())
        if key not in made:
            twin = Twin(case["tied"], sizes=case["sizes"], **file)
            (loss,), (norm,) = twin.train(1, lr=0.0, clip=0.0, masks=masks)
            made[key] = (twin, loss, norm)
        return made[key]

    return of


@pytest.mark.parametrize("size", sampled([4, 2], 2))
def test_a_sample_of_the_matrix(world, twins, size):
    compare(world, twins, size, random.Random(size).sample(cases(size), 3))


@pytest.mark.prove
@pytest.mark.parametrize("size", [2, 4, 8])
def test_more_of_the_matrix(world, twins, size):
    some = random.Random(9).sample(cases(size), 16)
    for first in range(0, len(some), 8):  # a world answers within its time-out
        compare(world, twins, size, some[first : first + 8])


def others(tp: int, groups: int) -> list[dict]:
    """List cases of what the matrix leaves out: schedules, paths, masks, Qwen3's norms of heads."""
    base = dict(tp=tp, dp=1, sp=True, tied=False, recompute=None, m=3)
    base["sizes"] = SIZES | {"num_query_groups": groups}
    some = [base | {"path": path} for path in ("ring", "symmetric", "auto")]
    some += [base | dict(masks=True), base | dict(memory=False), base | dict(chunk=7)]
    some += [base | dict(file="model/qwen3.py", sp=sp, recompute="selective") for sp in (0, 1)]
    return some


def test_masks_paths_and_norms_of_heads(world, twins):
    compare(world, twins, 2, others(2, 1)[1::2])


@pytest.mark.prove
def test_masks_paths_and_norms_of_heads_on_other_layouts(world, twins):
    compare(world, twins, 2, others(2, 1)[::2])
    for case in others(4, 1)[::2] + others(4, 2)[1::2]:
        compare(world, twins, 4, [case])
    pipeline = dict(dp=1, pp=2, sp=True, recompute=None, m=3, schedule="zb-h1")
    for case in others(2, 1)[::3]:
        compare(world, twins, 4, [case | pipeline])
