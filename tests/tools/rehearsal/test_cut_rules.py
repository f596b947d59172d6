# SPDX-License-Identifier: Apache-2.0
"""A part of autograd's graph that a forward goes on without, in made-up functions."""

import pytest
import torch

from tools.rehearsal.cut_rules import Cuts
from tools.rehearsal.events import Launch, Where
from tools.rehearsal.patches import Patches
from tools.rehearsal.record import Recorder


class Splits(torch.autograd.Function):
    """Two outputs, both of which the forward may go on with."""

    @staticmethod
    def forward(saved_ctx, x):
        saved_ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(saved_ctx, first, second):
        return first if second is None else second


def of_forward(uses, reads=(0, 1), taken=None, size=4):
    """Return what is found where forward reads outputs and `uses` makes the loss of the two."""
    recorder = Recorder("cpu")
    with Patches() as patches:
        cuts = Cuts(recorder, patches)
        x = torch.ones(size, requires_grad=True)
        pair = Splits.apply(x)
        numbers = [recorder.number(each) for each in pair]
        cuts.note(Splits, (x,) if taken is None else (pair[taken],), pair)
        for i in reads:
            where = Where("forward", "layers.0", place=f"model/llama.py:{i}")
            recorder.events.append(
                Launch("aten::mm", 0, (), "float32", (numbers[i],), (), 0, 1.0, where)
            )
        torch.autograd.backward(uses(*pair))
        assert cuts.outputs == []
    assert torch.autograd.backward.__module__ == "torch.autograd"
    return [(one.kind, one.place) for one in recorder.found]


def test_an_output_that_forward_reads_and_backward_does_not_come_to_is_found():
    assert of_forward(lambda a, b: (a + b).sum()) == []
    cut = [("gradient", "model/llama.py:1")]
    assert of_forward(lambda a, b: (a + b.detach()).sum()) == cut
    assert of_forward(lambda a, b: [a.sum()]) == cut


def test_what_nothing_reads_or_what_was_given_is_not_cut():
    """The last norm of a model returns its stream, too, with which nothing goes on."""
    assert of_forward(lambda a, b: a.sum(), reads=(0,)) == []
    assert of_forward(lambda a, b: a.sum(), taken=1) == []


def test_an_output_without_elements_is_not_cut():
    """Experts that got no token: nothing is lost where no gradient comes."""
    assert of_forward(lambda a, b: (a + b.detach()).sum(), size=0) == []


def test_a_graph_of_another_micro_batch_waits_for_its_own_backward():
    recorder = Recorder("cpu")
    with Patches() as patches:
        cuts = Cuts(recorder, patches)
        x = torch.ones(4, requires_grad=True)
        pairs = [Splits.apply(x), Splits.apply(x)]
        for pair in pairs:
            numbers = [recorder.number(each) for each in pair]
            cuts.note(Splits, (x,), pair)
            where = Where("forward", place="model/llama.py:1")
            recorder.events.append(Launch("aten::mm", 0, (), "", tuple(numbers), (), 0, 1.0, where))
        torch.autograd.backward(sum(pairs[1]).sum())
        assert len(cuts.outputs) == 2 and recorder.found == []
        torch.autograd.backward(pairs[0][0].sum())
    assert [one.kind for one in recorder.found] == ["gradient"]


@pytest.mark.parametrize("edge", [True, False])
def test_backward_may_begin_at_an_edge(edge):
    begin = torch.autograd.graph.get_gradient_edge if edge else (lambda x: x)
    assert of_forward(lambda a, b: (begin((a + b).sum()),)) == []
    assert of_forward(lambda a, b: (begin(a.sum()),)) != []
