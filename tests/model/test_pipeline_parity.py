# SPDX-License-Identifier: Apache-2.0
"""The pipeline equals the serial twin (twin.py) in fp64, and its schedules agree bit for bit."""

import functools
import itertools
import random

import pytest

from mpu.pipeline import engine
from mpu.pipeline.schedules import CHUNKS, build
from tests.model.twin import Twin, compare, run_layout, same_bits
from tests.sampling import sampled

LAYERS = 9  # over up to 8 stages: some hold one, some two


def case_of(schedule: str, pp: int, m: int, tp: int, dp: int, tied: bool, **more) -> dict:
    return dict(
        schedule=schedule, pp=pp, v=CHUNKS[schedule], m=m, tp=tp, dp=dp, sp=tp > 1, tied=tied,
        recompute=None, layers=LAYERS, rows=2 * m * dp,
    ) | more  # fmt: skip


def admitted(case: dict) -> bool:
    try:
        build(case["schedule"], case["pp"], case["m"], case["v"])
    except ValueError:
        return False
    return True


def cases(world: int) -> list[dict]:
    """List every case that fills `world` ranks."""
    every = itertools.product(CHUNKS, (2, 4), range(1, 10), (1, 2), (1, 2), (False, True))
    made = [case_of(*values) for values in every]
    return [c for c in made if c["pp"] * c["tp"] * c["dp"] == world and admitted(c)]


@functools.cache
def twin(tied: bool, rows: int, masks: bool) -> tuple[Twin, float, float]:
    made = Twin(tied, LAYERS, rows)
    (loss,), (norm,) = made.train(1, lr=0.0, clip=0.0, masks=masks)
    return made, loss, norm


def twin_of(case: dict) -> tuple[Twin, float, float]:
    return twin(case["tied"], case["rows"], case.get("masks", False))


@pytest.mark.parametrize("size", sampled([4, 2], 2))
def test_a_sample_of_the_matrix(world, size):
    compare(world, twin_of, size, random.Random(size).sample(cases(size), 3))


@pytest.mark.prove
@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_whole_matrix(world, size):
    compare(world, twin_of, size, cases(size))


def test_the_matrix_has_all_six_schedules_everywhere():
    for size in (2, 4, 8):
        assert {c["schedule"] for c in cases(size)} == CHUNKS.keys()
    assert sum(len(cases(size)) for size in (2, 4, 8)) > 500


IN_CI = ("zb-v",)


@pytest.mark.parametrize(
    "schedule", [pytest.param(c, marks=[] if c in IN_CI else pytest.mark.prove) for c in CHUNKS]
)
def test_masks_recomputation_and_odd_layouts(world, schedule):
    """Document masks and uneven loss masks; recomputed blocks; stages without any layer."""
    some = [
        case_of(schedule, 2, 4, 1, 1, True, masks=True),
        case_of(schedule, 2, 2, 1, 1, False, masks=True, recompute="selective"),
        case_of(schedule, 2, 4, 1, 1, True, recompute="full"),
    ]
    layout = "E|t*9L" if CHUNKS[schedule] == 1 else "Ett||t*7|L"
    some.append(case_of(schedule, 2, 2, 1, 1, True, layout=layout))
    compare(world, twin_of, 2, some)


@pytest.mark.parametrize("schedule", sampled(["zb-v", "zb-h1", "v-half"], 3))
def test_deferred_weight_gradients_under_sequence_parallelism(world, schedule):
    """What waits for W are shards, gathered again; recomputed blocks; four ranks."""
    some = [
        case_of(schedule, 2, 3, 2, 1, True, recompute=kind, masks=kind == "full")
        for kind in ("selective", "full")
    ]
    compare(world, twin_of, 4, some)


def bits(world, size: int, case: dict) -> tuple[list, list, dict]:
    """Return losses, norms and all weights after three steps, which every rank agrees on."""
    weights: dict = {}
    results = world(size).run(run_layout, case, 3)
    for result in results:
        assert result["losses"] == results[0]["losses"] and result["norms"] == results[0]["norms"]
        assert same_bits(weights, result["weights"])
        weights |= result["weights"]
    return results[0]["losses"], results[0]["norms"], weights


@pytest.mark.parametrize(
    "sizes, tied, dtype",
    sampled(
        [((4,), False, "float32")]
        + [((2, 4), tied, dtype) for tied in (False, True) for dtype in ("bfloat16", "float32")],
        5,
    ),
)
def test_every_schedule_and_every_pipeline_gives_the_same_bits(world, sizes, tied, dtype):
    """One rank or several, whatever the schedule: losses, norms and weights to the last bit."""
    more = dict(dtype=dtype, lr=1e-2, clip=0.1, rows=8)
    one = case_of("1f1b", 1, 4, 1, 1, tied) | more
    losses, norms, weights = bits(world, 1, one)
    assert len(set(losses)) == 3 and min(norms) > 0.1, "nothing was trained or clipped"
    for schedule, pp in itertools.product(CHUNKS, sizes):
        got = bits(world, pp, one | {"schedule": schedule, "pp": pp, "v": CHUNKS[schedule]})
        assert got[:2] == (losses, norms), (schedule, pp)
        assert same_bits(weights, got[2]) and weights.keys() <= got[2].keys(), (schedule, pp)
        if tied and "head.weight" in got[2]:
            assert (got[2]["head.weight"] == weights["embedding.weight"]).all()


@pytest.mark.prove
def test_the_order_of_groups_and_data_parallelism_change_no_bit(world):
    """Interleaved with other group sizes; ZB-V against V-Half with tied ends on one rank, dp 2."""
    base = dict(dtype="float32", lr=1e-2, clip=0.1, rows=16)
    pairs = [
        [case_of("interleaved", 2, 4, 1, 2, True) | base | {"group": g} for g in (2, 4)],
        [case_of(s, 2, 4, 1, 2, True) | base for s in ("zb-v", "v-half")],
    ]
    for one, other in pairs:
        a, b = bits(world, 4, one), bits(world, 4, other)
        assert a[:2] == b[:2] and same_bits(a[2], b[2]) and a[2].keys() == b[2].keys()


SHARDED = [(1, {"zero": zero, "gather": zero == 3}) for zero in range(4)]  # over dp 2
DEFERRED = [
    case_of(schedule, 2, 4, tp, 2 // tp, tied, recompute=recompute, **more)
    for schedule in ("gpipe", "1f1b", "interleaved")
    for tied in (False, True)
    for recompute in (None, "full")
    for tp, more in ((2, {"sp": True}), (2, {"sp": False}), *SHARDED)
]
SOME = [  # schedule, tied, recompute, sp, zero
    ("interleaved", False, "full", False, 3),
]


def told(case: dict) -> tuple:
    return tuple(case.get(key) for key in ("schedule", "tied", "recompute", "sp", "zero"))


def alike(comm, case: dict) -> None:
    """Hold on one rank that deferring the output layer's gradients changes no bit of a run."""
    case = case | dict(dtype="float32", lr=1e-2, clip=0.1)
    at_once, run, counts = run_layout(comm, case, 2), engine.run_deferred, []
    engine.run_deferred = lambda works: (counts.append(len(works)), run(works))
    try:
        waiting = run_layout(comm, case | {"defer": True}, 2)
    finally:
        engine.run_deferred = run
    on_last = "head.weight" in waiting["weights"]
    assert counts == [1] * (2 * case["m"] * on_last), "one for each micro-batch waits"
    for key in ("losses", "norms"):
        assert at_once[key] == waiting[key] and len(set(waiting[key])) == 2
    assert at_once["weights"].keys() == waiting["weights"].keys()
    assert same_bits(at_once["weights"], waiting["weights"])


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[] if told(c) in SOME else pytest.mark.prove) for c in DEFERRED],
    ids=lambda case: "-".join(map(str, told(case))),
)
def test_the_output_layers_gradients_wait_and_change_no_bit(world, case):
    world(4).run(alike, case)
