# SPDX-License-Identifier: Apache-2.0
"""Time a step on a host's cores: each rank's work, its transfers, and ranks that share cores.

The work of a stage is its matmuls by shape, csrc's kernels by their numbers, and Python. Transfers
are those of docs/parallelism.md, each with its measured seconds. Ranks that
outnumber the cores share them: an action goes on at cores / (ranks that work) of its speed, and a
rank that waits gives its share to the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pretrain_llama
from benchmarks.planning.cpu_host import Host, Product, Rates
from forecast.recording import record
from forecast.traffic import rows
from mpu.launch import Launch
from mpu.pipeline.play import cores
from mpu.pipeline.simulate import Costs, simulate
from training.run.model_profile import make_grid, rank_parameters
from training.run.pipeline_stages import rank_stages
from training.settings import batch_size
from training.settings.config import Config
from training.settings.pipeline_schedule import schedule_of

PROVIDER = pretrain_llama.model_provider
AXES = {"pp_back": "pp"}  # the ranks of both are a pipeline's
IN_STEP = ("tp", "cp", "tp_kv", "pp")  # axes of which each micro-batch has transfers


@dataclass(frozen=True)
class Rank:
    """The sizes of what one rank does with a micro-batch. tokens: those of its matmuls."""

    dtype: str
    tokens: int
    own: int  # tokens of hidden states: a part under sequence parallelism
    sequence: int  # all tokens of a row
    rows: int
    cp: int
    hidden: int
    heads: int
    groups: int
    head_size: int
    ffn: int
    vocab: int

    @classmethod
    def of(cls, config: Config) -> "Rank":
        m, p = config.model, config.parallel
        tp, cp = p.tensor_model_parallel_size, p.context_parallel_size
        tokens = config.batch.micro_batch_size * m.seq_length // cp
        every = m.num_query_groups or m.num_attention_heads
        assert m.vocab_size is not None
        padded = -(-m.vocab_size // (128 * tp)) * 128
        return cls(
            dtype=str(config.run.dtype).removeprefix("torch."), tokens=tokens,
            own=tokens // tp if p.sequence_parallel else tokens, sequence=m.seq_length,
            rows=config.batch.micro_batch_size, cp=cp, hidden=m.hidden_size,
            heads=m.num_attention_heads // tp, groups=max(1, every // tp),
            head_size=m.kv_channels, ffn=m.ffn_hidden_size // tp, vocab=padded,
        )  # fmt: skip

    @property
    def pairs(self) -> int:
        """Return the numbers of queries, each times the keys of its row."""
        return self.tokens * self.sequence * self.heads * self.head_size

    def linear(self, i: int, o: int) -> list[Product]:
        """Return forward, dgrad and wgrad of a linear layer of local sizes."""
        t, kind = self.tokens, self.dtype
        return [Product("forward", kind, t, o, i), Product("dgrad", kind, t, i, o),
                Product("wgrad", kind, o, i, t)]  # fmt: skip

    @property
    def of_layer(self) -> list[Product]:
        """Return the matmuls of F and B of a layer."""
        inner = self.heads * self.head_size
        qkv = inner + 2 * self.groups * self.head_size
        return [*self.linear(self.hidden, qkv), *self.linear(inner, self.hidden),
                *self.linear(self.hidden, 2 * self.ffn),
                *self.linear(self.ffn, self.hidden)]  # fmt: skip

    @property
    def of_head(self) -> list[Product]:
        return self.linear(self.hidden, self.vocab)


class Cost(NamedTuple):
    """Seconds of F, of B and of W."""

    forward: float
    input_gradient: float
    weight_gradient: float

    def plus(self, other: "Cost", times: float = 1.0) -> "Cost":
        return Cost(*(a + times * b for a, b in zip(self, other, strict=True)))


NOTHING = Cost(0.0, 0.0, 0.0)


def matmuls(rates: Rates, products: list[Product]) -> Cost:
    """Return what products take, by their kinds."""
    sums = dict.fromkeys(("forward", "dgrad", "wgrad"), 0.0)
    for each in products:
        sums[each.kind] += rates.product(each)
    return Cost(*sums.values())


def parts(
    rates: Rates, r: Rank, again: bool = False, context: Sequence[float] = (0.0, 0.0)
) -> tuple[Cost, Cost, Cost]:
    """Return what a rank takes for a layer, the embedding and the head.

    again: B runs F again. context: of Host.context.
    """
    kind, hidden, pairs = r.dtype, r.own * r.hidden, r.pairs
    qkv = r.tokens * (r.heads + 2 * r.groups) * r.head_size
    glue = rates.call("glue", kind, hidden)

    def passes(way: str) -> float:
        return (
            2 * rates.call(f"norm_{way}", kind, hidden) + rates.call("rope", kind, qkv)
            + rates.call(f"swiglu_{way}", kind, r.tokens * 2 * r.ffn)
            + rates.call(f"attention_{way}", kind, pairs)
        )  # fmt: skip

    rest = (glue + rates.layer + context[0] + context[1] * pairs) / 3
    layer = matmuls(rates, r.of_layer).plus(
        Cost(passes("forward") + rest, passes("backward") + 2 * rest, 0.0)
    )
    if again:
        layer = layer.plus(Cost(0.0, layer.forward, 0.0))
    logits = r.tokens * r.vocab
    norms = [rates.call(f"norm_{way}", kind, hidden) for way in ("forward", "backward")]
    loss = [rates.call(f"softmax_{name}", kind, logits) for name in ("stats", "gradient")]
    head = matmuls(rates, r.of_head).plus(Cost(norms[0] + loss[0], norms[1] + loss[1], 0.0))
    return layer, Cost(glue / 3, 2 * glue / 3, 0.0), head


@dataclass(frozen=True)
class Told:
    """A step's seconds, and what they are made of where nothing waits."""

    step: float
    compute: float
    transfers: float
    sums: float
    update: float


def told(host: Host, config: Config) -> Told:
    """Return the seconds of a step of a run, all of whose ranks are on this host."""
    p, ranks = config.parallel, config.parallel.world_size
    rates, r, count = host.of(ranks), Rank.of(config), batch_size.micro_batches(config, 0)
    schedule, width = schedule_of(config, count), p.pipeline_model_parallel_size
    beside, after, message = transfers(host, config, count)
    context = host.context.get(p.cp_comm_type, (0.0, 0.0)) if r.cp > 1 else (0.0, 0.0)
    layer, first, last = parts(rates, r, p.recompute_granularity == "full", context)
    work, update = dict[int, Cost](), 0.0
    for rank in range(width):
        held_stages = rank_stages(config, PROVIDER, rank)
        one = (rates.micro_batch / width + beside[rank]) / len(held_stages)
        for chunk, stage in enumerate(held_stages):
            cost = Cost(one / 3, 2 * one / 3, 0.0).plus(layer, len(stage.layers))
            cost = cost.plus(first, float(stage.embedding)).plus(last, float(stage.loss))
            work[schedule.stage(rank, chunk)] = cost
        held = rank_parameters(config, PROVIDER, tuple(held_stages), rank)
        numbers = sum(each.entry.numel for each in held.values())
        shard = p.gradient_ranks if p.zero else 1
        own = rates.call("update", r.dtype, numbers / shard) + rates.step
        own += rates.step_layer * sum(len(stage.layers) for stage in held_stages)
        update = max(update, own)
    crowd = max(1.0, ranks / host.cores) * host.slower(ranks)
    stages = [[work[n][part] for n in range(schedule.stages)] for part in range(3)]
    body = simulate(
        schedule, Costs(*stages, message),
        speed=cores(host.cores, ranks // width, host.slower(ranks)),
    ).step  # fmt: skip
    compute = count * max(
        sum(sum(work[schedule.stage(n, chunk)]) for chunk in range(schedule.chunks)) - beside[n]
        for n in range(width)
    )
    sums = max(after)
    step = body + (sums + update) * crowd
    return Told(step, compute * crowd, count * max(beside) * crowd, sums * crowd, update * crowd)


def transfers(host: Host, config: Config, count: int) -> tuple[list[float], list[float], float]:
    """Return each pipeline rank's seconds of transfers in a micro-batch, those after the last one,
    and the seconds until a message between stages is there.
    """
    grid = make_grid(config, Launch(0, config.parallel.world_size))
    width = grid.pp_size
    beside, after, message = [0.0] * width, [0.0] * width, 0.0
    for rank, recording in record(config, pretrain_llama).items():
        found: dict[tuple[str, str, int], list[int]] = {}  # by axis, verb and peer: calls, bytes
        for row in (each for each in rows(recording) if each.sent):
            of = found.setdefault((AXES.get(row.axis, row.axis), row.verb, row.peer), [0, 0])
            of[0], of[1] = of[0] + row.times, of[1] + row.sent
        for (axis, verb, _), (calls, sent) in found.items():
            ranks = 2 if verb == "send" else grid.groups(axis).shape[1]
            one = host.transfer(verb, ranks, sent / calls)
            if axis == "pp" and verb == "send":
                message = max(message, one)
            if calls >= count and axis in IN_STEP:
                beside[rank] += one * calls / count
            else:
                after[rank] += one * calls
    return beside, after, message
