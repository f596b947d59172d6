# SPDX-License-Identifier: Apache-2.0
"""A function's backward does the conjugate of its forward's transfers; contiguity."""

from types import SimpleNamespace

import pytest
import torch

from forecast.rehearsal.conjugates import one_way
from forecast.rehearsal.events import Launch, Transfer, Where
from forecast.rehearsal.group import Distributed, Group
from forecast.rehearsal.places import end_of
from forecast.rehearsal.record import Recorder
from mpu.comm.mappings import _Pair


def transfer(verb, function, *, label="VocabParallelEmbedding: forward"):
    back = function.endswith(".backward")
    where = Where("backward" if back else "forward", "embedding", place="a.py:1", function=function)
    return Transfer(
        id=0, verb=verb, axis="tp", group=(0, 1), peer=-1, number=1, bytes=8, sent=8,
        dtype="bfloat16", shape=(4,), stream=1, origin=0, read=(), written=(), batch=-1,
        label=label, where=where,
    )  # fmt: skip


def found(*events):
    where = Where("backward", place="a.py:2", function="_Pair.backward")
    launch = Launch("aten::add", 0, (), "", (), (), 0, 0.0, where)
    recorder = SimpleNamespace(events=[*events, launch], chains={}, functions={"_Pair": _Pair})
    return [(one.place, one.also) for one in one_way(SimpleNamespace(recorder=recorder, first=0))]


@pytest.mark.parametrize(
    "there, back",
    [("all_gather", "reduce_scatter"), ("reduce_scatter", "all_gather"), ("all_to_all",) * 2],
)
def test_backward_does_the_conjugate_of_what_forward_does(there, back):
    one, other = transfer(there, "_Pair"), transfer(back, "_Pair.backward")
    assert found(one, other) == []
    assert found(one) == [(end_of(_Pair.backward), "a.py:1")]
    assert found(one, one, other) == [(end_of(_Pair.backward), "a.py:1")]
    assert found(transfer("all_reduce", "_Pair")) == []  # its conjugate is the identity
    assert found(one._replace(label="cross_entropy: forward")) == []  # sums, not activations


def test_a_tensor_that_is_not_contiguous_goes_into_no_collective():
    """torch's ProcessGroupNCCL refuses it; of a message it says a warning alone."""
    recorder, group = Recorder("cpu"), Group((0, 1), 0)
    network, x = Distributed(recorder, 0), torch.ones(4, 6).t()
    with pytest.raises(RuntimeError, match="must be contiguous"):
        network.all_reduce(x, group=group)
    network.all_reduce(x.contiguous(), group=group)
    network.isend(x.contiguous(), 1, group=group)
    assert recorder.found == []
    recorder.lines = lambda: ("mpu/comm/p2p.py:1",)
    network.isend(x, 1, group=group)
    assert [one.kind for one in recorder.found] == ["layout"]
