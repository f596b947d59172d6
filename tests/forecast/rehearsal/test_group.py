# SPDX-License-Identifier: Apache-2.0
"""What fake tensors and communicators let pass that a GPU, NCCL or autograd does not."""


import weakref

import pytest
import torch

from forecast.rehearsal.events import Transfer
from forecast.rehearsal.group import Communicator, Distributed, Group, KeptHandle
from forecast.rehearsal.patches import Patches
from forecast.rehearsal.record import Recorder
from forecast.rehearsal.watch import cast_by_autograd, scalars_are_single
from mpu.comm import collectives
from mpu.comm.meta import MetaTransport
from mpu.comm.transport import Axis


@pytest.mark.parametrize("kept", ["all", "some", "none"])
def test_a_handle_keeps_the_tensors_of_its_transfer(kept):
    recorder = Recorder("cpu")
    network, x, y = Distributed(recorder, 0), torch.ones(4), torch.ones(8)
    over = Communicator((0, 1), 1, "tp")
    work = network._start("all_gather", over, -1, (x,), (y,), x)
    keep = {"all": (x, y), "some": (y,), "none": ()}[kept]
    recorder.lines = lambda: ("mpu/comm/p2p.py:2", "model/llama.py:3")
    with KeptHandle(recorder, what="all_gather over tp") as handle:
        handle.work, handle.keep = work, keep
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


def test_a_recording_during_a_rehearsal_hears_its_own_ranks():
    network, axes = Distributed(Recorder("cpu"), 0), []
    network.answers = lambda data, axis: [data, b"of the rehearsal"]
    for carries in (
        MetaTransport(answers=lambda data, axis: [data, b"of the recording"]),
        collectives.ProcessGroupTransport(None),
    ):
        axes.append(Axis("pp", 0, 2, (0, 1), carries))
    with Patches() as patches:
        network.install(patches)
        told = [collectives.gather_bytes(b"own", axis) for axis in axes]
    assert told == [[b"own", b"of the recording"], [b"own", b"of the rehearsal"]]


def test_what_is_sent_lives_no_longer_for_the_trace():
    network, axis = Distributed(Recorder("cpu"), 0), Axis("tp", 0, 2, (0, 1))
    x = torch.ones(4)
    network.issued("all_gather", axis, x, 16, False, None)
    left = weakref.ref(x)
    del x
    assert left() is None


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
@pytest.mark.parametrize("rank", [0, 1])
def test_a_pipeline_of_one_micro_batch_has_no_finding(rehearse, rank):
    flags = f"--pipeline-model-parallel-size 2 --global-batch-size 1 --rehearse-rank {rank}"
    code, report, text = rehearse(flags, 2)
    assert (report["findings"], code) == ([], 0), text[-2000:]
