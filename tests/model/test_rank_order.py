# SPDX-License-Identifier: Apache-2.0
"""Whatever the order in which ranks count along the axes, the run equals the serial twin in fp64.

Where cp comes before dp, or one of the two is not cut, losses, norms and weights are those of the
usual order to the last bit (docs/numerics.md).
"""

import functools
import random
from itertools import permutations

import pytest

from mpu.grid import ORDER, Grid
from mpu.launch import Launch
from tests.model.twin import Twin, compare, run_layout, same_bits

SIZES = ((2, 1, 2, 1), (2, 1, 1, 2), (1, 1, 2, 2), (2, 2, 1, 1), (1, 2, 2, 1), (1, 2, 1, 2))
EIGHT = ((2, 1, 2, 2), (2, 2, 2, 1), (2, 2, 1, 2), (1, 2, 2, 2))  # tp, cp, dp, pp


def case_of(sizes: tuple[int, ...], order: tuple[str, ...], **more) -> dict:
    tp, cp, dp, pp = sizes
    return dict(
        tp=tp, cp=cp, dp=dp, pp=pp, sp=tp > 1, m=2, rows=8, recompute=None, tied=True, masks=True,
        order="-".join(order), zero=1, gather=True,
    ) | more  # fmt: skip


@functools.cache
def twin(tied: bool) -> tuple[Twin, float, float]:
    made = Twin(tied, rows=8)
    (loss,), (norm,) = made.train(1, lr=0.0, clip=0.0, masks=True)
    return made, loss, norm


def distinct(sizes: tuple[int, ...]) -> list[tuple[str, ...]]:
    """Return the orders that differ in the axes that are cut, but for the usual one."""
    cut = [name for name, size in zip(ORDER, sizes, strict=True) if size > 1]
    rest = [name for name in ORDER if name not in cut]
    return [(*each, *rest) for each in permutations(cut) if list(each) != cut]


FOUR = [case_of(sizes, order) for sizes in SIZES for order in distinct(sizes)]


@pytest.mark.prove
def test_four_ranks_in_other_orders(world):
    compare(world, lambda case: twin(case["tied"]), 4, FOUR[::2])


@pytest.mark.prove
@pytest.mark.parametrize("sizes", EIGHT[::3])
def test_eight_ranks_in_other_orders(world, sizes):
    some = [case_of(sizes, order) for order in distinct(sizes)]
    some += [dict(case, instances=2, zero=2) for case in some[:2] if case["dp"] * case["cp"] > 2]
    compare(world, lambda case: twin(case["tied"]), 8, some)


def run(world, size: int, sizes: tuple[int, ...], order: tuple[str, ...]) -> dict[tuple, dict]:
    """Train three steps; return what each place along the axes reports."""
    case = case_of(sizes, order, dtype="float32", lr=1e-2, clip=0.1)
    tp, cp, _, pp = sizes
    grids = [Grid(size, tp, cp, pp, Launch(rank, size), order=order) for rank in range(size)]
    places = [tuple(getattr(grid, name).rank for name in ORDER) for grid in grids]
    return dict(zip(places, world(size).run(run_layout, case, 3), strict=True))


def check_bits(world, size: int, sizes: tuple[int, ...], orders: list[tuple[str, ...]]) -> None:
    usual = run(world, size, sizes, ORDER)
    first = usual[0, 0, 0, 0]
    assert len(set(first["losses"])) == 3 and min(first["norms"]) > 0.1, "nothing was trained"
    for order in orders:
        if min(sizes[1:3]) > 1 and order.index("dp") < order.index("cp"):
            continue  # gradients are summed over dp and cp in another order
        got = run(world, size, sizes, order)
        assert got.keys() == usual.keys() and len(got) == size
        for place, told in got.items():
            for what in ("losses", "norms"):
                assert told[what] == usual[place][what] == first[what], (order, place)
            assert told["weights"].keys() == usual[place]["weights"].keys()
            assert same_bits(told["weights"], usual[place]["weights"]), (order, place)


def test_the_order_changes_no_bit(world):
    check_bits(world, 4, (2, 1, 1, 2), [("pp", "tp", "cp", "dp")])


@pytest.mark.prove
@pytest.mark.parametrize("sizes", [(1, 2, 4, 1), EIGHT[0]])
def test_no_order_changes_a_bit(world, sizes):
    orders = distinct(sizes)
    check_bits(world, 8, sizes, random.Random(8).sample(orders, min(4, len(orders))))
