# SPDX-License-Identifier: Apache-2.0
"""Time a whole step from sizes: stages by the clock, the pipeline by its simulation, the update."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from estimate.simulate import Costs, simulate
from mpu.pipeline import schedules
from tools.rehearsal.analytic import Writer, stage
from tools.rehearsal.analytic_sizes import Layout, Model, Recipe
from tools.rehearsal.clock import Clock
from tools.rehearsal.device_file import Device
from tools.rehearsal.links import collective_seconds, message_seconds
from tools.rehearsal.roofline import memory_seconds

FEW, MORE = 2, 4  # layers of the records from which a stage of any number of layers is told


@dataclass(frozen=True)
class Step:
    """seconds: of a step. parts: what they are made of: "pipeline", "gradients", "update"."""

    seconds: float
    parts: dict[str, float]


class StepClock:
    """Times steps of one model in one layout. cut: the layers of each stage, in stage order."""

    def __init__(
        self, model: Model, layout: Layout, recipe: Recipe, device: Device, cut: Sequence[int]
    ) -> None:
        self.model, self.layout, self.recipe = model, layout, recipe
        self.device, self.cut = device, cut
        self.layer_seconds: dict[tuple[str, bool, bool, int], float] = {}
        self.kernels: dict[tuple[object, ...], float] = {}

    def record_seconds(self, kind: str, first: bool, last: bool, layers: int) -> float:
        key = (kind, first, last, layers)
        if key not in self.layer_seconds:
            writer = Writer(self.model, self.layout, self.recipe)
            clock = Clock(self.device, trace=False)
            clock.seconds = self.kernels
            clock.run(list(stage(writer, kind, layers, first, last)))
            again = kind == "B" and self.layout.recompute == "full"
            more = layers * self.recipe.host_seconds * (1 + again)
            self.layer_seconds[key] = max([clock.host + more, *clock.free.values()])
        return self.layer_seconds[key]

    def stage_seconds(self, kind: str, number: int) -> float:
        """Return the seconds of F or B of a stage: a layer more costs the same each time."""
        layers, last = self.cut[number], number == len(self.cut) - 1
        first = number == 0
        if layers <= MORE:
            return self.record_seconds(kind, first, last, layers)
        few = self.record_seconds(kind, first, last, FEW)
        more = self.record_seconds(kind, first, last, MORE)
        return few + (layers - FEW) * (more - few) / (MORE - FEW)

    def parameters(self, rank: int) -> float:
        """Return the parameters of a pipeline rank."""
        model, t = self.model, self.layout.tp
        ends = 0.0
        own = self.own_stages(rank)
        if 0 in own:
            ends += model.vocab * model.hidden
        if len(self.cut) - 1 in own and not (model.tied and 0 in own):
            ends += model.vocab * model.hidden
        return (sum(self.cut[n] for n in own) * model.layer_parameters + ends) / t

    def own_stages(self, rank: int) -> list[int]:
        return [n for n in range(len(self.cut)) if self.schedule.place(n)[0] == rank]

    @cached_property
    def schedule(self) -> schedules.Schedule:
        layout = self.layout
        name = layout.schedule if layout.pp > 1 else "1f1b"
        return schedules.build(name, layout.pp, layout.micro_batches, layout.virtual)

    def message(self) -> float:
        """Return the seconds of an activation between stages, with its host waits."""
        layout, device = self.layout, self.device
        tokens = layout.micro_batch * self.model.sequence
        sent = 2 * tokens * self.model.hidden / (layout.tp if layout.sequence_parallel else 1)
        there = layout.tp * layout.dp
        waits = self.recipe.message_syncs * (
            message_seconds(device, 64, 0, there) + device["transfer_seconds"]
        )
        return message_seconds(device, sent, 0, there) + waits

    def gradients(self, rank: int, last_backward: float) -> float:
        """Return the exposed seconds of a rank's gradient sums and parameter gathers."""
        layout, recipe, device = self.layout, self.recipe, self.device
        group, numbers = layout.dp_group, self.parameters(rank)
        if len(group) == 1 or layout.zero == 3:
            return 0.0
        verb = "reduce_scatter" if layout.zero else "all_reduce"
        sums = collective_seconds(device, verb, numbers * recipe.gradient_bytes, group)
        parts = max(1, sum(self.cut[n] for n in self.own_stages(rank)))
        if recipe.overlap_gradients:
            sums = max(sums - last_backward * (parts - 1) / parts, sums / parts)
        sent = numbers * recipe.parameter_bytes / layout.dp
        gathers = collective_seconds(device, "all_gather", sent, group) if layout.zero else 0.0
        return sums + gathers

    def update(self, rank: int) -> float:
        layout, recipe, device = self.layout, self.recipe, self.device
        numbers = self.parameters(rank) / (layout.dp if layout.zero else 1)
        tensors = 8 * sum(self.cut[n] for n in self.own_stages(rank))
        launches = max(8.0, tensors * recipe.update_launches)
        return max(
            memory_seconds(device, numbers * recipe.update_bytes),
            launches * device["launch_seconds"],
        )

    def step(self) -> Step:
        layout = self.layout
        forward = [self.stage_seconds("F", n) for n in range(len(self.cut))]
        backward = [self.stage_seconds("B", n) for n in range(len(self.cut))]
        if layout.pp == 1:
            body = layout.micro_batches * (sum(forward) + sum(backward))
            ends = [body]
        else:
            half = [b / 2 for b in backward]
            if self.recipe.message_syncs:  # the host waits, and the device with it
                waits = self.message()
                forward = [f + waits for f in forward]
                half = [b + waits / 2 for b in half]
            costs = Costs(forward, half, half, self.message())
            timeline = simulate(self.schedule, costs).timeline
            ends = [spans[-1].end for spans in timeline.ranks]
        tails = []
        for rank, end in enumerate(ends):
            last = sum(backward[n] for n in self.own_stages(rank))
            tails.append((end, self.gradients(rank, last), self.update(rank)))
        end, gradients, update = max(tails, key=sum)
        parts = {"pipeline": end, "gradients": gradients, "update": update}
        return Step(sum(parts.values()), parts)


def even_cut(layers: int, stages: int) -> list[int]:
    """Return layers cut into stages, the first ones one longer where they do not divide."""
    return [layers // stages + (n < layers % stages) for n in range(stages)]
