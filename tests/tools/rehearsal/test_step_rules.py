# SPDX-License-Identifier: Apache-2.0
"""What a whole step must have, and what fake tensors let pass that a GPU or autograd does not."""

from types import SimpleNamespace

import pytest
import torch

from mpu.comm.transport import Axis
from mpu.pipeline.schedules import build
from mpu.zero.norm import GlobalNorm
from mpu.zero.reduce import sum_over_data, sum_over_extra_axes
from tools.rehearsal.events import Transfer, Where
from tools.rehearsal.group import Communicator, Distributed, Group
from tools.rehearsal.overlap_rules import answers
from tools.rehearsal.record import Recorder
from tools.rehearsal.step_rules import beginning, in_last_step
from tools.rehearsal.watch import cast_by_autograd, scalars_are_single

TP, DP = Axis("tp", 0, 2, (0, 1)), Axis("dp_cp", 0, 2, (0, 2))
ONE = Axis("dp_cp_replicate")


def transfer(axis, numbers, *, label="ParamAndGradBucket: grad sum", verb="all_reduce", number=1):
    return Transfer(
        id=0, verb=verb, axis=axis, group=(0, 1), peer=-1, number=number, bytes=4 * numbers,
        sent=0, dtype="float32", shape=(numbers,), stream=1, origin=0, read=(), written=(),
        batch=-1, label=label, where=Where(place="mpu/zero/bucket.py:1"),
    )  # fmt: skip


def step(*events, micro_batches=1, each=False, whole=()):
    """Return a rehearsed step of two buckets of 8 numbers, one of which is partial over tp.

    whole: the axes over which the model is cut, for numbers of the whole of it.
    """
    how = SimpleNamespace(shard=DP, replicate=ONE, zero_stage=2)
    buckets = [SimpleNamespace(length=8, reduce_axes=axes, reduction=how) for axes in ((TP,), ())]
    recorder = SimpleNamespace(device="cuda", chains={}, events=list(events))
    run = SimpleNamespace(sink=SimpleNamespace(buckets=buckets, each=each))
    grid = SimpleNamespace(tp=TP if "tp" in whole else ONE, pp=ONE, dp_cp=ONE)
    return SimpleNamespace(
        recorder=recorder, run=run, begin=0, first=0, failure=None, micro_batches=micro_batches,
        grid=grid,
    )  # fmt: skip


def found(seen):
    return [(one.kind, one.place) for one in in_last_step(seen)]


def test_every_gradient_is_summed_over_every_axis():
    whole = [transfer("tp", 8), transfer("dp_cp", 8), transfer("dp_cp", 8)]
    assert found(step(*whole)) == []
    assert found(step(*whole[1:])) == [("sum", beginning(sum_over_extra_axes))]
    assert found(step(*whole[:2])) == [("sum", beginning(sum_over_data))]
    other = transfer("dp_cp", 8, label="optimizer: norm")
    assert found(step(*whole[:2], other)) == [("sum", beginning(sum_over_data))]


def test_a_bucket_that_leaves_each_micro_batch_is_summed_each_time():
    whole = [transfer("tp", 8), *[transfer("dp_cp", 8)] * 3]  # the one over tp too leaves once
    assert found(step(*whole, micro_batches=2, each=True)) == []
    assert found(step(*whole[:-1], micro_batches=2, each=True))[0][0] == "sum"


def test_a_collective_neither_begins_a_communicator_in_a_step_nor_uses_the_messages_axis():
    whole = [transfer("tp", 8), transfer("dp_cp", 16)]
    place = "mpu/zero/bucket.py:1"
    assert found(step(*whole, transfer("pp", 1, number=0))) == [("communicator", place)]
    assert found(step(*whole, transfer("pp", 1, number=0, verb="send"))) == []
    assert found(step(*whole, transfer("pp_back", 1))) == [("axis", place)]


def test_the_norm_is_summed_over_the_axes_that_cut_the_model():
    sums = [transfer("tp", 8), transfer("dp_cp", 16)]
    norm = transfer("tp", 1, label="optimizer: norm", verb="all_gather")
    assert found(step(*sums, norm, whole=("tp",))) == []
    elsewhere = norm._replace(axis="dp_cp")
    assert found(step(*sums, elsewhere, whole=("tp",))) == [("sum", "mpu/zero/bucket.py:1")]
    assert found(step(*sums, whole=("tp",))) == [("sum", beginning(GlobalNorm.__call__))]


@pytest.mark.parametrize("kept", ["all", "some", "none"])
def test_a_handle_keeps_the_tensors_of_its_transfer(kept):
    recorder = Recorder("cpu")
    network, x, y = Distributed(recorder, 0), torch.ones(4), torch.ones(8)
    over = Communicator((0, 1), 1, "tp")
    work = network._start("all_gather", over, -1, (x,), (y,), x)
    keep = {"all": (x, y), "some": (y,), "none": ()}[kept]
    recorder.lines = lambda: ("mpu/comm/transport.py:1", "mpu/comm/p2p.py:2", "model/llama.py:3")
    network.handle(work, keep, what="all_gather over tp")
    places = [] if kept == "all" else ["mpu/comm/p2p.py:2"]
    assert [(one.kind, one.place) for one in recorder.found] == [("keep", p) for p in places]


def test_an_uneven_all_to_all_sends_the_rows_for_others():
    recorder = Recorder("cpu")
    network, group = Distributed(recorder, 1), Group((0, 1, 2), 0)
    x, y = torch.ones(6, 2), torch.ones(3, 2)
    network.all_to_all_single(y, x, [1, 0, 2], [3, 1, 2], group=group, async_op=True)
    network.all_to_all_single(torch.ones(6, 2), x, group=group, async_op=True)
    sent = [(e.verb, e.bytes, e.sent) for e in recorder.events if isinstance(e, Transfer)]
    assert sent == [("all_to_all", 48, 5 * 8), ("all_to_all", 48, 32)]


class Widens(torch.autograd.Function):
    @staticmethod
    def forward(saved_ctx, x, dtype):
        saved_ctx.dtype = dtype
        return x * 2

    @staticmethod
    def backward(saved_ctx, dy):
        return dy.to(saved_ctx.dtype), None  # this line is named


@pytest.mark.parametrize("dtype, count", [(torch.float32, 1), (torch.bfloat16, 0)])
def test_a_gradient_that_autograd_casts_is_found_where_backward_returns_it(dtype, count):
    from torch.utils._python_dispatch import TorchDispatchMode

    casts = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._to_copy.default:
                casts.extend(cast_by_autograd(""))
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    y = Widens.apply(x, dtype)
    with Mode():
        y.sum().backward()
    lines = open(__file__).read().splitlines()
    at = next(i for i, line in enumerate(lines, 1) if "# this line is named" in line)
    assert {one.place.rpartition(":")[2] for one in casts} == ({str(at)} if count else set())
    assert cast_by_autograd("mpu/layers/fused.py:1") == []


def test_fused_adamw_takes_its_scalars_in_fp32():
    one = torch.ones(())
    scalars_are_single({"grad_scale": one, "found_inf": None})
    with pytest.raises(RuntimeError, match="found torch.float64 \\(found_inf\\)"):
        scalars_are_single({"grad_scale": one, "found_inf": one.double()})


@pytest.mark.prove
def test_the_batches_of_micro_batches_that_are_copied_are_not_unread(rehearse):
    """Of eight micro-batches four run, and the copies of the third name its own batch."""
    found = rehearse("--global-batch-size 8")
    assert (found.code, found.report["findings"]) == (0, []), found.text


@pytest.mark.parametrize(
    "name, p, micro_batches, expected",
    [
        ("1f1b", 4, 1, [1, 2, 2, 1]),  # one micro-batch: each answers what the rank has just sent
        ("zb-h1", 4, 1, [1, 2, 2, 1]),
        ("1f1b", 4, 8, [0, 1, 1, 1]),  # of many the first alone, for which a rank has nothing to do
        ("gpipe", 2, 4, [1, 1]),
    ],
)
def test_messages_that_nothing_can_hide(name, p, micro_batches, expected):
    schedule = build(name, p, micro_batches)
    assert [answers(schedule, rank) for rank in range(p)] == expected


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.prove), 1])
def test_a_pipeline_of_one_micro_batch_has_no_finding(rehearse, rank):
    flags = f"--pipeline-model-parallel-size 2 --global-batch-size 1 --rehearse-rank {rank}"
    code, report, text = rehearse(flags, 2)
    assert (report["findings"], code) == ([], 0), text[-2000:]
