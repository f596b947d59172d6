# SPDX-License-Identifier: Apache-2.0
"""Write the record of a step from a model's sizes, and time it with the rehearsal's clock.

A published run of another program has no record. This module writes one by formulas: the kernels
and collectives that a rehearsal would record. They are timed by the clock, roofline, links and
pipeline simulation of the rehearsal, so that these models can be fitted (benchmarks/fit_device.py)
and checked (benchmarks/predict_published.py). A Recipe describes a program's work other than
matmuls.

T tokens of a micro-batch, h hidden, f ffn, t tp ranks, V vocabulary; [m, n, k] a matmul
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from forecast.device_file import Device
from forecast.rehearsal.clock import Clock
from forecast.rehearsal.events import Event, Launch, Transfer, Wait, Where
from forecast.rehearsal.links import collective_seconds, message_seconds
from forecast.rehearsal.roofline import Kernel, memory_seconds
from mpu.pipeline import schedules
from mpu.pipeline.simulate import Costs, simulate

NOWHERE = Where()
COMPUTE, TP_STREAM, DP_STREAM = 0, 1, 2
Shapes = tuple[tuple[int, ...], ...]
EMPTY = Launch(
    op="", stream=COMPUTE, shapes=(), dtype="", read=(), written=(), bytes=0, flops=0.0,
    where=NOWHERE,
)  # fmt: skip
SILENT = Transfer(
    id=0, verb="", axis="", group=(), peer=-1, number=0, bytes=0, sent=0, dtype="bfloat16",
    shape=(), stream=0, origin=COMPUTE, read=(), written=(), batch=-1, label="", where=NOWHERE,
    urgent=True,  # assumed: these programs set CUDA_DEVICE_MAX_CONNECTIONS=1, or wait for it
)  # fmt: skip
FEW, MORE = 2, 4  # layers of the records from which stages with more layers are extrapolated


@dataclass(frozen=True)
class Model:
    """Sizes of a transformer. gated: the MLP has a gate beside its first matmul."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    sequence: int
    gated: bool
    tied: bool = False

    @property
    def qkv(self) -> int:
        """Return the outputs of the fused QKV projection."""
        return self.hidden + 2 * self.kv_heads * (self.hidden // self.heads)

    @property
    def up(self) -> int:
        return self.ffn * (2 if self.gated else 1)

    @property
    def layer_parameters(self) -> int:
        return self.hidden * (self.qkv + self.hidden + self.up + self.ffn)


@dataclass(frozen=True)
class Layout:
    """The layout of a run: tp varies fastest, then dp, then pp. recompute: "none" or "full"."""

    tp: int
    dp: int
    pp: int
    micro_batch: int
    micro_batches: int
    zero: int = 0
    virtual: int = 1
    schedule: str = "1f1b"
    recompute: str = "none"
    sequence_parallel: bool = True
    dtype: str = "bfloat16"

    @property
    def tp_group(self) -> tuple[int, ...]:
        return tuple(range(self.tp))

    @property
    def dp_group(self) -> tuple[int, ...]:
        return tuple(range(0, self.tp * self.dp, self.tp))


class Passes(NamedTuple):
    """Kernels that only move memory: launches, and bytes per token.

    hidden: in units of 2 h bytes, for the rank's own tokens (T / t with sequence parallelism).
    inner: of 2 (h / t). ffn: of 2 (f / t). scores: of 2 (heads / t) sequence, for unfused
    attention.
    """

    launches: int
    hidden: float = 0.0
    inner: float = 0.0
    ffn: float = 0.0
    scores: float = 0.0


@dataclass(frozen=True)
class Recipe:
    """A framework's work other than matmuls, the same for all of its runs.

    attention: "flash", "cudnn" or "unfused". causal: fused attention skips masked blocks.
    logit_bytes: traffic per logit after its matmul, in forward and backward; logit_launches: in
    each of them. accumulate_bytes: per parameter and micro-batch, to add to the main gradient.
    update_bytes: per parameter, for clip and optimizer. update_launches: per weight tensor.
    gradient_bytes, parameter_bytes: per sent element. overlap_gradients: sums overlap the last
    backward. overlap_tp: a backward's reduce-scatter overlaps its weight gradient. message_syncs:
    host waits per message. host_seconds: per forward and per backward of a layer, in addition to
    launches. float8_bytes: of casts and transposes, per element of an operand.
    """

    name: str
    forward: Passes
    backward: Passes
    attention: str = "flash"
    causal: bool = True
    logit_bytes: tuple[float, float] = (24.0, 16.0)
    logit_launches: int = 20
    accumulate_bytes: float = 0.0
    update_bytes: float = 30.0
    update_launches: float = 1.0
    gradient_bytes: int = 4
    parameter_bytes: int = 2
    overlap_gradients: bool = True
    overlap_tp: bool = False
    message_syncs: int = 0
    host_seconds: float = 0.0
    float8_bytes: float = 0.0


@dataclass
class Writer:
    """Writes one rank's events of a micro-batch."""

    model: Model
    layout: Layout
    recipe: Recipe
    events: list[Event] = field(default_factory=list)
    transfers: int = 0

    @property
    def tokens(self) -> int:
        return self.layout.micro_batch * self.model.sequence

    @property
    def own_tokens(self) -> float:
        """Return the number of tokens in norms and residuals of this rank."""
        return self.tokens / (self.layout.tp if self.layout.sequence_parallel else 1)

    def matmul(self, m: int, n: int, k: int, batch: int = 1, low: bool = True) -> None:
        """Write a matmul. low: whether it may be in float8."""
        dtype = self.layout.dtype
        if dtype.startswith("float8"):
            if low:
                self.memory(2, (m * k + k * n) * self.recipe.float8_bytes)
            else:
                dtype = "bfloat16"
        lead = (batch,) if batch > 1 else ()
        shapes = ((*lead, m, k), (*lead, k, n), (*lead, m, n))
        moved = 2 * batch * (m * k + k * n + m * n)
        flops = 2.0 * batch * m * n * k
        op = "aten::bmm" if batch > 1 else "aten::mm"
        self.launch(op, dtype, moved, flops, shapes)

    def launch(self, op: str, dtype: str, moved: float, flops: float, shapes: Shapes = ()) -> None:
        kernel = EMPTY._replace(op=op, shapes=shapes, dtype=dtype, bytes=int(moved), flops=flops)
        self.events.append(kernel)

    def memory(self, launches: int, moved: float) -> None:
        for _ in range(launches):
            self.launch("pass", "bfloat16", moved / launches, 0.0)

    def passes(self, passes: Passes) -> None:
        model, t = self.model, self.layout.tp
        a_token = 2 * (passes.inner * model.hidden + passes.ffn * model.ffn) / t
        scores = 2 * passes.scores * model.heads / t * model.sequence
        moved = self.own_tokens * 2 * passes.hidden * model.hidden
        self.memory(passes.launches, moved + self.tokens * (a_token + scores))

    def transfer(self, verb: str, sent: float, axis: str = "tp", wait: bool = True) -> int:
        """Write a collective with `sent` bytes of input. wait: wait for it at once."""
        tp = axis == "tp"
        group = self.layout.tp_group if tp else self.layout.dp_group
        if len(group) == 1:
            return -1
        stream = TP_STREAM if tp else DP_STREAM
        leaves = sent * (len(group) - 1) * (1 if verb == "all_gather" else 1 / len(group))
        leaves *= 2 if verb == "all_reduce" else 1
        number = self.transfers = self.transfers + 1
        self.events.append(
            SILENT._replace(
                id=number, verb=verb, axis=axis, group=group, number=number, bytes=int(sent),
                sent=int(leaves), stream=stream,
            )
        )  # fmt: skip
        if wait:
            self.wait(number)
        return number

    def wait(self, transfer: int) -> None:
        if transfer >= 0:
            self.events.append(Wait(-1, COMPUTE, "", transfer))

    def attention(self, backward: bool) -> None:
        model, t = self.model, self.layout.tp
        heads, d, s = max(1, model.heads // t), model.hidden // model.heads, model.sequence
        b = self.layout.micro_batch
        if self.recipe.attention == "unfused":
            for _ in range(2 if backward else 1):
                self.matmul(s, s, d, b * heads, False)
                self.matmul(s, d, s, b * heads, False)
            return
        flops = 4.0 * b * heads * s * s * d * (0.5 if self.recipe.causal else 1.0)
        moved = 2 * b * s * d * (2 * heads + 2 * max(1, model.kv_heads // t))
        op = f"aten::_{self.recipe.attention}_attention{'_backward' if backward else ''}"
        if backward:
            flops, moved = 2.5 * flops, 2 * moved
        self.launch(op, "bfloat16", moved, flops)

    def enter(self) -> None:
        """Write the all-gather of a column-parallel matmul's input, with sequence parallelism."""
        if self.layout.sequence_parallel:
            self.transfer("all_gather", 2 * self.tokens * self.model.hidden / self.layout.tp)

    def leave(self) -> None:
        """Write the collective that sums the output of a row-parallel matmul."""
        whole = 2 * self.tokens * self.model.hidden
        self.transfer("reduce_scatter" if self.layout.sequence_parallel else "all_reduce", whole)

    def column_backward(self, out: int, inside: int) -> None:
        """Write dgrad, its sum, and wgrad of [tokens, inside] x [inside, out / t]."""
        t, whole = self.layout.tp, 2 * self.tokens * self.model.hidden
        gathered = -1
        if self.layout.sequence_parallel:  # gather the input again
            gathered = self.transfer("all_gather", whole / t, wait=not self.recipe.overlap_tp)
        self.matmul(self.tokens, inside, out // t)
        verb = "reduce_scatter" if self.layout.sequence_parallel else "all_reduce"
        summed = self.transfer(verb, whole, wait=not self.recipe.overlap_tp)
        self.wait(gathered)
        self.matmul(out // t, inside, self.tokens)
        self.wait(summed)
        self.accumulate(out // t * inside)

    def row_backward(self, out: int, inside: int) -> None:
        t = self.layout.tp
        if self.layout.sequence_parallel:
            self.transfer("all_gather", 2 * self.tokens * self.model.hidden / t)
        self.matmul(self.tokens, inside // t, out)
        self.matmul(out, inside // t, self.tokens)
        self.accumulate(out * inside // t)

    def accumulate(self, parameters: int) -> None:
        if self.recipe.accumulate_bytes:
            self.memory(1, parameters * self.recipe.accumulate_bytes)

    def layer_forward(self) -> None:
        """Write a layer's forward."""
        model, t, tokens = self.model, self.layout.tp, self.tokens
        h, f = model.hidden, model.ffn
        gathered = self.gather() if self.layout.zero == 3 else -1
        self.passes(self.recipe.forward)
        self.enter()
        self.matmul(tokens, model.qkv // t, h)
        self.attention(False)
        self.matmul(tokens, h, h // t)
        self.leave()
        self.enter()
        self.matmul(tokens, model.up // t, h)
        self.matmul(tokens, h, f // t)
        self.leave()
        self.wait(gathered)

    def layer_backward(self) -> None:
        model = self.model
        h, f = model.hidden, model.ffn
        full = self.layout.recompute == "full"
        gathered = self.gather() if self.layout.zero == 3 and not full else -1
        if full:
            self.layer_forward()
        self.passes(self.recipe.backward)
        self.row_backward(h, f)
        self.column_backward(model.up, h)
        self.row_backward(h, h)
        self.attention(True)
        self.column_backward(model.qkv, h)
        self.wait(gathered)
        if self.layout.zero == 3:
            sent = model.layer_parameters * self.recipe.gradient_bytes
            self.transfer("reduce_scatter", sent, "dp", wait=False)

    def gather(self) -> int:
        """Write the gather of the next layer's weights, which overlaps this layer."""
        sent = self.model.layer_parameters * self.recipe.parameter_bytes / self.layout.dp
        return self.transfer("all_gather", sent, "dp", wait=False)

    def head(self, backward: bool) -> None:
        """Write the output layer and the loss; the vocabulary is sharded over tp."""
        model, t, tokens, recipe = self.model, self.layout.tp, self.tokens, self.recipe
        own = model.vocab // t
        if not backward:
            self.enter()
            self.matmul(tokens, own, model.hidden, 1, False)
            self.memory(recipe.logit_launches, tokens * own * recipe.logit_bytes[0])
            for _ in range(3):
                self.transfer("all_reduce", 4 * tokens)
        else:
            self.memory(recipe.logit_launches, tokens * own * recipe.logit_bytes[1])
            self.matmul(tokens, model.hidden, own, 1, False)
            self.leave()
            self.matmul(own, model.hidden, tokens, 1, False)
            self.accumulate(own * model.hidden)

    def embedding(self, backward: bool) -> None:
        model, t = self.model, self.layout.tp
        self.memory(3, self.tokens * model.hidden * 8)
        if not backward:
            self.leave()
        else:
            self.accumulate(model.vocab // t * model.hidden)


def stage(writer: Writer, kind: str, layers: int, first: bool, last: bool) -> Iterator[Event]:
    """Yield the events of F or B of a stage with `layers` layers."""
    backward = kind == "B"
    if first and not backward:
        writer.embedding(False)
    if last and backward:
        writer.head(True)
    for _ in range(layers):
        if backward:
            writer.layer_backward()
        else:
            writer.layer_forward()
    if last and not backward:
        writer.head(False)
    if first and backward:
        writer.embedding(True)
    yield from writer.events


class StepClock:
    """Times steps of one model in one layout. cut: the layers of each stage, in stage order."""

    def __init__(
        self, model: Model, layout: Layout, recipe: Recipe, device: Device, cut: Sequence[int]
    ) -> None:
        self.model, self.layout, self.recipe = model, layout, recipe
        self.device, self.cut = device, cut
        self.layer_seconds: dict[tuple[str, bool, bool, int], float] = {}
        self.kernels: dict[tuple[object, ...], Kernel] = {}
        self.known: dict[tuple[object, ...], float] = {}  # transfers, and matmuls that overlap them

    def record_seconds(self, kind: str, first: bool, last: bool, layers: int) -> float:
        key = (kind, first, last, layers)
        if key not in self.layer_seconds:
            writer = Writer(self.model, self.layout, self.recipe)
            clock = Clock(self.device, trace=False)
            clock.alone, clock.seconds = self.kernels, self.known
            clock.run(list(stage(writer, kind, layers, first, last)))
            again = kind == "B" and self.layout.recompute == "full"
            more = layers * self.recipe.host_seconds * (1 + again)
            self.layer_seconds[key] = max([clock.host + more, *clock.free.values()])
        return self.layer_seconds[key]

    def stage_seconds(self, kind: str, number: int) -> float:
        """Return the seconds of F or B of a stage; they are linear in its layers."""
        layers, last = self.cut[number], number == len(self.cut) - 1
        first = number == 0
        if layers <= MORE:
            return self.record_seconds(kind, first, last, layers)
        few = self.record_seconds(kind, first, last, FEW)
        more = self.record_seconds(kind, first, last, MORE)
        return few + (layers - FEW) * (more - few) / (MORE - FEW)

    def parameters(self, rank: int) -> float:
        """Return the number of parameters of a pipeline rank."""
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
        """Return the seconds of an activation's message between stages, with its host waits."""
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

    def step(self) -> dict[str, float]:
        """Return the seconds of a step by their parts: "pipeline", "gradients", "update"."""
        layout = self.layout
        forward = [self.stage_seconds("F", n) for n in range(len(self.cut))]
        backward = [self.stage_seconds("B", n) for n in range(len(self.cut))]
        if layout.pp == 1:
            body = layout.micro_batches * (sum(forward) + sum(backward))
            ends = [body]
        else:
            half = [b / 2 for b in backward]
            if self.recipe.message_syncs:  # the host waits, and so does the device
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
        return {"pipeline": end, "gradients": gradients, "update": update}
