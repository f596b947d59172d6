# SPDX-License-Identifier: Apache-2.0
"""--overlap-moe-expert-parallel-comm: the forward of a micro-batch beside the backward of another.

No bit depends on it, and what two micro-batches send and launch is in turns.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pretrain_llama
from mpu.pipeline.schedules import build
from mpu.pipeline.simulate import Costs, simulate
from tests.model.test_moe_layouts import run_cases
from tests.model.test_moe_parity import BASE, KINDS, held
from tests.model.twin import config_of, grid_of, micro_batches, same_bits
from tests.mpu.pipeline.valid_schedule import validate
from training.faults.monitor import FailureMonitor

RUN = BASE | dict(
    layers=4, lr=1e-2, clip=0.5, sp=False, ep=2, dispatch="alltoall", dp=2, m=4,
    dtype="float32",
)
VIRTUAL = dict(pp=2, schedule="interleaved", v=2)
WAYS = [
    dict(zero=0, moe=KINDS["sigmoid, shared"]),
    dict(zero=2, recompute="full", moe=KINDS["qwen3"], dtype="bfloat16"),
]
PIPES = [
    VIRTUAL | dict(zero=3, gather=True, moe=KINDS["sigmoid, shared"], dtype="bfloat16"),
    VIRTUAL | dict(zero=1, recompute="full", tied=True, defer=True),
    dict(pp=2, schedule="1f1b", zero=2, moe=KINDS["qwen3"]),
    dict(pp=2, schedule="1f1b", m=1, tp=2, dp=1, sp=True),
]


def no_bit_depends_on_it(world: Any, size: int, ways: list[dict[str, Any]]) -> None:
    cases = [RUN | way | dict(beside=beside) for way in ways for beside in (False, True)]
    for ranks in world(size).run(run_cases, cases, 2):
        for plain, beside, way in zip(ranks[::2], ranks[1::2], ways, strict=True):
            assert beside["losses"] == plain["losses"], way
            assert beside["norms"] == plain["norms"], way
            assert same_bits(beside["weights"], plain["weights"]), way


@pytest.mark.prove
@pytest.mark.parametrize("way", WAYS[:2])
def test_no_bit_depends_on_it_on_one_stage(world: Any, way: dict[str, Any]) -> None:
    no_bit_depends_on_it(world, 2, [way])


@pytest.mark.prove
def test_no_bit_depends_on_it_in_a_pipeline(world: Any) -> None:
    no_bit_depends_on_it(world, 4, PIPES)


@pytest.mark.prove
def test_every_gradient_is_the_twins(world: Any) -> None:
    cases = [RUN | dict(dtype="float64", lr=1e-3, beside=True) | way for way in (
        WAYS[0], VIRTUAL | dict(zero=3), dict(dp=4, ep=4, m=2, recompute="full"),
        dict(tp=2, sp=True, ep=4, m=2, tied=True))]  # fmt: skip
    held(world, [case | {"dtype": "float64"} for case in cases], steps=2)


class Noted:
    """A trace that notes who starts and who waits for an exchange: a forward or a backward."""

    def __init__(self) -> None:
        self.events: list[tuple[str, bool]] = []

    def issued(self, verb: str, axis: Any, *rest: Any) -> Any:
        if axis.name != "ep" or verb != "all_to_all":
            return None
        forward = rest[-1].phase == "forward"
        self.events.append(("start", forward))
        return SimpleNamespace(
            waiting=lambda: self.events.append(("wait", forward)), waited=lambda: None
        )


def exchanges(comm: Any, case: dict[str, Any]) -> list[tuple[str, bool]]:
    config = config_of(case)
    grid = grid_of(comm, config)
    trace = Noted()
    grid.traced(trace)
    try:
        run = pretrain_llama.build(config, grid, torch.device("cpu"), FailureMonitor())
        pretrain_llama.train_step(run, micro_batches(case, grid.dp.rank), 0.0)
    finally:
        grid.traced(None)
    return trace.events


def test_one_computes_while_the_others_rows_are_on_their_way(world: Any) -> None:
    """Each exchange of the pair but the last is waited for after one of the other has started."""
    found = world(2).run(exchanges, RUN | dict(layers=2, m=2, beside=True))
    assert found[0] == found[1], "the ranks send in one order"
    events = found[0]
    each = 2 * 4  # of one micro-batch and direction: F, F with B, B
    pair = events[each:-each]
    assert len(events) == 4 * each and all(forward for _, forward in events[:each])
    assert not any(forward for _, forward in events[-each:])
    assert [what for what, forward in pair if forward] == ["start", "wait"] * 4  # 2 layers
    under_way = 0
    for what, _ in pair:
        under_way += 1 if what == "start" else -1
        assert 0 <= under_way <= 2
    both = [n for n in range(1, len(pair)) if pair[n] == pair[n - 1]]
    assert not both, "two of one micro-batch follow each other"


def test_every_overlapping_schedule_is_valid_and_as_fast() -> None:
    for name, p, v, m in (("1f1b", 1, 1, 5), ("1f1b", 4, 1, 16), ("interleaved", 4, 2, 16),
                          ("1f1b", 3, 1, 2), ("interleaved", 2, 3, 8)):  # fmt: skip
        pairs, plain = build(name, p, m, v, overlaps=True), build(name, p, m, v)
        validate(pairs)
        even = [1.0] * pairs.stages
        costs = Costs(even, even, even)
        assert simulate(pairs, costs).step == simulate(plain, costs).step
        assert [*map(sorted, pairs.ranks)] == [*map(sorted, plain.ranks)]
    with pytest.raises(ValueError, match="zb-v cannot overlap a forward with a backward"):
        build("zb-v", 2, 4, 2, overlaps=True)
