# SPDX-License-Identifier: Apache-2.0
"""Write the record of a transformer's layers from its sizes alone, and time a step with it.

The kernels and collectives are those that a rehearsal counts, by formula: no model is built. They
run through the same clock, roofline, links and pipeline simulation. A Recipe says what a framework
does around the matmuls, so that runs of other frameworks can be predicted too.

T tokens of a micro-batch, h hidden, f ffn, t tp ranks, V vocabulary; [m, n, k] a matmul
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from tools.rehearsal.analytic_sizes import Layout, Model, Passes, Recipe
from tools.rehearsal.events import Event, Launch, Transfer, Wait, Where

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
)  # fmt: skip


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
        """Return the tokens that norms and residuals of this rank see."""
        return self.tokens / (self.layout.tp if self.layout.sequence_parallel else 1)

    def matmul(self, m: int, n: int, k: int, batch: int = 1, low: bool = True) -> None:
        """Write a matmul; low: it may be in float8."""
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
        """Write a collective of so many bytes of input; wait: nothing runs beside it."""
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

    def enter(self, backward: bool = False) -> None:
        """Write what makes the input of a column-parallel matmul whole, or sums its gradient."""
        whole = 2 * self.tokens * self.model.hidden
        if self.layout.sequence_parallel:
            self.transfer("all_gather", whole / self.layout.tp)
        elif backward:
            self.transfer("all_reduce", whole)

    def leave(self) -> None:
        """Write what sums the output of a row-parallel matmul."""
        whole = 2 * self.tokens * self.model.hidden
        self.transfer("reduce_scatter" if self.layout.sequence_parallel else "all_reduce", whole)

    def column_backward(self, out: int, inside: int) -> None:
        """Write dgrad, its sum and wgrad of [tokens, inside] x [inside, out / t]."""
        t, whole = self.layout.tp, 2 * self.tokens * self.model.hidden
        gathered = -1
        if self.layout.sequence_parallel:  # the input again
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

    def layer_forward(self, again: bool = False) -> None:
        """Write a layer's forward; again: recomputed in backward."""
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
            self.layer_forward(True)
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
        """Write the gather of the next layer's weights, which runs under this one."""
        sent = self.model.layer_parameters * self.recipe.parameter_bytes / self.layout.dp
        return self.transfer("all_gather", sent, "dp", wait=False)

    def head(self, backward: bool) -> None:
        """Write the output layer and the loss; the vocabulary is cut over tp."""
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
    """Yield the events of F or B of a stage with so many layers."""
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
