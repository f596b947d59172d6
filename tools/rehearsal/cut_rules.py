# SPDX-License-Identifier: Apache-2.0
"""Find outputs that forward uses and no gradient reaches: a part of the graph that is cut off.

What each torch.autograd.Function returns in a forward is noted, and where its storage lies. When
backward begins, autograd's graph is walked from where it begins. An output that a later operation
of the same forward reads, and to which no edge leads, gets no gradient: a `detach` is between.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from tools.rehearsal.events import Launch, Transfer
from tools.rehearsal.order import Finding
from tools.rehearsal.patches import Patches
from tools.rehearsal.record import Recorder


class Output(NamedTuple):
    """What a function returned: its number there. at: how many events there were then."""

    node: "weakref.ref[Any]"
    number: int
    storage: int
    name: str
    layer: str
    at: int
    lines: tuple[str, ...]


class Cuts:
    """The outputs whose backward is still to come."""

    def __init__(self, recorder: Recorder, patches: Patches) -> None:
        self.recorder = recorder
        self.outputs: list[Output] = []
        self.found: set[tuple[str, str, int]] = set()
        backward = torch.autograd.backward

        def begins(tensors: Any, *args: Any, **named: Any) -> Any:
            self.check(tensors)
            return backward(tensors, *args, **named)

        patches.replace(torch.autograd, "backward", begins)

    def note(self, made: type, given: Sequence[Any], out: Any) -> None:
        """Note what a function's forward returns that is not one of its inputs. An output without
        elements has no memory that tells it from another one, and is left out.
        """
        recorder = self.recorder
        if recorder.paused or not torch.is_grad_enabled():
            return
        layer = recorder.layers.running() if recorder.layers else ""
        taken = {self._storage(x) for x in given if isinstance(x, Tensor)}
        for x in out if isinstance(out, tuple) else (out,):
            made_here = isinstance(x, Tensor) and isinstance(x.grad_fn, BackwardCFunction)
            if made_here and x.numel():
                storage = self._storage(x)
                if storage >= 0 and storage not in taken:
                    node, at = weakref.ref(x.grad_fn), len(recorder.events)
                    one = x.output_nr, storage, made.__name__, layer, at, recorder.lines()
                    self.outputs.append(Output(node, *one))

    def _storage(self, x: Tensor) -> int:
        return self.recorder.live.get(id(x.untyped_storage()), (-1,))[0]

    def check(self, roots: Any) -> None:
        """Find the outputs that backward from some roots does not come to."""
        several = isinstance(roots, (list, tuple)) and not isinstance(roots, GradientEdge)
        edges = set[tuple[Any, int]]()
        for root in roots if several else (roots,):
            of_tensor = isinstance(root, Tensor)
            edges.add((root.grad_fn, root.output_nr) if of_tensor else (root.node, root.output_nr))
        todo: list[Any] = [node for node, _ in edges if node is not None]
        nodes = set(todo)
        while todo:
            for node, number in todo.pop().next_functions:
                if node is not None:
                    edges.add((node, number))
                    if node not in nodes:
                        nodes.add(node)
                        todo.append(node)
        later = []
        for one in self.outputs:
            node = one.node()
            if node not in nodes:
                later += [one] if node is not None else []  # of another micro-batch
            elif (node, one.number) not in edges:
                self._cut(one)
        self.outputs = later

    def _cut(self, one: Output) -> None:
        recorder, key = self.recorder, (one.name, one.layer, one.number)
        if key in self.found:
            return
        for index in range(one.at, len(recorder.events)):
            event = recorder.events[index]
            if isinstance(event, (Launch, Transfer)) and event.where.phase == "forward":
                if one.storage in event.read:
                    self.found.add(key)
                    what = f"{one.layer}: forward goes on with output {one.number} of {one.name}"
                    what += ", to which no gradient comes back: the graph is cut between the two"
                    lines = (*recorder.chains.get(index, ()), *one.lines)
                    where = event.where.place, what, (*one.lines, "")[0]
                    recorder.found.append(Finding("gradient", *where, lines))
                    return
