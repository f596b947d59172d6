# SPDX-License-Identifier: Apache-2.0
"""model/qwen3.py equals the serial twin with QK-norm, in fp64, on every kind of layout."""

import functools
import itertools
import random

import pytest

from mpu.pipeline.schedules import CHUNKS
from tests.model import test_parity, test_pipeline_parity
from tests.model.test_zero_parity import BASE
from tests.model.twin import ROWS, SIZES, Twin, compare
from tests.sampling import sampled

FILE = "model/qwen3.py"


@functools.cache
def twin(tied: bool, layers: int, rows: int, masks: bool) -> tuple[Twin, float, float]:
    made = Twin(tied, layers, rows, FILE)
    (loss,), (norm,) = made.train(1, lr=0.0, clip=0.0, masks=masks)
    return made, loss, norm


def twin_of(case: dict) -> tuple[Twin, float, float]:
    layers = case.get("layers", SIZES["num_layers"])
    return twin(case["tied"], layers, case.get("rows", ROWS), case.get("masks", False))


def cases(world: int) -> list[dict]:
    """List tp, dp, recomputation and masks; ZeRO; and every schedule, that fill `world` ranks."""
    some = [c | {"masks": masks} for c in test_parity.cases(world) for masks in (False, True)]
    ways = itertools.product((1, 2, 4), range(4), (False, True))
    some += [
        BASE | dict(tp=tp, sp=tp > 1, dp=world // tp, zero=zero, tied=tied, gather=True)
        for tp, zero, tied in ways
        if 1 < world // tp <= 4  # a row a micro-batch, at least
    ]
    some += test_pipeline_parity.cases(world)
    return [case | {"file": FILE, "lr": 0.0, "clip": 0.0} for case in some]


@pytest.mark.parametrize("size", sampled([2, 4, 1], 3))
def test_a_sample_of_the_matrix(world, size):
    compare(world, twin_of, size, random.Random(size).sample(cases(size), 4))


@pytest.mark.prove
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_whole_matrix(world, size):
    compare(world, twin_of, size, cases(size))


def test_the_matrix_has_every_kind_of_layout():
    every = [case for size in (1, 2, 4, 8) for case in cases(size)]
    assert {case.get("schedule") for case in every} >= CHUNKS.keys()
    for key, values in {
        "tp": {1, 2, 4}, "pp": {2, 4}, "dp": {1, 2, 4}, "sp": {False, True}, "zero": {0, 1, 2, 3},
        "recompute": {None, "selective", "full"}, "tied": {False, True}, "masks": {False, True},
    }.items():  # fmt: skip
        assert values <= {case[key] for case in every if key in case}, key
    assert twin_of(every[0])[0].w.keys() >= {"model.layers.0.self_attn.q_norm.weight"}
