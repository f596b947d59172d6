# SPDX-License-Identifier: Apache-2.0
"""Schedules equal the docstrings' tables and torch's own orders; impossible sizes are refused."""

from textwrap import dedent
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from mpu.pipeline import schedules
from mpu.pipeline.schedules import NAMES, Action, Schedule, build, forward_only, table
from mpu.pipeline.simulate import Costs, simulate

MAKERS = {
    "gpipe": (schedules.gpipe, 4, 4, 1),
    "1f1b": (schedules.one_f_one_b, 4, 4, 1),
    "interleaved": (schedules.interleaved, 2, 4, 2),
    "zb-h1": (schedules.zb_h1, 4, 4, 1),
    "zb-v": (schedules.zb_v, 2, 4, 2),
    "v-half": (schedules.v_half, 4, 3, 2),
}
ROWS = [f"{rank}  " for rank in range(4)]


@pytest.mark.parametrize("name", NAMES)
def test_the_table_in_the_docstring_is_the_schedule(name):
    maker, p, m, v = MAKERS[name]
    lines = [line for line in maker.__doc__.splitlines() if line.strip()[:3] in ROWS]
    assert dedent("\n".join(lines)) == table(build(name, p, m, v))


def test_more_than_two_chunks_are_lettered():
    assert table(build("interleaved", 1, 1, 3)) == "0   F0a F0b F0c B0c W0c B0b W0b B0a W0a"


def test_stages_go_round_the_ranks_or_down_and_back_up():
    looped, folded = build("interleaved", 2, 4, 3), build("zb-v", 3, 4, 2)
    assert [looped.place(s) for s in range(6)] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert [folded.place(s) for s in range(6)] == [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]
    for schedule in (looped, folded):
        assert all(schedule.stage(*schedule.place(s)) == s for s in range(schedule.stages))


@pytest.mark.parametrize("p, m", [(1, 1), (2, 3), (4, 2), (4, 9)])
def test_one_chunk_interleaved_is_1f1b(p, m):
    assert build("interleaved", p, m).ranks == build("1f1b", p, m).ranks


def test_evaluation_keeps_the_forwards_in_their_order():
    schedule = build("v-half", 3, 5, 2)
    only = forward_only(schedule)
    assert all(
        kept == tuple(a for a in rank if a.kind == "F")
        for kept, rank in zip(only.ranks, schedule.ranks, strict=True)
    )
    assert sum(map(len, only.ranks)) == 3 * 2 * 5


@pytest.mark.parametrize(
    "arguments, rule",
    [
        (("2f2b", 2, 4), "'2f2b' is not a schedule: the schedules are gpipe, 1f1b, interleaved"),
        (("1f1b", 0, 4), "pipeline size 0, micro-batches 4 and v 1 must be at least 1"),
        (("1f1b", 2, 4, 2), "1f1b has 1 virtual stages a rank, not 2"),
        (("zb-v", 2, 4, 1), "zb-v has 2 virtual stages a rank, not 1"),
        (("zb-v", 2, 4, 2, 4), r"zb-v has no micro-batch group size \(4\): only interleaved has"),
        (("interleaved", 2, 4, 1, 2), r"group size \(2\) needs v > 1 stages a rank"),
        (("interleaved", 4, 3, 2), "pipeline size <= micro-batch group size <= .*, not 4, 4, 3"),
        (("interleaved", 4, 8, 2, 9), "pipeline size <= micro-batch group size <= .*, not 4, 9, 8"),
        (("interleaved", 4, 6, 2), "groups of 4 leave a last group of 2, .* at least the pipeline"),
        (("interleaved", 4, 11, 8, 8), "groups of 8 leave a last group of 3, .* at least the pip"),
    ],
)
def test_sizes_that_break_a_rule_are_refused_with_it(arguments, rule):
    with pytest.raises(ValueError, match=rule):
        build(*arguments)


# ---- torch.distributed.pipelining as oracle ----


def torch_schedules():
    """Import it where it is needed: collecting tests is not to take a second more."""
    import torch.distributed.pipelining.schedules

    return torch.distributed.pipelining.schedules


def unpadded(operations, p):
    """Turn torch's list for one rank into ours: a whole backward is B and W."""
    actions = []
    for operation in operations:
        if operation is not None:
            kind, chunk = operation.computation_type.value, operation.stage_index // p
            for ours in {"F": "F", "I": "B", "W": "W", "B": "BW"}[kind]:
                actions.append(Action(ours, chunk, operation.microbatch_index))
    return tuple(actions)


def torch_orders(kind, p, m, v):
    """Ask a schedule class of torch for each rank's operations, without a process group."""
    asked = SimpleNamespace(
        pp_group_size=p, num_stages=p * v, n_local_stages=v, _n_microbatches=m, _num_stages=p * v
    )
    asked.number_of_rounds = max(1, m // p)
    asked.microbatches_per_round = m // asked.number_of_rounds
    calculate = getattr(torch_schedules(), kind)._calculate_single_rank_operations
    return tuple(unpadded(calculate(asked, r), p) for r in range(p))


def torch_steps(kind, p, m, r):
    """Run torch's single-stage schedule on a stage that writes down what it is told to do."""
    done = []
    stage = MagicMock(stage_index=r, is_first=r == 0, is_last=r == p - 1, has_backward=True)
    stage.forward_one_chunk.side_effect = lambda i, *_, **__: done.append(Action("F", 0, i))
    stage.backward_one_chunk.side_effect = lambda i, *_, **__: done.extend(
        [Action("B", 0, i), Action("W", 0, i)]
    )
    for operations in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops"):
        getattr(stage, operations).return_value = []
    stage.get_bwd_send_ops.return_value = []
    runner = MagicMock(_stage=stage, _n_microbatches=m, _num_stages=p, _has_backward=True)
    runner._check_inputs.return_value = ([()] * m, [{}] * m)
    getattr(torch_schedules(), kind)._step_microbatches(runner)
    return tuple(done)


@pytest.mark.parametrize("name, kind", [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")])
@pytest.mark.parametrize("p, m", [(1, 3), (2, 1), (2, 4), (4, 2), (4, 4), (4, 9)])
def test_gpipe_and_1f1b_are_torchs(name, kind, p, m):
    assert build(name, p, m).ranks == tuple(torch_steps(kind, p, m, r) for r in range(p))


def test_interleaved_is_torchs_wherever_both_take_the_sizes():
    """torch chooses the group size: m split into m // p rounds."""
    compared = 0
    for p in range(1, 7):
        for m in range(p, 4 * p + 1):
            rounds = m // p
            for v in (2, 3, 8) if m % rounds == 0 else ():
                ours = build("interleaved", p, m, v, group=m // rounds)
                assert ours.ranks == torch_orders("ScheduleInterleaved1F1B", p, m, v), (p, m, v)
                compared += 1
    assert compared > 100


def test_zb_v_is_torchs_and_no_worse_with_few_micro_batches():
    """Below 2p - 1 micro-batches torch leaves its W's where more micro-batches would want them."""
    better = 0
    for p in range(1, 9):
        for m in range(1, 3 * p + 1):
            ours = build("zb-v", p, m, 2)
            theirs = Schedule(
                "torch", torch_orders("ScheduleZBVZeroBubble", p, m, 2), m, 2, True, True
            )
            if m >= 2 * p - 1:
                assert ours.ranks == theirs.ranks, (p, m)
                continue
            for mine, its in zip(ours.ranks, theirs.ranks, strict=True):
                assert [a for a in mine if a.kind != "W"] == [a for a in its if a.kind != "W"]
            for b, w in ((1, 1), (1, 0.7), (1.2, 0.9), (2, 1)):
                costs = Costs([1] * 2 * p, [b] * 2 * p, [w] * 2 * p)
                mine, its = simulate(ours, costs), simulate(theirs, costs)
                assert mine.step <= its.step + 1e-9, (p, m, b, w)
                assert max(mine.peak) <= max(its.peak), (p, m)
                better += mine.step < its.step - 1e-9
    assert better > 50


@pytest.mark.parametrize("name", NAMES)
def test_what_is_said_of_a_schedule_by_name_is_so(name):
    schedule = build(name, 2, 2, schedules.CHUNKS[name])
    assert schedule.split == (name in schedules.SPLIT)
    assert schedule.v_shape == (name in schedules.V_SHAPED)
