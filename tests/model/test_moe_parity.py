# SPDX-License-Identifier: Apache-2.0
"""A model with experts has its serial twin's loss, norm and gradients, on every layout.

Over three steps in `make prove`.

The twin loops over experts in plain torch. Some of its experts get no token of a micro-batch, some
one. Fresh memory is NaN while a layout runs, so a row that no product has written would show.
"""

import itertools
import random
from functools import cache
from typing import Any

import pytest
import torch

from tests.model.moe_twin import FILE, ROWS, SPARSE, ExpertTwin
from tests.model.twin import check, run_layout

BASE = dict(
    tp=1, cp=1, dp=1, pp=1, sp=True, recompute=None, tied=False, m=1, rows=ROWS, file=FILE,
    moe=SPARSE, layers=4, group=None,
)  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": SPARSE,
    "qwen3": SPARSE
    | dict(
        qk_layernorm=True,
        moe_router_pre_softmax=True,
        moe_router_topk=3,
        moe_layer_freq=(0, 1, 1, 1),
        moe_router_load_balancing_type=("seq_aux_loss", "aux_loss"),
        moe_aux_loss_coeff=(0.5, 0.2),
    ),
    "sigmoid, shared": SPARSE
    | dict(
        moe_router_score_function="sigmoid",
        moe_router_topk_scaling_factor=1.5,
        moe_shared_expert_intermediate_size=10,
        moe_router_load_balancing_type=("seq_aux_loss",),
        moe_z_loss_coeff=0.01,
    ),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "ep": (1, 2, 4, 8, 16),
    "tp": (1, 2),
    "cp": (1, 2),
    "dp": (1, 2, 4),
    "schedule": (None, "1f1b", "interleaved", "zb-h1", "zb-v"),
    "zero": (0, 1, 2, 3),
    "dispatch": ("allgather", "alltoall", "auto"),
    "recompute": (None, "selective", "full"),
    "kind": tuple(KINDS),
    "m": (1, 2),
    "tied": (False, True),
}
V_OF = {"interleaved": 2, "zb-v": 2}
Values = tuple[Any, ...]


def fits(values: Values, ranks: int) -> bool:
    case = dict(zip(FACTORS, values, strict=True))
    stage = case["tp"] * case["cp"] * case["dp"]
    pp = 2 if case["schedule"] else 1
    if stage * pp > ranks or stage % case["ep"] or (case["zero"] and stage == 1):
        return False
    return case["schedule"] != "interleaved" or case["m"] == 2


# at a rate of 1e-2 the twin's own gradients move by 1e-10 in five steps where the last bit of its
# first weights does: AdamW divides what is nearly 0 by its own size. At 1e-3 they move by 2e-14
STEPS = dict(lr=1e-3, clip=0.5)


def combined(values: Values) -> set[Any]:
    """Return the pairs of values in a case."""
    return {*itertools.combinations(zip(FACTORS, values, strict=True), 2)}


@cache
def covering(ranks: int) -> list[dict[str, Any]]:
    """Return cases in which each pair of values that some layout has is in one.

    Greedy and seeded: of some layouts that have a combination which is missing, the one that has
    most of the missing ones.
    """
    every = [v for v in itertools.product(*FACTORS.values()) if fits(v, ranks)]
    chance, chosen, covered = random.Random(11), list[Values](), set[Any]()
    at = {name: i for i, name in enumerate(FACTORS)}
    for names in itertools.combinations(FACTORS, 2):
        for values in itertools.product(*(FACTORS[name] for name in names)):
            wanted = tuple(zip(names, values, strict=True))
            if wanted in covered:
                continue
            some = [v for v in every if all(v[at[n]] == value for n, value in wanted)]
            if some:
                some = chance.sample(some, min(40, len(some)))
                chosen.append(max(some, key=lambda v: len(combined(v) - covered)))
                covered |= combined(chosen[-1])
    return [case_of(values) for values in chosen]


def case_of(values: Values) -> dict[str, Any]:
    case = dict(zip(FACTORS, values, strict=True))
    schedule = case.pop("schedule")
    made = BASE | case | {"moe": KINDS[case.pop("kind")]}
    made.pop("kind", None)
    if schedule is not None:
        made |= dict(pp=2, schedule=schedule, v=V_OF.get(schedule))
    return made | dict(sp=made["tp"] > 1)


def size_of(case: dict[str, Any]) -> int:
    return case["tp"] * case["cp"] * case["dp"] * case["pp"]


def run_cases(comm: Any, cases: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """Run cases, fresh memory being NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    try:
        return [run_layout(comm, case, steps) for case in cases]
    finally:
        torch.use_deterministic_algorithms(False)


def held(world: Any, cases: list[dict[str, Any]], steps: int = 1, within: float = 1e-12) -> None:
    """Hold cases against their twins, world by world: losses, norms, and the last gradients."""
    twins: dict[str, Any] = {}
    for size in sorted({size_of(case) for case in cases}):
        mine = [case for case in cases if size_of(case) == size]
        count = 32 // size if size < 16 else 1  # a world answers within its time-out
        for first in range(0, len(mine), count):
            some = mine[first : first + count]
            results = world(size).run(run_cases, some, steps)
            for i, case in enumerate(some):
                b = case["rows"] // (case["dp"] * case["m"])
                key = repr((case["moe"], b, *map(case.get, ("tied", "lr", "masks", "layers"))))
                if key not in twins:
                    twin = ExpertTwin(case["moe"], b, case["tied"], case["layers"])
                    told = twin.train(steps, case.get("lr", 0.0), case.get("clip", 0.0), case=case)
                    assert twin.margin > 1e-9, "a choice hangs on rounding"
                    twins[key] = twin, *told
                twin, losses, norms = twins[key]
                try:
                    check([r[i] for r in results], twin, losses[0], norms[0], within)
                    for result in results:
                        assert result[i]["losses"] == pytest.approx(losses, rel=within)
                        assert result[i]["norms"] == pytest.approx(norms, rel=within)
                except AssertionError as error:
                    raise AssertionError(f"{case}: {error}") from error


TESTED = [
    dict(dp=2, zero=1, m=2),
    dict(dp=2, ep=2, zero=3, kind="sigmoid, shared", m=2),
    dict(dp=2, ep=2, zero=2, kind="qwen3", dispatch="alltoall", recompute="full", tied=True),
    dict(tp=2, ep=2, kind="sigmoid, shared", dispatch="alltoall"),
    dict(cp=2, ep=2, zero=1, kind="qwen3", dispatch="auto", recompute="selective"),
    dict(schedule="zb-v", m=2, kind="qwen3", recompute="full"),
    dict(tp=2, dp=2, ep=4, zero=3, dispatch="alltoall", kind="qwen3"),
    dict(tp=2, dp=2, ep=2, zero=1, recompute="full", m=2),
    dict(tp=2, cp=2, ep=4, kind="sigmoid, shared"),
    dict(dp=2, schedule="zb-h1", ep=2, zero=3, dispatch="alltoall", m=2),
    dict(dp=2, schedule="interleaved", ep=2, zero=2, m=2, kind="qwen3", tied=True),
    dict(tp=2, schedule="1f1b", ep=2, m=2, kind="sigmoid, shared", recompute="selective"),
]
FIRST = {name: values[0] for name, values in FACTORS.items()}
SAMPLE = [case_of(tuple((FIRST | each).values())) for each in TESTED]


def shorter(case: dict[str, Any]) -> dict[str, Any]:
    """Return a case with two layers where no pipeline needs four."""
    if case["pp"] > 1:
        return case
    freq = {"moe_layer_freq": (0, 1)} if "moe_layer_freq" in case["moe"] else {}
    return case | dict(layers=2, moe=case["moe"] | freq)


def test_every_gradient_is_the_twins(world: Any) -> None:
    assert len(TESTED) == 12
    for name, values in FACTORS.items():
        seen = {each.get(name, values[0]) for each in TESTED}
        missing = {"ep": {8, 16}, "dp": {4}}.get(name, set())
        assert {*values} - seen == missing, name
    held(world, [shorter(case) for case in SAMPLE])


@pytest.mark.prove
@pytest.mark.parametrize("part", range(4))
def test_every_pair_of_choices_is_the_twins(world: Any, part: int) -> None:
    """On at most 8 ranks."""
    cases = covering(8)
    assert 20 < len(cases) <= 80 and max(map(size_of, cases)) == 8
    held(world, [case | STEPS for case in cases[part::4]], steps=3)


def test_the_twin_has_experts_of_no_and_of_one_token() -> None:
    """In a micro-batch; over the whole batch too."""
    twin = ExpertTwin(SPARSE, ROWS, layers=4)
    twin.train(1, 0.0, 0.0)
    counts = torch.stack(list(twin.counts.values()))
    assert (counts == 0).any() and (counts == 1).any(), counts
