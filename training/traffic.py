# SPDX-License-Identifier: Apache-2.0
"""Work out, from a Config alone, what one rank sends in a step: which collectives, of how many
bytes. Scalars and what happens at start-up are left out.
"""

from collections import Counter
from dataclasses import dataclass
from math import prod

from mpu.zero.layout import BucketLayout
from training import batch_schedule, buffers, estimate, pipeline
from training.activations import own_tokens
from training.config import Config
from training.estimate import Shapes


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in one step: how many, and the bytes of the whole tensor of each."""

    axis: str
    verb: str
    times: int
    bytes: int
    size: int  # ranks of the axis

    @property
    def sent(self) -> int:
        """Return the bytes one rank sends a step: of a collective, in a ring, (size - 1)/size of
        the tensor, twice for an all-reduce."""
        if self.verb == "send":
            return self.times * self.bytes
        factor = 2 if self.verb == "all-reduce" else 1
        return self.times * factor * self.bytes * (self.size - 1) // self.size


def traffic(config: Config, pp_rank: int = 0, parameters: Shapes | None = None) -> list[Traffic]:
    """List what a rank sends in a step; scalars and start-up are left out.

    Per layer and micro-batch: under SP 2 all-gathers and 2 reduce-scatters forward, 4 and 2
    backward, 2 more gathers where W is apart from B; else 2 all-reduces each way. The embedding
    and the output layer add one layer's end each. Full recomputation repeats the forward ones. A
    stage sends its output on and its input's gradient back. Of the data-parallel axis see `_data`.
    """
    m, p = config.model, config.parallel
    t, pp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size
    stages = pipeline.rank_stages(config, pp_rank)
    parameters = parameters or estimate.shapes(config, stages=stages)
    buckets = estimate.flats(config, pp_rank, parameters)
    steps = batch_schedule.micro_batches(config, 0)
    split = pipeline.schedule_of(config, steps).split
    tokens = m.seq_length * config.batch.micro_batch_size
    hidden = m.hidden_size * config.run.dtype.itemsize  # bytes of one token's
    tensor, acc = tokens * hidden, estimate.accumulate_bytes(config)
    layers = sum(len(s.layers) for s in stages)
    again = sum(pipeline.recomputed_layers(config, s) for s in stages)
    embedding, loss = any(s.embedding for s in stages), any(s.loss for s in stages)
    out = []
    if t > 1:
        if p.sequence_parallel:
            # embedding: scatter forward, gather backward; output layer: 2 gathers, 1 scatter
            gathers = (6 + 2 * split) * layers + 2 * again + embedding + 2 * loss
            scatters = 4 * layers + 2 * again + embedding + loss
            out.append(Traffic("tp", "all-gather", steps * gathers, tensor, t))
            out.append(Traffic("tp", "reduce-scatter", steps * scatters, tensor, t))
            norms = sum(prod(s) for s in parameters.values() if len(s) == 1)
            out.append(Traffic("tp", "all-reduce", 1, norms * acc, t))
        else:
            times = 4 * layers + 2 * again + embedding + loss
            out.append(Traffic("tp", "all-reduce", steps * times, tensor, t))
        if loss:
            out.append(Traffic("tp", "all-gather", steps, t * 3 * tokens * acc, t))
    if pp > 1:
        messages = steps * pipeline.messages(config, pp_rank)
        out.append(Traffic("pp", "send", messages, own_tokens(config) * hidden, pp))
        if not m.untie_embeddings_and_output_weights and embedding != loss:
            (tied,) = (
                parameters[n] for n in ("embedding.weight", "head.weight") if n in parameters
            )
            out.append(Traffic("pp", "all-reduce", 1, prod(tied) * acc, 2))
    return out + _data(config, buckets)


def _data(config: Config, flats: list[BucketLayout]) -> list[Traffic]:
    """List what a rank sends to those with other samples.

    Level 0 all-reduces every gradient once a step; --grad-reduce-in-bf16 makes it a reduce-scatter
    in bf16 and an all-gather of the sums. From level 1 on gradients are reduce-scattered, once a
    step or, with --zero-reduce-each-microbatch, once a micro-batch; with several instances of the
    optimizer the sums of a share are all-reduced across them. Updated weights are all-gathered once
    a step; at level 3 blocks are gathered when a micro-batch uses them, in a pipeline once a step.
    """
    p, steps = config.parallel, batch_schedule.micro_batches(config, 0)
    acc, weight = estimate.accumulate_bytes(config), config.run.dtype.itemsize
    wire = 2 if p.grad_reduce_in_bf16 else estimate.gradient_bytes(config)
    whole = sum(flat.length for flat in flats)
    last = sum(flat.length for flat in flats if flat.axes)
    if not p.zero:
        ranks = p.data_parallel_size
        rows = [Traffic("dp", "all-reduce", 1, whole * acc, ranks)]
        if wire < acc:
            rows = [
                Traffic("dp", "reduce-scatter", 1, whole * wire, ranks),
                Traffic("dp", "all-gather", 1, whole * acc, ranks),
            ]
        return [row for row in rows if ranks > 1]
    ranks, copies = p.shard_size, p.num_distributed_optimizer_instances
    rows = [Traffic("dp", "reduce-scatter", 1, whole * wire, ranks)]
    if p.zero_reduce_each_microbatch:
        rows = [
            Traffic("dp", "reduce-scatter", steps, (whole - last) * wire, ranks),
            Traffic("dp", "reduce-scatter", 1, last * wire, ranks),
        ]
    rows.append(Traffic("dp", "all-reduce", 1, whole // ranks * acc, copies))
    if p.zero < 3:
        rows.append(Traffic("dp", "all-gather", 1, whole * weight, ranks))
    else:
        rows.append(Traffic("dp", "all-gather", 1, last * weight, ranks))
        sizes = Counter(buffers.gathers(config, flats, steps))
        rows += [Traffic("dp", "all-gather", n, size * weight, ranks) for size, n in sizes.items()]
    return [row for row in rows if row.size > 1 and row.bytes]
